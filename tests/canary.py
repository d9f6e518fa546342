"""Says which library has changed, where we rely on something inside of it."""

from contextlib import contextmanager
from importlib.metadata import version

import pytest


@contextmanager
def relies_on(library, what, used_in):
    """Fail with a message that names the library, what has changed in it, and where we use it.

    Args:
        library: the name of its distribution.
        what: the private name or behaviour, with its module.
        used_in: the file of ours that relies on it, below odb_nodes/.
    """
    try:
        yield
    except Exception as error:
        pytest.fail(
            f"{library} {version(library)} has changed: {what} is not what odb_nodes/{used_in} "
            f"relies on ({type(error).__name__}: {error}). Adapt that file to both versions, or "
            "bound the version in pyproject.toml."
        )
