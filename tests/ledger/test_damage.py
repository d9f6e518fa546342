"""A record that was removed, doubled, moved or changed is found; a torn one is not a hole."""

import os
import random
from itertools import accumulate

import pytest
from ledgers import SIZE, epoch_of, info_of, pieces_of, record, write_run

from odb_nodes import Ledger, audit
from odb_nodes.ledger.records import END, ENDED_MAGIC, HEAD, MAGIC, NAME

MUTATIONS = 300
WORLD_SIZE = 3


def kind_of(piece):
    return "header" if piece.startswith((MAGIC, ENDED_MAGIC)) else HEAD.unpack_from(piece)[1]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The pieces of each rank's file."""
    folder = tmp_path_factory.mktemp("intact")
    write_run(folder, WORLD_SIZE, kills=(5, 9, 12))
    assert audit(folder, SIZE).ok
    return [pieces_of(path) for path in sorted(folder.iterdir())]


def write(folder, ranks):
    for rank, pieces in enumerate(ranks):
        (folder / f"rank-{rank:05d}.ledger").write_bytes(b"".join(pieces))


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
    other = draw.choice([one for one in range(len(ranks[rank])) if one != index])
    ranks[rank][index], ranks[rank][other] = ranks[rank][other], ranks[rank][index]


def changed(draw, ranks, rank, index):
    piece = bytearray(ranks[rank][index])
    at = draw.randrange(HEAD.size, len(piece)) if len(piece) > HEAD.size else draw.randrange(4)
    piece[at] ^= draw.randrange(1, 256)
    ranks[rank][index] = bytes(piece)


def flipped(draw, ranks, rank, index):
    """One bit, of a header, too: of the size of a record, or of the number of samples."""
    piece = bytearray(ranks[rank][index])
    piece[draw.randrange(len(piece))] ^= 1 << draw.randrange(8)
    ranks[rank][index] = bytes(piece)


@pytest.mark.parametrize("mutate", [removed, doubled, moved, swapped, changed, flipped])
def test_a_change_of_one_record_is_found(intact, tmp_path, mutate, exhaustive):
    draw = random.Random(mutate.__name__)
    for _ in range(MUTATIONS if exhaustive else MUTATIONS // 8):
        ranks = [list(pieces) for pieces in intact]
        rank = draw.randrange(WORLD_SIZE)
        index = draw.randrange(len(ranks[rank]))
        mutate(draw, ranks, rank, index)
        write(tmp_path, ranks)
        found = audit(tmp_path)
        # The last record of a killed process whose size was changed looks as if it were torn.
        # So does the last of a run that has ended; without it, the run is as one that goes on.
        said = found.problems or ((mutate is flipped or not found.ok) and found.notes)
        what = (rank, index, kind_of(intact[rank][index]))
        assert any(f"rank {rank}" in text for text in said), (what, found)
        if mutate is flipped and kind_of(intact[rank][index]) != "header":
            assert [one.epoch for one in found.epochs] == [0, 1]  # what follows is read


def test_it_is_said_where(intact, tmp_path):
    ranks = [list(pieces) for pieces in intact]
    steps = [at for at, one in enumerate(ranks[1]) if kind_of(one) not in ("header", NAME, END)]
    del ranks[1][steps[-2]]  # of the last attempt, the last step but one
    write(tmp_path, ranks)
    problems = audit(tmp_path, SIZE).problems
    text = "rank 1: attempt 4, after epoch 1 step 5: the record of epoch 1 step 7"
    assert any(text in one for one in problems)
    assert "rank 1, epoch 1: not recorded: step 6." in problems


def test_a_torn_last_record_is_ignored_and_said(tmp_path):
    """A process is killed within a write, or loses its power, and goes on from a checkpoint."""
    steps = epoch_of(0, 1)
    record(tmp_path / "whole", *steps, ended=False)
    whole = audit(tmp_path / "whole")
    header, *before, last = pieces_of(tmp_path / "whole/rank-00000.ledger")
    path = tmp_path / "rank-00000.ledger"
    for torn in (*(last[:size] for size in range(1, len(last))), bytes(5000)):
        path.write_bytes(header + b"".join(before) + torn)
        found = audit(tmp_path)
        assert found.state == "open", (torn, found.problems)
        assert not found.epochs[0].is_complete
        assert found.epochs[0].last_step == 6
        assert any(f"a torn record of {len(torn)} bytes" in text for text in found.notes), torn
        if len(torn) in (1, 4, 21, 22, 25, 60):
            record(tmp_path, *steps[5:], ended=False)
            found = audit(tmp_path)
            assert found.state == "open" and found.epochs[0].digest == whole.epochs[0].digest
            assert sum("a torn record" in note for note in found.notes) == 1
    path.write_bytes(header.replace(MAGIC, ENDED_MAGIC) + b"".join(before) + bytes(5000))
    assert audit(tmp_path).state == "damaged"  # the header says that the run had ended


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
            found = audit(tmp_path)
            assert not found.ok, (path.name, size)
            is_known = found.state == "damaged" or was_killed or not found.attempts[0]
            assert is_known, (path.name, size)
        path.write_bytes(whole)


def test_a_run_that_ended_and_goes_on_is_open_again(tmp_path):
    attempts_of(tmp_path, (1, 0, 2, True))
    assert audit(tmp_path).state == "ended"
    with pytest.raises(KeyError), Ledger(tmp_path) as ledger:
        assert audit(tmp_path).state == "ended"  # nothing is recorded
        ledger.record(info_of(2, [3]))
        raise KeyError
    found = audit(tmp_path)
    assert found.state == "open"
    assert str(found).startswith(f"{tmp_path}: OPEN, no problem so far; no end is recorded")
    assert not any("attempt 1" in text for text in found.notes)


def test_a_bit_of_a_name_is_damage_and_no_error(tmp_path):
    """Of a source within a file, and of a file."""
    attempts_of(tmp_path, (1, 0, 2, True), (1, 2, 4, True))  # which name the source again
    path = tmp_path / "rank-00000.ledger"
    data, at = path.read_bytes(), 0
    for name in pieces_of(path):
        if kind_of(name) == NAME:
            break
        at += len(name)
    for bit in range(8 * len(name)):
        changed = bytearray(data)
        changed[at + bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found = audit(tmp_path, 64)
        assert found.state == "damaged" and found.problems[0].startswith("rank 0: attempt 1"), bit
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
    assert any("was written by rank 0" in one for one in audit(tmp_path).problems)
    (tmp_path / "rank-00001.ledger").write_bytes(b"Once upon a time, there was no ledger." * 9)
    text = "rank 1: the first 342 bytes belong to no attempt"
    assert any(text in one for one in audit(tmp_path).problems)
