import logging
import time

import pytest

from odb_nodes._core import progress
from odb_nodes._core.progress import SlowProgress


def seconds_of(caplog):
    return [int(record.getMessage().split()[-2]) for record in caplog.records]


def test_lines_come_at_growing_intervals_and_say_how_far_it_is(monkeypatch, caplog):
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    slow = SlowProgress("samples read", 200)
    for done in range(1, 201):
        now_s += 1.0
        slow.update(done)
    assert seconds_of(caplog) == [10, 20, 40, 80, 160]
    assert caplog.messages[1] == "samples read: 20 of 200 after 20 s"
    assert {(one.name, one.levelno) for one in caplog.records} == {("odb_nodes", logging.WARNING)}


def test_what_is_fast_says_nothing(caplog):
    quick = SlowProgress("samples read", 10**5)
    for done in range(10**5):
        quick.update(done)
    assert caplog.messages == []


@pytest.mark.parametrize("before_s", [3.0, 25.0])
def test_the_first_line_waits_for_an_item(monkeypatch, caplog, before_s):
    monkeypatch.setattr(progress, "FIRST_S", 5.0)
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    slow = SlowProgress("samples read", 9)
    now_s = before_s
    slow.update(1)
    assert seconds_of(caplog) == ([] if before_s < 5 else [25])
