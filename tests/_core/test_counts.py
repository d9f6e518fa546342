import pytest

from odb_nodes._core.counts import counted


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (1200, "1,200 samples")],
)
def test_a_count_has_its_noun_in_the_right_number(number, words):
    assert counted(number, "sample") == words
