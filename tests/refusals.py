"""Tables of what is refused, as tests."""

import pytest


def refuses(rows, call=lambda make: make(), error=None):
    """Return a test: what is called with each row raises the error of the row, with its words.

    Args:
        rows: the arguments of a call, the type of the error, and a pattern of its message.
        call: what is called. By default, a row has a function without arguments.
        error: that of all rows, which have none of their own then.
    """

    @pytest.mark.parametrize("row", rows)
    def test(row):
        *given, words = row
        kind = given.pop() if error is None else error
        with pytest.raises(kind, match=words):
            call(*given)

    return test
