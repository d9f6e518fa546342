"""The last round of an epoch: the ranks distribute the remaining samples evenly."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from odb_nodes._support.arrays import int64_array, int64_bytes
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.alignment.peers import Exchanges, Message
from odb_nodes.core.contract.again import restore_items
from odb_nodes.core.nodes import WindowBucketer
from odb_nodes.core.nodes.sample_records import with_digests
from odb_nodes.core.planning.rank_plan import LastRound
from odb_nodes.core.processing.observation import digest_of_sample
from odb_nodes.core.sample import ItemKey, LeftOut, Sample, Skipped, name_of
from odb_nodes.core.sample_block import SampleBlock


class _TransferredSample(NamedTuple):
    """A sample that is given to another rank, which makes it by its key."""

    source: str
    key: int
    repeat: int
    tokens: int
    digest: int

    @classmethod
    def of(cls, sample: Sample) -> _TransferredSample:
        assert sample.item is not None
        source, key, _, repeat = sample.item
        return cls(source, key, repeat, sample.tokens, digest_of_sample(sample))

    def item(self, world_size: int) -> ItemKey:
        return ItemKey(self.source, self.key, world_size, self.repeat)


def level_last_round(
    last_round: LastRound, bucketer: WindowBucketer, rank: int, world_size: int, where: str
) -> Exchanges[list[LeftOut]]:
    """Cut the remaining samples of all ranks into the same number of groups on each rank.

    See `planning.levelling`. The store of `bucketer` then has the samples that this rank receives.

    Returns:
        The received samples that processing skips on this rank.
    """
    skipped: list[LeftOut] = []
    budget_crc = np.array([zlib.crc32(repr(last_round.budget).encode())])
    report = np.concatenate((budget_crc, last_round.message()))
    messages = yield Message(int64_bytes(report), where)
    reports = [*map(int64_array, messages)]
    if len({int(report[0]) for report in reports}) == 1:  # All ranks have the same budget.
        received = last_round.give(last_round.moves([report[1:] for report in reports]))
        giving = with_digests(bucketer.store.look(last_round.given_away.ordinal)).without_data()
        description = json.dumps([_TransferredSample.of(sample) for sample in giving])
        messages = yield Message(description.encode(), where)
        described = [json.loads(message) for message in messages]
        to_make = [_TransferredSample(*described[giver][row]) for giver, row in received]
        samples, skipped = _make(to_make, bucketer, rank, world_size)
        last_round.add(bucketer.take_over(samples))
    fewest = yield Message([last_round.fewest_steps()], where)
    last_round.cut(max(steps[0] for steps in fewest))
    return skipped


def _make(
    received: Sequence[_TransferredSample], bucketer: WindowBucketer, rank: int, world_size: int
) -> tuple[SampleBlock, list[LeftOut]]:
    """Make the samples that other ranks have given; return the samples skipped here separately."""
    samples: list[Sample] = []
    skipped: list[LeftOut] = []
    changes: list[str] = []
    items = [transferred.item(world_size) for transferred in received]
    for sample, transferred in zip(restore_items(bucketer, items), received, strict=True):
        if isinstance(sample, Skipped):
            skipped.append(LeftOut(sample.key, sample.source, sample.reason))
            changes.append(f"a sample{name_of(sample)} is skipped here {sample.why}")
            continue
        samples.append(sample)
        if sample.tokens != transferred.tokens:
            tokens = f"had {transferred.tokens} tokens there, and has {sample.tokens} here"
            changes.append(f"a sample{name_of(sample)} {tokens}.")
        elif digest_of_sample(sample) != transferred.digest:
            changes.append(f"a sample{name_of(sample)} has other content here.")
    if changes:
        warn_user(
            f"rank {rank} received {len(received)} samples of other ranks, and {len(changes)} of "
            f"them differ here: {changes[0]} Either processing (`process_fn`) is not "
            "deterministic (`ODBDataLoader` and `ParallelProcessor(seed=...)` seed the global "
            "generators), or the ranks do not have "
            "the same data in the same order. Then some samples are lost, and other samples come "
            "twice."
        )
    return SampleBlock.of(samples), skipped
