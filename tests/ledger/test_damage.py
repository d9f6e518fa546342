"""A record that was removed, doubled, moved or changed is found; a torn one is not a hole."""

import os
import random

import pytest
from ledgers import SIZE, epoch_of, info_of, pieces_of, write_run

from odb_nodes import Ledger, audit
from odb_nodes.ledger.records import END, ENDED_MAGIC, HEAD, MAGIC, NAME

MUTATIONS = 300
WORLD_SIZE = 3
KILLS = (5, 9, 12)


def kind_of(piece):
    return "header" if piece.startswith((MAGIC, ENDED_MAGIC)) else HEAD.unpack_from(piece)[1]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The pieces of each rank's file."""
    folder = tmp_path_factory.mktemp("intact")
    write_run(folder, WORLD_SIZE, kills=KILLS)
    assert audit(folder, SIZE).ok
    return [pieces_of(path) for path in sorted(folder.iterdir())]


def write(folder, ranks):
    for rank, pieces in enumerate(ranks):
        data = pieces if isinstance(pieces, bytes) else b"".join(pieces)
        (folder / f"rank-{rank:05d}.ledger").write_bytes(data)


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
    for _ in range(MUTATIONS if exhaustive else MUTATIONS // 5):
        ranks = [list(pieces) for pieces in intact]
        rank = draw.randrange(WORLD_SIZE)
        index = draw.randrange(len(ranks[rank]))
        mutate(draw, ranks, rank, index)
        write(tmp_path, ranks)
        found = audit(tmp_path)
        what = (mutate.__name__, rank, index, kind_of(intact[rank][index]))
        # The last record of a killed process whose size was changed looks as if it were torn.
        # So does the last of a run that has ended; without it, the run is as one that goes on.
        said = found.problems or ((mutate is flipped or not found.ok) and found.notes)
        assert any(f"rank {rank}" in text for text in said), (what, found)


def test_it_is_said_where(intact, tmp_path):
    ranks = [list(pieces) for pieces in intact]
    steps = [at for at, one in enumerate(ranks[1]) if kind_of(one) not in ("header", NAME, END)]
    head = HEAD.unpack_from(ranks[1][steps[-2]])  # of the last attempt, the last step but one
    assert head[5:] == (1, 6)
    del ranks[1][steps[-2]]
    write(tmp_path, ranks)
    found = audit(tmp_path, SIZE)
    assert any(
        "rank 1: attempt 4, after epoch 1 step 5: the record of epoch 1 step 7" in text
        for text in found.problems
    )
    assert "rank 1, epoch 1: not recorded: step 6." in found.problems


@pytest.mark.slow
def test_what_follows_a_damaged_record_is_read_all_the_same(intact, tmp_path):
    whole = b"".join(intact[0])
    for at in range(0, len(whole), 7):
        ranks = [list(pieces) for pieces in intact]
        ranks[0] = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        write(tmp_path, ranks)
        found = audit(tmp_path)
        assert found.problems or found.notes, at
        assert [one.epoch for one in found.epochs] == [0, 1], at
        assert found.epochs[1].last_step < 1 << 17, at


def test_a_torn_last_record_is_ignored_and_said(tmp_path):
    write_run(tmp_path, 1, epochs=1)
    path = tmp_path / "rank-00000.ledger"
    header, *before, last, _ = pieces_of(path)
    before = [header.replace(ENDED_MAGIC, MAGIC), *before]  # the run was killed
    for size in range(1, len(last)):
        path.write_bytes(b"".join(before) + last[:size])
        found = audit(tmp_path)
        assert found.state == "open", (size, found.problems)
        assert not found.epochs[0].is_complete
        assert found.epochs[0].last_step == 6
        assert any("torn record" in text for text in found.notes), size


def test_a_record_torn_in_mid_run_is_ignored_too(tmp_path, monkeypatch):
    """A process is killed within a write, and the run goes on from three steps before."""
    write_run(tmp_path / "whole", 1, epochs=1)
    expected = audit(tmp_path / "whole").epochs[0].digest
    steps = epoch_of(0, 1)
    for size in (1, 4, 21, 22, 25, 60):
        folder = tmp_path / str(size)
        for begin, end in ((0, 3), (0, 6), (3, len(steps))):
            ledger = Ledger(folder)
            for info in steps[begin:end]:
                ledger.record(info)
            if end < len(steps):
                with monkeypatch.context() as patch:
                    write = os.write
                    patch.setattr(
                        os, "write", lambda file, data, w=write, n=size: w(file, data[:n])
                    )
                    with pytest.warns(UserWarning, match="cannot be written"):
                        ledger.record(steps[end])
            ledger._file.forget()
        found = audit(folder)
        assert found.state == "open", found.problems
        assert sum("a torn record" in note for note in found.notes) == 2
        assert found.epochs[0].digest == expected


def attempts_of(folder, *jobs):
    """Ledgers of jobs one after the other, of (ranks, first step, stop, whether it is killed)."""
    last = max(stop for _, _, stop, _ in jobs) - 1
    for world_size, first, stop, is_killed in jobs:
        for rank in range(world_size):
            ledger = Ledger(folder, rank=rank, world_size=world_size)
            for step in range(first, stop):
                ledger.record(info_of(step, [step * 4 + rank], sources="a", ends=step == last))
            if is_killed:
                ledger._file.forget()
            ledger.close()


@pytest.mark.parametrize(
    "jobs",
    [
        [(1, 0, 3, False)],
        [(1, 0, 2, False), (1, 2, 4, False)],  # it ended twice
        [(1, 0, 2, True), (1, 1, 4, False)],
        [(2, 0, 2, False)],
        [(1, 0, 2, False), (2, 2, 4, False)],
        [(2, 0, 2, False), (1, 2, 4, False)],
    ],
    ids=str,
)
def test_no_cut_of_a_run_that_ended_reads_ok(tmp_path, jobs):
    attempts_of(tmp_path, *jobs)
    is_killed = any(job[-1] for job in jobs)  # the first attempt alone is a run that was killed
    assert audit(tmp_path).state == "ended"
    for path in sorted(tmp_path.iterdir())[: jobs[-1][0]]:  # of a rank that goes on
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            found = audit(tmp_path)
            assert not found.ok, (path.name, size)
            assert found.state == "damaged" or is_killed or not found.attempts[0], (path.name, size)
        path.write_bytes(whole)


def test_a_run_that_ended_and_goes_on_is_open_again(tmp_path):
    attempts_of(tmp_path, (1, 0, 2, False))
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
    attempts_of(tmp_path, (1, 0, 2, False), (1, 2, 4, False))  # which name the source again
    path = tmp_path / "rank-00000.ledger"
    name, data = next((one, pieces_of(path)) for one in pieces_of(path) if kind_of(one) == NAME)
    at = b"".join(data).index(name)
    for bit in range(8 * len(name)):
        changed = bytearray(b"".join(data))
        changed[at + bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found = audit(tmp_path, 64)
        assert found.state == "damaged" and found.problems[0].startswith("rank 0: attempt 1"), bit


def test_a_bit_of_the_name_of_a_file_is_no_raw_error(tmp_path):
    attempts_of(tmp_path, (2, 0, 2, False))
    path = os.fsencode(tmp_path / "rank-00000.ledger")
    for bit in range(8 * len("rank-00000.ledger")):
        name = bytearray(os.path.basename(path))
        name[bit // 8] ^= 1 << bit % 8
        other = os.path.join(os.path.dirname(path), bytes(name))
        if b"/" in name or os.path.exists(other):
            continue
        os.rename(path, other)
        try:
            assert audit(tmp_path, 64).state == "damaged", name
        except ValueError as error:
            assert "must be named as `rank-00000.ledger`" in str(error)
        os.rename(other, path)


def test_zeros_at_the_end_are_a_loss_of_power(tmp_path):
    write_run(tmp_path, 1, epochs=1)
    path = tmp_path / "rank-00000.ledger"
    path.write_bytes(b"".join(pieces_of(path)[:-2]) + bytes(5000))
    assert audit(tmp_path).state == "damaged"  # the header says that the run had ended
    path.write_bytes(path.read_bytes().replace(ENDED_MAGIC, MAGIC))
    found = audit(tmp_path)
    assert found.state == "open"
    assert "a torn record of 5000 bytes" in found.notes[0]


def test_bytes_of_something_else_are_a_problem(tmp_path):
    write_run(tmp_path, 2, epochs=1)
    path = tmp_path / "rank-00001.ledger"
    path.write_bytes(b"Once upon a time, there was no ledger here. " * 9)
    found = audit(tmp_path)
    assert any("rank 1: the first 396 bytes belong to no attempt" in one for one in found.problems)


def test_a_file_of_another_rank_is_a_problem(tmp_path):
    write_run(tmp_path, 2, epochs=1)
    (tmp_path / "rank-00000.ledger").rename(tmp_path / "rank-00002.ledger")
    found = audit(tmp_path)
    assert any("was written by rank 0" in one for one in found.problems)
