"""The node of docs/own-nodes.md in a process that is killed, and goes on from a file."""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from odb_nodes import EpochNode, IterableSource, LengthObserver
from odb_nodes.contract import (
    EpochState,
    NodeState,
    SourceState,
    SourceStates,
    StatefulNode,
    copy_state,
    snapshot,
)
from odb_nodes.testing import assert_resumes_exactly

PAGE = Path(__file__).parents[2] / "docs" / "own-nodes.md"
NODE, EXPLICIT = re.findall(r"```python.*?\n(.*?)```", PAGE.read_text(), re.S)[:2]
JOB = """
import os, signal, sys
from odb_nodes import GroupCollator, IterableSource, LengthObserver, Loader, WindowBucketer
from odb_nodes import load_state, save_state

path, steps = sys.argv[1], int(sys.argv[2])
data = [{"input_ids": [n] * (n % 37 + 1)} for n in range(150)]
kept = ShortSampleFilter(LengthObserver(IterableSource(data, 0, 1)), 8)
loader = Loader(GroupCollator(WindowBucketer(kept, 256, 16)))
if os.path.exists(path):
    loader.load_state_dict(load_state(path))
for batch in loader:
    print(batch["input_ids"].tolist(), flush=True)
    save_state(loader.state_dict(), path)
    steps -= 1
    if not steps:
        os.kill(os.getpid(), signal.SIGKILL)
print(kept.dropped_samples)
"""


def run(path, steps):
    command = [sys.executable, "-c", NODE + JOB, str(path), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.stdout.splitlines(), done.returncode == 0


def test_a_job_with_a_node_of_ones_own_that_is_killed_twice_yields_what_one_run_does(tmp_path):
    expected, ended = run(tmp_path / "whole.pt", 0)
    assert ended
    found = []
    for steps in (3, 5, 0):
        lines, ended = run(tmp_path / "killed.pt", steps)
        assert ended == (not steps)
        found += lines
    assert found == expected


@dataclass(kw_only=True)
class PairsState(EpochState):
    sources: SourceStates
    half: list = field(default_factory=list)


class Pairs(EpochNode):
    """Yields an item of each of two sources, one after the other; all its methods are defaults."""

    STATE = PairsState

    def __init__(self, *sources):
        super().__init__()
        self.sources = dict(zip("ab", sources, strict=True))

    def next(self):
        if not self.half:
            self.half = [next(source) for source in self.sources.values()]
        return self.half.pop(0), self._epochs.epoch


def filtered(kind):
    exec(NODE + EXPLICIT, names := {"__name__": "own_node"})
    data = [{"input_ids": [n] * (n % 37 + 1)} for n in range(40)]
    return names[kind](LengthObserver(IterableSource(data, 0, 1)), 8)


@pytest.mark.parametrize(
    "make",
    [
        partial(filtered, "ShortSampleFilter"),
        partial(filtered, "ExplicitFilter"),
        lambda: Pairs(*(IterableSource(range(9 * n), 0, 1) for n in (1, 2))),
    ],
    ids=["declared", "explicit", "several sources"],
)
def test_a_node_resumes_exactly_by_the_attributes_that_its_state_declares(make):
    assert_resumes_exactly(make, epochs=2)


def test_a_snapshot_that_is_kept_shares_nothing_that_the_node_changes():
    node = Pairs(*(IterableSource(range(9 * n), 0, 1) for n in (1, 2)))
    next(node)
    kept, saved = snapshot(node), node.state_dict()
    list(node)
    assert copy_state(kept) == {name: one for name, one in saved.items() if name != "digest"}


def test_the_node_of_the_page_begins_each_epoch_with_its_defaults():
    node = filtered("ShortSampleFilter")
    dropped = [(list(node), node.reset(), node.dropped_samples)[2] for _ in range(2)]
    assert dropped == [0, 0]
    list(node)
    assert node.dropped_samples > 0


@dataclass(kw_only=True)
class OneOfTwoState(NodeState):
    first: SourceState


class OneOfTwo(StatefulNode):
    """Declares one of the two sources that it holds, and knows a node below the other."""

    STATE = OneOfTwoState

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, (second,)
        self.below = second.source

    def next(self):
        return next(self.first), next(self.second[0])


class SavesOneOfTwo(OneOfTwo):
    def save(self):
        return OneOfTwoState(first=snapshot(self.first))


@pytest.mark.parametrize("kind", [OneOfTwo, SavesOneOfTwo])
def test_a_source_that_the_state_leaves_out_is_an_error_that_names_it(kind):
    first, second = (LengthObserver(IterableSource([5, 6], 0, 1), int) for _ in range(2))
    with pytest.raises(TypeError, match="lacks one for .*'second'"):
        kind(first, second).reset()
    assert next(kind(first, first))  # one node, by two names


def test_an_annotation_that_only_a_type_checker_can_read_is_named():
    @dataclass(kw_only=True)
    class State(NodeState):
        seen: "Missing" = 0  # noqa: F821

    with pytest.raises(TypeError, match="annotations of `State`.* name 'Missing' is not defined"):

        class Node(StatefulNode):
            STATE = State


def with_extra(node):
    node.late = 1
    return node


BOTH = NODE + EXPLICIT
DEFAULT = "dropped_samples: int = 0", "dropped_samples: int"
MISTAKES = {  # what replaces a piece of the node -> the error, when it is made or asked for a state
    "another STATE": (("    STATE = FilterState\n", ""), r"lacks one for \['source'\]"),
    "no source": (("    source: SourceState\n", ""), r"lacks one for \['source'\]"),
    "no STATE": (("    STATE = FilterState\n", ""), "must define `begin_epoch`, or declare as `ST"),
    "no default": (DEFAULT, "`dropped_samples` of `FilterState` must have a default"),
    "nothing saved": (("return FilterState(", "FilterState("), "but returned None"),
    "slots": (("kw_only=True", "kw_only=True, slots=True"), "without `slots`"),
    "an attribute": (
        ("return FilterState(", "return with_extra(FilterState("),
        r"has \['late'\], which are no fields of `FilterState`",
    ),
    "numpy": (("dropped_samples=self.dropped_samples", "dropped_samples=np.int64(1)"), "numpy"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_node_of_ones_own_is_named_before_a_state_is_out(mistake):
    (before, after), message = MISTAKES[mistake]
    is_declared = mistake in ("no STATE", "no default", "no source")
    code = (NODE if is_declared else BOTH).replace(before, after)
    if mistake == "an attribute":
        code = code.replace("dropped_samples=self.dropped_samples)", "dropped_samples=1))")
    assert code not in (NODE, BOTH)
    names = {"with_extra": with_extra, "np": np, "__name__": "own_node"}
    with pytest.raises(TypeError, match=message):
        exec(code, names)
        kind = names.get("ExplicitFilter") or names["ShortSampleFilter"]
        node = kind(LengthObserver(IterableSource([], 0, 1)), 8)
        node.reset()
        node.state_dict()
