"""The node of docs/own-nodes.md in a process that is killed, and goes on from a file."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from odb_nodes import IterableSource, LengthObserver

PAGE = Path(__file__).parents[2] / "docs" / "own-nodes.md"
NODE = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1]
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


def with_extra(node):
    node.late = 1
    return node


MISTAKES = {  # what replaces a piece of the node -> the error, when it is made or asked for a state
    "another STATE": (("    STATE = FilterState\n", ""), "must return its `STATE`.*`NodeState`"),
    "no restore": (("def restore(", "def restored("), "`ShortSampleFilter` must define `restore`"),
    "no save": (("def save(", "def saved("), "`ShortSampleFilter` must define `save`"),
    "nothing saved": (("return FilterState(", "FilterState("), "but returned None"),
    "slots": (("kw_only=True", "kw_only=True, slots=True"), "without `slots`"),
    "an attribute": (
        ("return FilterState(", "return with_extra(FilterState("),
        r"has \['late'\], which are no fields of `FilterState`",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_node_of_ones_own_is_named_before_a_state_is_out(mistake):
    (before, after), message = MISTAKES[mistake]
    code = NODE.replace(before, after)
    if mistake == "an attribute":
        code = code.replace("dropped_samples=self.dropped_samples)", "dropped_samples=1))")
    assert code != NODE
    names = {"with_extra": with_extra, "__name__": "own_node"}
    with pytest.raises(TypeError, match=message):
        exec(code, names)
        node = names["ShortSampleFilter"](LengthObserver(IterableSource([], 0, 1)), 8)
        node.reset()
        node.state_dict()
