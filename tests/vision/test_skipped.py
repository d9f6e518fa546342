"""What is said of a sample that processing left out."""

import pytest
from torchdata.nodes import IterableWrapper

from odb_nodes import LengthObserver, Loader, Skipped, WindowBucketer


@pytest.mark.parametrize("arguments, named", [((3, "x"), "reason"), (("a", 4), "message")])
def test_it_must_be_strings(arguments, named):
    with pytest.raises(TypeError, match=f"`{named}` of `Skipped` must be a string, but is . inst"):
        Skipped(*arguments)


@pytest.mark.parametrize(
    "skipped, shown",
    [
        (Skipped("a", "it is bad."), " is skipped (a): it is bad. Further"),
        (Skipped("a"), " is skipped (a). Further"),
        (Skipped("a").of_source("web"), " (source 'web') is skipped (a). Further"),
        (Skipped("a", "bad.").of_source("web"), " (source 'web') is skipped (a): bad. Further"),
    ],
)
def test_the_first_of_a_reason_is_shown_with_or_without_a_message(skipped, shown):
    items = [skipped, {"input_ids": [1]}]
    with pytest.warns(UserWarning) as caught:
        list(Loader(WindowBucketer(LengthObserver(IterableWrapper(items)), 8, 4)))
    (found,) = [str(one.message) for one in caught if "is skipped" in str(one.message)]
    assert f"sample 0 of the epoch{shown} ones are only counted" in found
