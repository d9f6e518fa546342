"""A public class refuses an argument of a wrong type by an error that shows the argument's name."""

import inspect

import pytest

import odb_nodes
from odb_nodes import LengthObserver, PaddingCollate, ShardedSampler, WindowBucketer


def source():
    return ShardedSampler(8)


def groups():
    return WindowBucketer(LengthObserver(source()), 8, 4)


ARGUMENTS = {
    "FeedSource": lambda: {"source": source()},
    "GroupCollator": lambda: {"source": groups(), "collate_fn": PaddingCollate()},
    "LengthObserver": lambda: {"source": source()},
    "Loader": lambda: {"root": source()},
    "ODBDataLoader": lambda: {"dataset": [{"input_ids": [1, 2]}] * 8, "token_budget": 8},
    "PackedCollate": dict,
    "PaddingCollate": dict,
    "ParallelProcessor": lambda: {"source": source(), "process_fn": len},
    "PerSource": lambda: {"functions": {"chat": len}},
    "RankAligner": lambda: {"source": groups()},
    "ReadAhead": lambda: {"source": source(), "depth": 2},
    "ShardedSampler": lambda: {"size": 8},
    "SourceMixer": lambda: {"sources": {"chat": source(), "code": source()}},
    "TokenBudget": lambda: {"tokens": 8},
    "WeightSchedule": lambda: {"places": [(0, {"chat": 1.0})]},
    "WeightedSampler": lambda: {"weights": [1.0, 2.0]},
    "WindowBucketer": lambda: {"source": LengthObserver(source()), "budget": 8, "window": 4},
    "WorkerOptions": dict,
}
"""Arguments of a class that are valid."""

VALUES = [
    -1,
    2.5,
    float("nan"),
    True,
    None,
    "x",
    b"x",
    [],
    ["x"],
    (1, 2),
    {},
    {"x": 1},
    object(),
    len,
]


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.filterwarnings("ignore")
def test_no_wrong_argument_is_an_error_that_does_not_show_a_name(name):
    public_class, arguments = getattr(odb_nodes, name), ARGUMENTS[name]
    public_class(**arguments())
    for parameter in inspect.signature(public_class).parameters:
        for value in VALUES:
            try:
                public_class(**{**arguments(), parameter: value})
            except (TypeError, ValueError, ImportError) as error:
                assert "`" in str(error), f"{parameter}={value!r}: {error}"
