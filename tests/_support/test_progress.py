"""Progress of what takes long: lines in a log, or a bar in a terminal."""

import io
import logging
import sys
import time
from multiprocessing import synchronize

import pytest
from tqdm import std

from odb_nodes._support import progress
from odb_nodes._support.progress import Bar, SlowProgress


@pytest.fixture
def clock(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    ("updates_s", "lines_s"),
    [
        (range(1, 201), [10, 20, 40, 80, 140, 200]),
        (range(25, 201), [25, 50, 100, 160]),
        (range(10), []),
    ],
)
def test_progress_lines_come_soon_and_then_each_minute(clock, caplog, updates_s, lines_s):
    slow, start_s = SlowProgress("samples read", 200), clock[0]
    for second in updates_s:
        clock[0] = start_s + second
        slow.update(done=second)
    assert [int(message.split()[-2]) for message in caplog.messages] == lines_s


def test_a_progress_line_is_a_warning_of_the_library(clock, caplog):
    slow = SlowProgress("samples read", 200)
    clock[0] += 20
    slow.update(done=7)
    line = ("odb_nodes", logging.WARNING, "samples read: 7 of 200 after 20 s")
    assert caplog.record_tuples == [line]


def test_a_bar_makes_no_semaphore_which_a_kill_would_leave(monkeypatch):
    monkeypatch.delattr(std.tqdm, "_lock", raising=False)
    monkeypatch.delattr(std.TqdmDefaultWriteLock, "mp_lock", raising=False)
    made = []

    def make(*_, **__):
        made.append("semaphore")
        raise OSError

    monkeypatch.setattr(synchronize.SemLock, "__init__", make)
    Bar(None, "trials", None).close()
    assert not made


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
