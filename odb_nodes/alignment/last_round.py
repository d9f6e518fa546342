"""The last round of an epoch, for which ranks share out evenly what is left."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torchdata.nodes import BaseNode

from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment.peers import Peers
from odb_nodes.contract.recall import recall, recalls
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.group_costs import tokens_of
from odb_nodes.planning.levelling import UNKNOWN_LEFT, Rest, gifts, receivers, work_of
from odb_nodes.processing.observation import digest_of
from odb_nodes.sample import ItemKey, LeftOut, Sample, Skipped, name_of


class _Gift(NamedTuple):
    """What other ranks are told of a sample that is given away."""

    source: str
    key: int
    repeat: int
    tokens: int
    digest: int

    @classmethod
    def of(cls, sample: Sample) -> _Gift:
        assert sample.item is not None
        source, key, _, repeat = sample.item
        return cls(source, key, repeat, sample.tokens, digest_of(sample))


class LastRound:
    """Cuts what all ranks have left into the same number of groups; see `planning.levelling`.

    Args:
        source: the node that yields the groups. What is left is shared if it is the
            `WindowBucketer` itself, and can make samples again by their keys.
        peers: the other ranks.
    """

    def __init__(self, source: BaseNode[list[Sample]] | None, peers: Peers) -> None:
        can = source is not None and hasattr(source, "known_remaining") and recalls(source)
        self._source: Any = source if can else None
        self._peers = peers
        self.left_out: list[LeftOut] = []
        """Samples that were given to this rank in the last `groups`, but are skipped here."""

    def left(self, ahead: Sequence[Sample] | None) -> int:
        """Return how many samples this rank has left, as it tells the others.

        Args:
            ahead: the group that was read last; `None` where there was none.
        """
        if self._source is None or not all(map(self._is_shared, ahead or ())):
            return -1  # Of data that each rank has for itself, too, some may have far more left.
        if ahead is None:
            return 0
        known: int | None = self._source.known_remaining()
        return UNKNOWN_LEFT if known is None else len(ahead) + known

    def groups(
        self, take_rest: Callable[[], list[Sample]], where: str
    ) -> tuple[list[list[Sample]], int]:
        """Return the groups of this rank, and how many a rank has at most.

        Args:
            take_rest: returns all samples that this rank has left.
            where: the place that errors name.

        Raises:
            SampleError: a sample cannot be made.
            PeerError: a rank failed, left, or did not come.
        """
        self.left_out = []
        with self._peers.reporting_failure(where):
            rest = take_rest()
            budget = self._source.limits.of_groups(self._source.budget)
        rest = self._level(rest, budget, where)
        with self._peers.reporting_failure(where):
            cut = Rest(rest, budget)
        steps = max(self._peers.gather([cut.fewest], where))[0]
        with self._peers.reporting_failure(where):
            return [[rest[index] for index in group] for group in cut.groups(steps)], steps

    def _level(self, rest: list[Sample], budget: TokenBudget, where: str) -> list[Sample]:
        """Return the samples of this rank once those with more have given some away."""
        work = work_of(map(tokens_of, rest), budget)
        told = self._peers.gather([int(work.sum()), zlib.crc32(repr(budget).encode())], where)
        if len({budget_of_rank for _, budget_of_rank in told}) > 1:
            return rest
        totals = [total for total, _ in told]
        with self._peers.reporting_failure(where):
            mine = self._peers.rank
            shared = [index for index, sample in enumerate(rest) if self._is_shared(sample)]
            surplus = totals[mine] - sum(totals) / len(totals)
            given = [shared[index] for index in gifts(work[shared], surplus)]
            own = json.dumps([_Gift.of(rest[index]) for index in given]).encode()
        texts = self._peers.gather_bytes(own, where)
        with self._peers.reporting_failure(where):
            gathered = [[_Gift(*gift) for gift in json.loads(text)] for text in texts]
            costs = [work_of((gift.tokens for gift in one), budget) for one in gathered]
            to = chain(*receivers(totals, costs))
            pairs = zip(chain(*gathered), to, strict=True)
            received = [gift for gift, receiver in pairs if receiver == mine]
            gone = set(given)
            kept = [sample for index, sample in enumerate(rest) if index not in gone]
            return [*kept, *self._make(received)]

    def _is_shared(self, sample: Sample) -> bool:
        return sample.item is not None and sample.item.world_size == self._peers.world_size

    def _make(self, received: list[_Gift]) -> list[Sample]:
        """Make samples that other ranks have given; one that is skipped here is left out."""
        ranks = self._peers.world_size
        items = [ItemKey(gift.source, gift.key, ranks, gift.repeat) for gift in received]
        made: list[Sample] = []
        others: list[str] = []  # what has become of samples that are not what they were
        for sample, gift in zip(recall(self._source, items), received, strict=True):
            if isinstance(sample, Skipped):
                self.left_out.append(LeftOut(sample.key, sample.source, sample.reason))
                others.append(f"a sample{name_of(sample)} is skipped here {sample.why}")
                continue
            made.append(sample)
            if sample.tokens != gift.tokens:
                change = f"had {gift.tokens} tokens there, and has {sample.tokens} here"
                others.append(f"a sample{name_of(sample)} {change}.")
            elif digest_of(sample) != gift.digest:
                others.append(f"a sample{name_of(sample)} has other content here.")
        if others:
            warn_user(
                f"of {len(received)} samples that other ranks have given to rank "
                f"{self._peers.rank}, {len(others)} are not what they were: {others[0]} Either "
                "processing is not deterministic (`ParallelProcessor(seed=...)` seeds the global "
                "generators), or the ranks do not have the same data in the same order, and then "
                "some samples are lost and others come twice."
            )
        return made
