"""Ledgers to audit: what the ranks of a small job record, with kills and resumes; their bytes."""

from itertools import pairwise

import numpy as np

from odb_nodes import Ledger, LeftOut, StepInfo, audit
from odb_nodes.training.ledger.history import RecordedRun
from odb_nodes.training.ledger.records import END_ROW, MAGIC, MARK, ROW_BYTES

SIZE = 90


def info_of(
    step,
    keys=(),
    *,
    epoch=0,
    ends=False,
    sources=None,
    repeats=None,
    left_out=(),
    is_filler=False,
    per_rank=(),
    ranks_per_process=1,
):
    """The `StepInfo` of a step with these keys; (key, reason) or (key, source, reason) left out."""
    keys = tuple(keys)
    return StepInfo(
        step=step,
        local_samples=len(keys),
        local_targets=len(keys),
        all_samples_this_step=len(keys),
        all_targets=len(keys),
        optimizer_samples=len(keys),
        optimizer_targets=len(keys),
        is_filler=is_filler,
        keys=keys,
        row_sources=tuple(sources or [""] * len(keys)),
        row_repeats=tuple(repeats or [0] * len(keys)),
        left_out=tuple(
            LeftOut(sample[0], *(sample[1:] if len(sample) > 2 else ("", sample[1])))
            for sample in left_out
        ),
        per_rank_sources=frozenset(per_rank),
        epoch=epoch,
        ends_epoch=ends,
        batches_per_step=ranks_per_process,
    )


def epoch_of(rank, world_size, epoch=0, *, size=SIZE, per_step=4, steps=8):
    """The steps of one rank in an epoch of keys 0..size-1, of which some are skipped or dropped.

    Rank 0 has fewer samples than others where there are several, and fills its last steps.
    """
    keys = [(7 * key + epoch) % size for key in range(size)]
    share = keys[rank::world_size]
    if world_size > 1 and rank < 2:  # rank 1 has some of rank 0
        cut = len(keys[0::world_size]) // 2
        share = keys[0::world_size][:cut] if rank == 0 else share + keys[0::world_size][cut:]
    left_out_samples = [(key, "dropped" if key % 2 else "empty") for key in share if key % 11 == 3]
    share = [key for key in share if key % 11 != 3]
    groups = [share[step::steps] for step in range(steps)]
    return [
        info_of(
            step,
            group,
            epoch=epoch,
            ends=step == steps - 1,
            left_out=left_out_samples[step::steps],
            is_filler=not group,
        )
        for step, group in enumerate(groups)
    ]


def record(folder, *steps, rank=0, world_size=1, ended=True):
    """Record steps in an attempt, which ends or is left as by a kill."""
    ledger = Ledger(folder, rank=rank, world_size=world_size)
    for info in steps:
        ledger.record(info)
    ledger.close(ended=ended)


def write_run(folder, world_size=1, epochs=2, kills=(), **options):
    """Let each rank record its epochs, killed after each number of steps and resumed three before.

    Args:
        folder: of the ledger.
        world_size: number of ranks.
        epochs: number of epochs.
        kills: numbers of steps, over all epochs, after which the job is killed.
        options: of `epoch_of`.
    """
    for rank in range(world_size):
        steps = [
            step for epoch in range(epochs) for step in epoch_of(rank, world_size, epoch, **options)
        ]
        begin = 0
        for end in [*kills, len(steps)]:
            ended = end == len(steps)
            part = steps[begin : end + (0 if ended else rank)]
            record(folder, *part, rank=rank, world_size=world_size, ended=ended)
            begin = max(0, end - 3)


def pieces_of(path):
    """The preamble and the records of a file, one after the other, as bytes."""
    data = path.read_bytes()
    rows = np.frombuffer(data, END_ROW)
    cuts = [0, 1, *(np.flatnonzero(rows["mark"][1:] == MARK) + 2).tolist()]
    assert cuts[-1] == len(rows)
    return [data[a * ROW_BYTES : b * ROW_BYTES] for a, b in pairwise(cuts)]


def kind_of(piece):
    """The kind of a record; 0 of the preamble."""
    return 0 if piece.startswith(MAGIC) else int(np.frombuffer(piece, END_ROW)["kind"][-1])


def write_pieces(folder, ranks):
    """Write the file of each rank."""
    folder.mkdir(exist_ok=True)
    for rank, pieces in enumerate(ranks):
        (folder / f"rank-{rank:05d}.ledger").write_bytes(b"".join(pieces))


def rows_of(folder):
    """Per step that counts: (key, source, repeat, reason) of each sample."""
    run = RecordedRun(folder)
    steps = []
    for step in (
        step for segment in run.segments for step in np.split(segment.steps, len(segment.steps))
    ):
        samples = run.samples(step)
        keys, repeats = samples.keys.tolist(), samples.repeats.tolist()
        origins = [run.names[number][:2] for number in samples.names]
        steps.append(
            [
                (None if key < 0 else key, source, repeat, reason)
                for key, (source, reason), repeat in zip(keys, origins, repeats, strict=True)
            ]
        )
    return steps


def check_ledger(folder, size, attempts=None, epochs=2):
    """Each of so many samples has one fate in each of so many complete epochs."""
    result = audit(folder, size)
    assert result.ok, result.problems
    assert [epoch.is_complete for epoch in result.epochs] == [True] * epochs, str(result)
    if attempts is not None:
        assert {len(begun) for begun in result.attempts.values()} == {attempts}
    return result
