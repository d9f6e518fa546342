"""The last round of an epoch, for which ranks share out evenly what is left."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment.peers import Ask, Exchanges
from odb_nodes.contract.node import restore_items
from odb_nodes.nodes import WindowBucketer
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.levelling import Rest, gifts, receivers, work_of
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


class TailBalancer:
    """Cuts what all ranks have left into the same number of groups; see `planning.levelling`."""

    def __init__(self, pool: WindowBucketer, rank: int, world_size: int) -> None:
        self.pool, self._rank, self._world_size = pool, rank, world_size
        self.left_out: list[LeftOut] = []
        """Samples that were given to this rank in the last `groups`, but are skipped here."""

    def groups(self, rest: SampleBlock, where: str) -> Exchanges[tuple[list[SampleBlock], int]]:
        """Return the groups of this rank, and the steps of the round."""
        self.left_out = []
        budget = self.pool.planner.limits.of_groups(self.pool.budget)
        rest = yield from self._level(rest, budget, where)
        cut = Rest(rest, budget)
        fewest = yield Ask([cut.fewest], where)
        steps = max(one[0] for one in fewest)
        return [*map(rest.take, cut.groups(steps))], steps

    def _level(self, rest: SampleBlock, budget: TokenBudget, where: str) -> Exchanges[SampleBlock]:
        """Return the samples of this rank once those with more have given some away."""
        work = work_of(rest.tokens, budget)
        told = yield Ask([int(work.sum()), zlib.crc32(repr(budget).encode())], where)
        if len({budget_of_rank for _, budget_of_rank in told}) > 1:
            return rest
        totals = [total for total, _ in told]
        shared = np.flatnonzero(self.are_shared(rest))
        surplus = totals[self._rank] - sum(totals) / len(totals)
        given = shared[gifts(work[shared], surplus)]
        own = json.dumps([*map(_TransferredSample.of, rest.take(given))]).encode()
        texts = yield Ask(own, where)
        gathered = [[_TransferredSample(*one) for one in json.loads(text)] for text in texts]
        costs = [work_of([one.tokens for one in of_rank], budget) for of_rank in gathered]
        to = chain(*receivers(totals, costs))
        pairs = zip(chain(*gathered), to, strict=True)
        received = [one for one, receiver in pairs if receiver == self._rank]
        kept = rest.take(np.delete(np.arange(len(rest)), given))
        return SampleBlock.joined([kept, SampleBlock.of(self._make(received))])

    def are_shared(self, samples: SampleBlock) -> npt.NDArray[np.bool_]:
        """Tell which samples any rank can make, (n,) bool."""
        return np.array([one.world_size == self._world_size for one in samples.kinds], dtype=bool)

    def _make(self, received: Sequence[_TransferredSample]) -> list[Sample]:
        """Make samples that other ranks have given; one that is skipped here is left out."""
        items = [ItemKey(one.source, one.key, self._world_size, one.repeat) for one in received]
        made: list[Sample] = []
        others: list[str] = []  # what has become of samples that are not what they were
        for sample, one in zip(restore_items(self.pool, items), received, strict=True):
            if isinstance(sample, Skipped):
                self.left_out.append(LeftOut(sample.key, sample.source, sample.reason))
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
                f"of {len(received)} samples that other ranks have given to rank {self._rank}, "
                f"{len(others)} are not what they were: {others[0]} Either processing is not "
                "deterministic (`ParallelProcessor(seed=...)` seeds the global generators), or the "
                "ranks do not have the same data in the same order, and then some samples are lost "
                "and others come twice."
            )
        return made
