"""What a `Ledger` writes, when it writes, and what it does if it cannot write."""

import errno
import os
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import epoch_of, info_of, record, rows_of

from odb_nodes import Ledger, StateError, audit
from odb_nodes._support.checks import MAX_KEY
from odb_nodes.training.ledger.history import RecordedRun, read_steps
from odb_nodes.training.ledger.records import MAX_REPEAT, ROW_BYTES

KEYS = (st.integers(0, 9), st.integers(2**32 - 3, 2**32 + 3), st.integers(0, MAX_KEY))
samples = st.tuples(
    st.one_of(st.none(), *KEYS),
    st.sampled_from(["", "", "web", "code/py", "\u00fc\u4e2d"]),
    st.one_of(st.just(0), st.integers(0, MAX_REPEAT)),
)
left_out_samples = st.tuples(
    st.one_of(st.none(), st.integers(0, MAX_KEY)),
    st.sampled_from(["", "web", "dropped"]),
    st.sampled_from(["", "dropped", "unemitted", "no image", "x" * 300]),
)


@given(
    st.lists(
        st.tuples(st.lists(samples, max_size=5), st.lists(left_out_samples, max_size=3)), min_size=1
    )
)
def test_everything_that_is_recorded_is_read_again(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("ledger")
    expected = []
    with Ledger(folder) as ledger:
        for step, (rows, out) in enumerate(steps):
            keys, sources, repeats = zip(*rows, strict=True) if rows else ((), (), ())
            info = info_of(step, keys, sources=sources, repeats=repeats, left_out=out)
            ledger.record(info)
            expected.append(
                [(*row, "") for row in rows]
                + [(key, source, 0, reason or "skipped") for key, source, reason in out]
            )
    assert rows_of(folder) == expected
    assert not RecordedRun(folder).damage()


def test_steps_are_read_with_the_samples_of_each_rank(tmp_path):
    for rank in range(2):
        last = info_of(1, [2 + rank], left_out=[(4 + rank, "empty")], ends=True)
        record(tmp_path, info_of(0, [rank]), last, rank=rank, world_size=2)
    record(tmp_path, info_of(0, [6], epoch=1), rank=1, world_size=2)  # without rank 0
    steps = read_steps(tmp_path, 0, [1, 5])
    assert [*steps] == [1] and all(info.ends_epoch for info in steps[1])
    assert [info.keys for info in steps[1]] == [(2,), (3,)]
    assert [[sample[::2] for sample in info.left_out] for info in steps[1]] == [
        [(4, "empty")],
        [(5, "empty")],
    ]
    assert read_steps(tmp_path, 1, [0]) == {}


def test_a_step_may_have_many_sources(tmp_path):
    sources = [f"source {number}" for number in range(70_000)]
    record(tmp_path, info_of(0, range(70_000), sources=sources))
    (rows,) = rows_of(tmp_path)
    assert [row[1] for row in rows] == sources


def test_what_is_no_key_of_63_bits_counts_as_none(tmp_path):
    record(tmp_path, info_of(0, [1, -1, 2**63, 2**70, 2]))
    assert [row[0] for row in rows_of(tmp_path)[0]] == [1, None, None, None, 2]


def test_a_sample_and_a_step_take_16_bytes_each(tmp_path):
    far, drawn = range(1 << 40, (1 << 40) + 16), range(10**6, 10**6 + 16)
    options = {"sources": ["a", "b"] * 8, "repeats": drawn, "left_out": [(3, "a", "empty")]}
    record(tmp_path, *(info_of(step, far, **options) for step in range(300)))
    assert (tmp_path / "rank-00000.ledger").stat().st_size // (300 * 18) == ROW_BYTES


def test_an_attempt_begins_with_the_first_step_that_is_recorded(tmp_path):
    record(tmp_path)
    assert (tmp_path / "rank-00000.ledger").read_bytes() == b""
    for begin, end in ((0, 4), (2, 7)):
        record(tmp_path, *(info_of(step, [step], epoch=3) for step in range(begin, end)))
    assert audit(tmp_path).attempts == {0: ((3, 0), (3, 2))}


def test_a_process_that_goes_back_says_so(tmp_path):
    with Ledger(tmp_path) as ledger:
        for step in range(5):
            ledger.record(info_of(step, [step]))
            assert len(rows_of(tmp_path)) == step + 1  # in the file at once
        ledger.begin_attempt()
        for step in range(2, 6):
            ledger.record(info_of(step, [step], ends=step == 5))
    assert audit(tmp_path, 6).ok


def test_rank_and_world_size_are_those_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with Ledger(tmp_path / "new" / "folder") as ledger:
        ledger.record(info_of(0, [1]))
    assert ledger.path.name == "rank-00002.ledger"
    (attempt,) = RecordedRun(ledger.path.parent).attempts
    assert (attempt.rank, attempt.world_size) == (2, 4)


def closed(folder):
    ledger = Ledger(folder)
    ledger.close()
    ledger.close()
    return ledger


REFUSALS = [
    (lambda folder: closed(folder).record(info_of(0)), ValueError, "the ledger is closed"),
    (lambda folder: Ledger(folder).record({"input_ids": []}), TypeError, "`info` must be"),
    (
        lambda folder: Ledger(folder).record(info_of(0, [0], repeats=[2**32])),
        ValueError,
        "`info.row_repeats` must be at most 4,294,967,295, but one is 4,294,967,296",
    ),
    (lambda folder: Ledger(folder, rank=2, world_size=2), ValueError, "`rank` must be in 0..1"),
    (lambda folder: Ledger(3), TypeError, "`folder` must be"),
    (lambda folder: Ledger(folder / "file"), ValueError, "file` is a file"),
    (lambda folder: Ledger(folder / "file" / "ledger"), OSError, "file"),
    (lambda folder: [Ledger(folder), Ledger(folder)], RuntimeError, "its own folder"),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSALS)
def test_what_is_wrong_is_refused(tmp_path, call, error, match):
    (tmp_path / "file").write_text("")
    with Ledger(tmp_path, rank=1, world_size=2), pytest.raises(error, match=match):
        call(tmp_path)


# --- where it cannot write ------------------------------------------------------------------------


def full(file, data, free=0):
    """`os.write` on a disk that has so many bytes left."""
    if free:
        os.pwrite(file, data[:free], os.fstat(file).st_size)
        return min(free, len(data))
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("free", [0, 10])
def test_a_full_disk_warns_once_and_is_a_gap(tmp_path, monkeypatch, free, begun):
    steps, first = epoch_of(0, 1), 2 * begun
    with monkeypatch.context() as patch:
        ledger = Ledger(tmp_path) if begun else None
        for info in steps[:first]:
            ledger.record(info)
        patch.setattr(os, "write", lambda file, data: full(file, data, free))
        if not begun and not free:
            patch.setattr(os, "open", lambda *_: full(0, b""))
        with pytest.warns(UserWarning, match="cannot be written.*No space left") as caught:
            ledger = ledger or Ledger(tmp_path)
            for info in steps[first:5]:
                ledger.record(info)
            ledger.sync()
    assert len(caught) == 1
    for info in steps[5:]:
        ledger.record(info)
    ledger.close()
    problems = audit(tmp_path, 90).problems
    text = f"rank 0: {5 - first} steps from epoch 0 step {first} on could not be written"
    assert any(problem.startswith(text) for problem in problems)
    if begun:
        assert "rank 0, epoch 0: not recorded: step 2 to 4." in problems


def lose(ledger, monkeypatch, *steps, on_close=False):
    """Record steps while the disk is full; and close, before it has space again."""
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="No space") as caught:
        patch.setattr(os, "write", full)
        for info in steps:
            ledger.record(info)
        if on_close:
            ledger.close()
    assert len(caught) == 1


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("first", [0, 3])
def test_a_tail_that_could_not_be_written_is_recorded_on_close(tmp_path, monkeypatch, first, ended):
    steps = epoch_of(0, 1)
    ledger = Ledger(tmp_path)
    for info in steps[:first]:
        ledger.record(info)
    lose(ledger, monkeypatch, *steps[first:])
    ledger.close(ended=ended)
    result = audit(tmp_path)
    assert result.state == "damaged" and result.open_ranks == ((), (0,))[not ended]
    lost = f"{len(steps) - first} steps from epoch 0 step {first} on could not be written"
    assert result.problems == (f"rank 0: {lost}: the disk was full, or the file was deleted.",)
    assert result.attempts == {0: ((0, 0),) * (first > 0)}
    assert f"PROBLEM: rank 0: {lost}" in str(result)
    with pytest.raises(StateError, match=lost):
        read_steps(tmp_path, 0, [0])
    with Ledger(tmp_path) as ledger:  # the run goes on from a checkpoint before the gap
        for info in steps[max(0, first - 1) :]:
            ledger.record(info)
    result = audit(tmp_path, 90)
    assert result.ok and result.epochs[0].is_complete, result


def test_a_tail_that_is_lost_on_a_disk_that_stays_full_leaves_the_run_open(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path)
    ledger.record(info_of(0, [0]))
    lose(ledger, monkeypatch, info_of(1, [1]), on_close=True)
    assert audit(tmp_path).state == "open"


@pytest.mark.parametrize("ranks_per_process", [1, 2])
def test_a_gap_is_not_taken_for_a_checkpoint(tmp_path, monkeypatch, ranks_per_process):
    """Other ranks may have been killed before its step."""
    options = {"ranks_per_process": ranks_per_process}
    steps = [info_of(step, [step], **options) for step in range(3 * ranks_per_process + 3)]
    lost = len(steps) - 2
    ledger = Ledger(tmp_path, rank=0, world_size=2)
    for info in steps[:lost]:
        ledger.record(info)
    lose(ledger, monkeypatch, steps[lost])
    ledger.record(steps[-1])
    ledger.close(ended=False)
    others = [info_of(step, [100 + step], **options) for step in range(ranks_per_process)]
    record(tmp_path, *others, rank=1, world_size=2, ended=False)
    problems = "".join(audit(tmp_path).problems)
    assert "could not be written" in problems and "has no end" not in problems, problems


def test_going_back_to_a_gap_fills_it_and_an_interrupt_breaks_no_chain(tmp_path, monkeypatch):
    steps = epoch_of(0, 1)
    with Ledger(tmp_path) as ledger:
        for info in steps[:4]:
            ledger.record(info)
        lose(ledger, monkeypatch, *steps[4:6])
        ledger.begin_attempt()
        ledger.record(steps[4])
        with monkeypatch.context() as patch:  # within a write
            patch.setattr(os, "write", lambda file, data: (full(file, data, 9**9), int("x")))
            with pytest.raises(ValueError):
                ledger.record(steps[5])
        for info in steps[6:]:
            ledger.record(info)
    result = audit(tmp_path, 90)
    assert result.ok and result.epochs[0].is_complete, result.problems


@pytest.mark.parametrize("deleted", ["file", "folder"])
@pytest.mark.parametrize("syncs", [False, True])
def test_a_file_that_is_deleted_is_noticed_and_made_anew(tmp_path, deleted, syncs):
    folder = tmp_path / "ledger"
    ledger = Ledger(folder)
    steps = epoch_of(0, 1)
    for info in steps[:3]:
        ledger.record(info)
    ledger.path.unlink()
    if deleted == "folder":
        folder.rmdir()
    if syncs:
        ledger.sync()
    with pytest.warns(UserWarning, match="cannot be written.*deleted"):
        ledger.record(steps[3])
    for info in steps[4:]:
        ledger.record(info)
    ledger.close()
    result = audit(folder)
    assert result.problems[0].startswith("rank 0: 1 step from epoch 0 step 3 on could not be")
    assert "epoch 0: the steps before step 3 are not recorded." in result.notes
    ledger = Ledger(folder)
    ledger.record(steps[0])
    ledger.path.unlink()
    with pytest.warns(UserWarning, match="deleted"):
        ledger.close()
    assert not ledger.path.exists()


@pytest.mark.slow
def test_a_forked_child_records_nothing_and_holds_no_lock(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.record(info_of(0, [0]))
    (ready, says), (waits, ends) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads
        child = os.fork()
    if child == 0:
        try:
            os.write(says, b"x")
            os.read(waits, 1)
            ledger.record(info_of(1, [1]))
            ledger.close()
        finally:
            os._exit(0)
    try:
        os.read(ready, 1)
        with pytest.raises(RuntimeError):  # the child has not let go of the parent's lock
            Ledger(tmp_path)
        ledger.record(info_of(1, [2]))
        ledger.close(ended=False)  # as a kill does
        with Ledger(tmp_path):  # though the child lives
            pass
    finally:
        os.write(ends, b"x")
        os.waitpid(child, 0)
        for file in (ready, says, waits, ends):
            os.close(file)
    assert [row[0][0] for row in rows_of(tmp_path)] == [0, 2]


def test_no_file_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        Ledger(tmp_path).record(info_of(0))
    with Ledger(tmp_path) as ledger:
        ledger.record(info_of(0))
    del ledger
    assert len(os.listdir("/proc/self/fd")) == before
