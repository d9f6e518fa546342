import io
import logging
import sys
import time

import pytest
from tqdm import std

from odb_nodes._core import progress
from odb_nodes._core.progress import Bar, SlowProgress


@pytest.fixture
def clock(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    ("first_s", "seconds"),
    [(1.0, [10, 20, 40, 80, 140, 200]), (25.0, [25, 50, 100, 160]), (0.0, [])],
)
def test_lines_come_soon_and_then_each_minute_and_say_how_far_it_is(
    clock, caplog, first_s, seconds
):
    slow = SlowProgress("samples read", 200)
    clock[0] += first_s  # of the first item
    slow.update(1)
    for done in range(2, 202 - int(first_s)):
        clock[0] += first_s > 0
        slow.update(done)
    assert [int(message.split()[-2]) for message in caplog.messages] == seconds
    if first_s == 1:
        assert caplog.messages[1] == "samples read: 20 of 200 after 20 s"
    assert {(one.name, one.levelno) for one in caplog.records} <= {("odb_nodes", logging.WARNING)}


@pytest.mark.parametrize(("rank", "lines"), [(0, 3), (1, 0)])
def test_a_bar_without_a_terminal_is_lines_of_rank_0(monkeypatch, caplog, capsys, rank, lines):
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [*Bar(iter("ab"), "letters", 2)] == ["a", "b"]
    with Bar(None, "trials", None) as bar:
        bar.set_postfix_str("8 x 16 fits", refresh=False)
        bar.update()
    expected = ["letters: 1 of 2 after 0 s", "letters: 2 of 2 after 0 s"]
    assert caplog.messages == [*expected, "trials: 1 after 0 s; 8 x 16 fits"][:lines]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [(-1, 23), (79, -1)])
def test_a_terminal_without_a_size_has_a_bar(monkeypatch, caplog, capsys, size):
    """tqdm takes one off the rows and columns that the terminal tells: of 0, -1 are left."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(std, "_screen_shape_wrapper", lambda: lambda file: size)
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    assert [*Bar(range(3), "numbers", 3, mininterval=0)] == [0, 1, 2]
    shown = capsys.readouterr().err
    assert "3/3" in shown and "█" * 20 in shown
    assert caplog.messages == []


def test_without_stderr_there_are_lines(monkeypatch, caplog):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    for stderr in (closed, None):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert [*Bar(range(3), "numbers", 3)] == [0, 1, 2]
        assert "numbers: 1 of 3 after 0 s" in caplog.messages
        caplog.clear()
