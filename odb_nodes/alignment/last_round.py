"""The last round of an epoch, for which ranks share out evenly what is left."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment.peers import Ask, Exchanges
from odb_nodes.contract.again import restore_items
from odb_nodes.nodes import WindowBucketer
from odb_nodes.nodes.sample_records import with_digests
from odb_nodes.planning.rank_plan import LastRound
from odb_nodes.processing.observation import digest_of
from odb_nodes.sample import ItemKey, LeftOut, Sample, Skipped, name_of
from odb_nodes.sample_block import SampleBlock


class _TransferredSample(NamedTuple):
    """What other ranks are told of a sample that is given away."""

    source: str
    key: int
    repeat: int
    tokens: int
    digest: int

    @classmethod
    def of(cls, sample: Sample) -> _TransferredSample:
        assert sample.item is not None
        source, key, _, repeat = sample.item
        return cls(source, key, repeat, sample.tokens, digest_of(sample))


def share_rest(
    rest: LastRound, pool: WindowBucketer, rank: int, world_size: int, where: str
) -> Exchanges[list[LeftOut]]:
    """Cut what all ranks have left into the same number of groups; see `planning.levelling`.

    Samples that this rank gets are in the store of `pool` then; those are returned that it skips.
    """
    skipped = list[LeftOut]()
    budget = np.array([zlib.crc32(repr(rest.budget).encode())])
    texts = yield Ask(np.concatenate((budget, rest.told())).astype("<i8").tobytes(), where)
    told = [np.frombuffer(text, "<i8").astype(np.int64) for text in texts]
    if len({int(one[0]) for one in told}) == 1:
        received = rest.give(rest.moves([one[1:] for one in told]))
        given = with_digests(pool.store.look(rest.given.ordinal)).without_data()
        texts = yield Ask(json.dumps([*map(_TransferredSample.of, given)]).encode(), where)
        gathered = [[_TransferredSample(*one) for one in json.loads(text)] for text in texts]
        to_make = [gathered[giver][row] for giver, row in received]
        made, skipped = _make(to_make, pool, rank, world_size)
        rest.add(pool.take_over(made))
    fewest = yield Ask([rest.fewest_steps()], where)
    rest.cut(max(steps[0] for steps in fewest))
    return skipped


def _make(
    received: Sequence[_TransferredSample], pool: WindowBucketer, rank: int, world_size: int
) -> tuple[SampleBlock, list[LeftOut]]:
    """Make samples that other ranks have given; return also those that are skipped here."""
    items = [ItemKey(one.source, one.key, world_size, one.repeat) for one in received]
    made, skipped = list[Sample](), list[LeftOut]()
    others: list[str] = []  # what has become of samples that are not what they were
    for sample, one in zip(restore_items(pool, items), received, strict=True):
        if isinstance(sample, Skipped):
            skipped.append(LeftOut(sample.key, sample.source, sample.reason))
            others.append(f"a sample{name_of(sample)} is skipped here {sample.why}")
            continue
        made.append(sample)
        if sample.tokens != one.tokens:
            change = f"had {one.tokens} tokens there, and has {sample.tokens} here"
            others.append(f"a sample{name_of(sample)} {change}.")
        elif digest_of(sample) != one.digest:
            others.append(f"a sample{name_of(sample)} has other content here.")
    if others:
        warn_user(
            f"of {len(received)} samples that other ranks have given to rank {rank}, "
            f"{len(others)} are not what they were: {others[0]} Either processing is not "
            "deterministic (`ParallelProcessor(seed=...)` seeds the global generators), or the "
            "ranks do not have the same data in the same order, and then some samples are lost "
            "and others come twice."
        )
    return SampleBlock.of(made), skipped
