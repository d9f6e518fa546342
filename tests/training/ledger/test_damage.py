"""A record that was removed, doubled, moved or changed is found; a torn one is not a hole."""

import os
import random
from itertools import accumulate

import pytest
from ledgers import SIZE, epoch_of, info_of, kind_of, pieces_of, record, write_pieces, write_run

from odb_nodes import Ledger, audit
from odb_nodes.training.ledger.records import HEADER, NAME, ROW_BYTES, VERSION, preamble

MUTATIONS = 300
WORLD_SIZE = 3


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The pieces of each rank's file."""
    folder = tmp_path_factory.mktemp("intact")
    write_run(folder, WORLD_SIZE, kills=(5, 9, 12))
    assert audit(folder, SIZE).ok
    return [pieces_of(path) for path in sorted(folder.iterdir())]


def removed(draw, ranks, rank, index):
    del ranks[rank][index]


def doubled(draw, ranks, rank, index):
    ranks[rank].insert(draw.randrange(index, len(ranks[rank])) + 1, ranks[rank][index])


def moved(draw, ranks, rank, index):
    piece = ranks[rank].pop(index)
    to = draw.randrange(WORLD_SIZE)
    places = {*range(len(ranks[to]) + 1)} - ({index} if to == rank else set())
    ranks[to].insert(draw.choice(sorted(places)), piece)


def swapped(draw, ranks, rank, index):
    other = draw.choice([place for place in range(len(ranks[rank])) if place != index])
    ranks[rank][index], ranks[rank][other] = ranks[rank][other], ranks[rank][index]


def changed(draw, ranks, rank, index):
    piece = bytearray(ranks[rank][index])
    piece[draw.randrange(len(piece))] ^= draw.randrange(1, 256)
    ranks[rank][index] = bytes(piece)


def shortened(draw, ranks, rank, index):
    """Insert or remove some bytes, which moves all later rows."""
    piece = ranks[rank][index]
    start = draw.randrange(len(piece))
    ranks[rank][index] = piece[:start] + piece[start + draw.randrange(1, 16) :]


@pytest.mark.parametrize("mutate", [removed, doubled, moved, swapped, changed, shortened])
def test_a_change_of_one_record_is_found(intact, tmp_path, mutate, exhaustive):
    draw = random.Random(mutate.__name__)
    for _ in range(MUTATIONS if exhaustive else MUTATIONS // 8):
        ranks = [list(pieces) for pieces in intact]
        rank = draw.randrange(WORLD_SIZE)
        index = draw.randrange(len(ranks[rank]))
        mutate(draw, ranks, rank, index)
        write_pieces(tmp_path, ranks)
        result = audit(tmp_path)
        changed_record = (rank, index, kind_of(intact[rank][index]))
        assert any(f"rank {rank}: " in text for text in result.problems), (changed_record, result)
        if mutate is changed and changed_record[2] not in (0, HEADER):
            assert [epoch.epoch for epoch in result.epochs] == [0, 1]  # what follows is read


def test_a_torn_last_record_is_ignored_and_said(tmp_path):
    """A process is killed within a write, or loses its power, and goes on from a checkpoint."""
    steps = epoch_of(0, 1)
    record(tmp_path / "whole", *steps, ended=False)
    whole = audit(tmp_path / "whole")
    start, header, *before, last = pieces_of(tmp_path / "whole/rank-00000.ledger")
    path = tmp_path / "rank-00000.ledger"
    intact = start + header + b"".join(before)
    for torn in (*(last[:size] for size in range(1, len(last))), bytes(5000)):
        path.write_bytes(intact + torn)
        result = audit(tmp_path)
        assert result.state == "open", (torn, result.problems)
        assert not result.epochs[0].is_complete
        assert result.epochs[0].last_step == 6
        assert any(
            f"a torn record of {len(torn):,} bytes is ignored" in note for note in result.notes
        )
        record(tmp_path, *steps[5:], ended=False)
        result = audit(tmp_path)
        assert path.read_bytes().startswith(intact)
        assert result.state == "open" and result.epochs[0].digest == whole.epochs[0].digest
        (note,) = (note for note in result.notes if "torn" in note)
        assert note.endswith(f"a torn record of {len(torn):,} bytes before it was cut off.")
    path.write_bytes(preamble(9999) + header + b"".join(before) + bytes(5000))
    assert audit(tmp_path).state == "damaged"  # the run had ended


@pytest.mark.parametrize("first", [0, 2])
def test_a_kill_at_any_byte_of_the_beginning_of_an_attempt_is_no_damage(tmp_path, first):
    """The header, the names and the first step of one, in a new file or behind another."""
    steps = [info_of(step, [step], sources=["a"], ends=step == 3) for step in range(4)]
    path = tmp_path / "rank-00000.ledger"
    if first:
        record(tmp_path, *steps[: first + 1], ended=False)
    before = path.read_bytes() if first else b""
    record(tmp_path, *steps[first:], ended=False)
    whole, stop = audit(tmp_path, 4), len(path.read_bytes())
    content = path.read_bytes()
    for size in range(len(before), stop - 2 * ROW_BYTES * (3 - first), 5):  # of all places in rows
        path.write_bytes(content[:size])
        assert audit(tmp_path).state == "open", size
        record(tmp_path, *steps[first:], ended=False)
        result = audit(tmp_path, 4)
        assert result.ok and result.epochs[0].digest == whole.epochs[0].digest, size


def attempts_of(folder, *jobs):
    """Ledgers of jobs one after the other, of (ranks, first step, stop, whether it ended)."""
    last = max(stop for _, _, stop, _ in jobs) - 1
    for world_size, first, stop, ended in jobs:
        for rank in range(world_size):
            steps = [
                info_of(step, [step * 4 + rank], sources="a", ends=step == last)
                for step in range(first, stop)
            ]
            record(folder, *steps, rank=rank, world_size=world_size, ended=ended)


@pytest.mark.parametrize(
    "jobs",
    [
        [(1, 0, 2, True), (1, 2, 4, True)],  # it ended twice
        [(1, 0, 2, False), (1, 1, 4, True)],
        [(1, 0, 2, True), (2, 2, 4, True)],
        [(2, 0, 2, True), (1, 2, 4, True)],
    ],
    ids=str,
)
def test_no_cut_of_a_run_that_ended_reads_ok(tmp_path, jobs):
    attempts_of(tmp_path, *jobs)
    was_killed = not all(job[-1] for job in jobs)  # its first attempt alone is a run that was
    assert audit(tmp_path).state == "ended"
    for path in sorted(tmp_path.iterdir())[: jobs[-1][0]]:  # of a rank that goes on
        whole = path.read_bytes()
        boundaries = accumulate(map(len, pieces_of(path)[:-1]))
        for size in {*range(0, len(whole), 3), *boundaries}:
            path.write_bytes(whole[:size])
            result = audit(tmp_path)
            assert not result.ok, (path.name, size)
            is_known = result.state == "damaged" or was_killed or not result.attempts[0]
            assert is_known, (path.name, size)
        path.write_bytes(whole)


def test_a_run_that_ended_and_goes_on_is_open_again(tmp_path):
    attempts_of(tmp_path, (1, 0, 2, True))
    assert audit(tmp_path).state == "ended"
    with pytest.raises(KeyError), Ledger(tmp_path) as ledger:
        assert audit(tmp_path).state == "ended"  # nothing is recorded
        ledger.record(info_of(2, [3]))
        raise KeyError
    result = audit(tmp_path)
    assert result.state == "open"
    assert str(result).startswith(f"{tmp_path}: OPEN, no problem so far; no end is recorded")
    assert not any("attempt 1" in text for text in result.notes)


def test_a_bit_of_a_name_is_damage_and_no_error(tmp_path):
    """The name of a source in a file is damaged, or the name of a file."""
    attempts_of(tmp_path, (1, 0, 2, True), (1, 2, 4, True))  # which name the source again
    path = tmp_path / "rank-00000.ledger"
    data, start = path.read_bytes(), 0
    for name in pieces_of(path):
        if kind_of(name) == NAME:
            break
        start += len(name)
    for bit in range(8 * len(name)):
        changed = bytearray(data)
        changed[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        result = audit(tmp_path, 64)
        assert result.state == "damaged" and result.problems[0].startswith("rank 0: attempt 1"), bit
    path.write_bytes(data)
    for bit in range(8 * len(path.name)):
        name = bytearray(path.name.encode())
        name[bit // 8] ^= 1 << bit % 8
        other = os.path.join(os.fsencode(tmp_path), bytes(name))
        if b"/" in name or os.path.exists(other):
            continue
        os.rename(path, other)
        try:
            assert audit(tmp_path, 64).state == "damaged", name
        except (FileNotFoundError, ValueError) as error:
            assert "rank-00000.ledger`" in str(error)
        os.rename(other, path)


def test_a_file_of_something_else_is_a_problem(tmp_path):
    write_run(tmp_path, 2, epochs=1)
    (tmp_path / "rank-00000.ledger").rename(tmp_path / "rank-00002.ledger")
    assert any("was written by rank 0" in problem for problem in audit(tmp_path).problems)
    (tmp_path / "rank-00001.ledger").write_bytes(b"Once upon a time, there was no ledger." * 9)
    text = f"rank 1: it begins with b'Once upo': it is damaged, or not of version {VERSION}"
    assert any(text in problem for problem in audit(tmp_path).problems)
    with pytest.raises(ValueError, match=f"is no ledger of version {VERSION}"):
        Ledger(tmp_path, rank=1, world_size=2)
