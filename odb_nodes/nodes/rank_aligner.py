"""Node: gives all ranks the same number of steps, of about the same cost, and one loss."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes.checks import check_callable, check_count, check_integer, check_node
from odb_nodes.errors import PeerError, SampleError, StateError
from odb_nodes.exchange import Channel, Exchange, Interrupted, group_rank, resolve_exchange
from odb_nodes.graph import walk
from odb_nodes.hashing import mix
from odb_nodes.names import name_of
from odb_nodes.nodes.payload import decode_sample, encode_sample
from odb_nodes.planning.alignment import (
    COLUMNS,
    FILLER,
    FLAG_BITS,
    GroupCost,
    Offer,
    SplitLadder,
    Uneven,
    make_offer,
    plan_round,
)
from odb_nodes.planning.budget import round_up
from odb_nodes.planning.pool import IntArray
from odb_nodes.sample import Sample
from odb_nodes.sources.epochs import EpochCounter
from odb_nodes.state import detach, seal, unseal
from odb_nodes.step_info import AlignedGroup, StepInfo

LossScaling = Literal["exact", "approx", "none"]

_FIRST_ROUND_STEPS = 4  # so that the first batch does not wait for a whole round
_ROWS, _GROUPS, _ENDED, _NEEDS_FILLER, _HEADER = range(5)


def padded_tokens(group: Sequence[Sample]) -> int:
    """Return the longest sample's tokens times the number of samples."""
    return max(sample.tokens for sample in group) * len(group)


def has_image(sample: Sample) -> bool:
    """Tell whether a sample has image patches."""
    return sample.patches > 0


class RankAligner(BaseNode[AlignedGroup]):
    """Yields the groups of its source so that all ranks take the same steps.

    It works in rounds. In each one it pulls up to `round_size` groups, tells the other ranks what
    they cost, in one message, and receives what theirs cost. From then on every rank knows the
    round: groups of like cost go to the same step, and one permutation that all ranks share
    shuffles the steps. An epoch's first rounds are shorter, 4, 8 and 16 steps, to start soon.

    At the end of the data, a rank that has fewer groups than others splits some of its own. One
    that has fewer samples than there are steps fills with a real sample whose loss weighs nothing.

    State: the source's at the beginning of the round, the plan of the round, and how many of its
    steps are out: 32 bytes per step beside the source's own. Restoring pulls the groups of the
    round again, and asks no other rank.

    Args:
        source: node that yields groups, `list[Sample]`: a `WindowBucketer`.
        process_group: the ranks that share steps: a process group of any backend, or a
            `DeviceMesh` of one dimension (the data-parallel one). Default: all ranks of the job;
            one where torch.distributed is not initialised.
        round_size: steps between two messages; rounded up to a multiple of `accumulate`. Larger
            matches costs better, and holds that many groups.
        uneven: what happens where ranks have different amounts of data. `"fill"`: as above.
            `"join"`: each rank ends with its data; the training loop needs `Join` of
            torch.distributed. `"stop"`: all end with the first; what is left over is counted in
            `unemitted_samples`.
        loss_scaling: what `StepInfo.loss_scale` makes of the mean of the ranks' gradients:
            `"exact"`, the gradient of the mean over all supervised tokens; `"approx"`, each rank's
            mean weighed by its samples; `"none"`, 1.0 (0.0 in filler steps).
        accumulate: steps of an optimizer step, which share one denominator.
        seed: of the permutations; the same on all ranks.
        timeout_s: seconds until a rank that does not come is an error on the others.
        cost_fn: group -> what a step with it takes, an integer in any unit. Default: padded tokens.
        modalities: name -> whether a sample has it. Default: `"image"`, where it has patches.

    Raises:
        TypeError, ValueError: an argument is not what is said above.
    """

    SOURCE_KEY = "source"
    EPOCH_KEY = "epoch"
    STARTED_KEY = "started"
    ROUND_KEY = "round"
    STEP_KEY = "step"
    EMITTED_KEY = "emitted"
    PLAN_KEY = "plan"
    SPLITS_KEY = "splits"
    LAST_KEY = "last"
    DRAINED_KEY = "drained"
    FILLER_KEY = "filler"
    UNEMITTED_KEY = "unemitted_samples"
    STATE_KEYS = (
        SOURCE_KEY,
        EPOCH_KEY,
        STARTED_KEY,
        ROUND_KEY,
        STEP_KEY,
        EMITTED_KEY,
        PLAN_KEY,
        SPLITS_KEY,
        LAST_KEY,
        DRAINED_KEY,
        FILLER_KEY,
        UNEMITTED_KEY,
    )

    def __init__(
        self,
        source: BaseNode[list[Sample]],
        process_group: Any = None,
        round_size: int = 32,
        uneven: Uneven = "fill",
        loss_scaling: LossScaling = "exact",
        accumulate: int = 1,
        seed: int = 0,
        timeout_s: float = 1800.0,
        *,
        cost_fn: Callable[[Sequence[Sample]], int] = padded_tokens,
        modalities: Mapping[str, Callable[[Sample], bool]] | None = None,
    ) -> None:
        super().__init__()
        check_node("source", source)
        check_callable("cost_fn", cost_fn)
        for name, value, known in (
            ("uneven", uneven, get_args(Uneven)),
            ("loss_scaling", loss_scaling, get_args(LossScaling)),
        ):
            if value not in known:
                raise ValueError(f"`{name}` must be one of {known}, but is {value!r} instead.")
        if not timeout_s > 0:
            raise ValueError(f"`timeout_s` must be above 0, but is {timeout_s!r} instead.")
        self._modalities = {"image": has_image} if modalities is None else dict(modalities)
        if len(self._modalities) > FLAG_BITS:
            raise ValueError(
                f"`modalities` must be at most {FLAG_BITS}, but are {len(self._modalities)}."
            )
        self.source = source
        self._process_group = process_group
        self._accumulate = check_count("accumulate", accumulate)
        self._round_size = round_up(check_count("round_size", round_size), self._accumulate)
        self._uneven, self._loss_scaling = uneven, loss_scaling
        self._seed = check_integer("seed", seed)
        self._timeout_s = timeout_s
        self._cost_fn = cost_fn
        self._exchange: Exchange | None = None
        self._channel: Channel | None = None
        self._epochs = EpochCounter()
        self._attendance: threading.Thread | None = None
        self._failure: Exception | None = None
        self._clear()

    @property
    def unemitted_samples(self) -> int:
        """Samples of this rank and epoch that `uneven="stop"` left over."""
        return self._unemitted

    @property
    def exchange_wait_s(self) -> float:
        """Seconds spent waiting for other ranks so far."""
        return 0.0 if self._channel is None else self._channel.wait_s

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset without a state begins."""
        self._epochs.request(epoch)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state was saved with another configuration, rank or world size, or the
                source does not yield the groups again that it yielded then. The other ranks raise
                it too, when they next meet this one.
            RuntimeError: the job has several ranks, but torch.distributed is not initialised.
        """
        super().reset(initial_state)
        channel = self._connect()
        self._end_attendance()
        self._clear()
        try:
            if initial_state is None:
                self._epochs.advance()
                self.source.reset(None)
                self._hold_source()
            else:
                name = type(self).__name__
                self._restore(unseal(initial_state, name, self._config(), self.STATE_KEYS))
        except Exception as error:
            channel.fail(error, "reset")
            raise

    def next(self) -> AlignedGroup:
        """Return the next group and its `StepInfo`.

        Raises:
            PeerError: another rank failed, left, or did not come within `timeout_s`.
            StateError: the ranks do not go on from the same place.
        """
        self._epochs.started = True
        if self._failure is not None:
            raise self._failure
        try:
            while self._emitted == len(self._plan):
                self._begin_round()
            self._agree()
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            raise
        return self._emit()

    def get_state(self) -> dict[str, Any]:
        """Return the source's state before this round, and the plan of the round."""
        return seal(
            type(self).__name__,
            self._config(),
            source=detach(self._source_state),
            epoch=self._epochs.epoch,
            started=self._epochs.started,
            round=self._round,
            step=self._step,
            emitted=self._emitted,
            plan=self._plan.astype("<i8").tobytes() or None,
            splits=self._splits,
            last=self._last,
            drained=self._drained,
            filler=self._received,
            unemitted_samples=self._unemitted,
        )

    def interrupt(self) -> None:
        """Make a `next` that waits for other ranks on another thread raise. A reset takes it back.

        A rank that has ended before others (`uneven="join"`) first waits until they have ended.
        """
        self._end_attendance()
        if self._exchange is not None:
            self._exchange.interrupt()

    def close(self) -> None:
        """Stop waiting for other ranks. The connections stay: a later reset goes on with them."""
        if self._exchange is not None:
            self._exchange.interrupt()

    # --- beginning ----------------------------------------------------------------------------

    def _clear(self) -> None:
        self._source_state: Any = None
        self._round = 0
        self._step = 0
        self._plan: IntArray = np.empty((0, 4), dtype=np.int64)  # group, samples, targets, flags
        self._emitted = 0  # steps of the plan that are out
        self._groups: list[list[Sample]] = []
        self._splits = 0
        self._last = False  # there is no round after this one
        self._ahead: list[Sample] | None = None  # first group of the next round
        self._next_source_state: Any = None  # before that group
        self._ended = False  # the source has no groups after this round's
        self._drained = False  # the source had none left for this round
        self._filler: Sample | None = None
        self._received: bytes | None = None  # the filler, where it is another rank's
        self._unemitted = 0
        self._peers_go_on = False
        self._agreed = False
        self._failure = None

    def _connect(self) -> Channel:
        """Find out who the other ranks are. They need not be there yet."""
        exchange = self._exchange
        if exchange is None or exchange.world_size == 1:  # The job may have been set up since.
            exchange = resolve_exchange(self._process_group, self._timeout_s)
        if self._channel is None or exchange is not self._exchange:
            self._exchange = exchange
            self._channel = Channel(exchange, _HEADER + COLUMNS * self._round_size)
        for node in walk(self.source):
            shards = getattr(node, "_world_size", 1)
            if shards not in (1, exchange.world_size):
                raise RuntimeError(
                    f"`{type(node).__name__}` is one of {shards} ranks, but the `RankAligner` over "
                    f"it aligns {exchange.world_size}. Give both the same ranks: "
                    "`process_group=` here, `rank=` and `world_size=` there."
                )
        exchange.resume()
        return self._channel

    def _agree(self) -> None:
        """Make sure, once after a reset, that all ranks go on from the same place."""
        if self._agreed or self._channel is None:
            return
        fields = {
            "world_size": self._channel.world_size,
            "round_size": self._round_size,
            "accumulate": self._accumulate,
            "uneven": get_args(Uneven).index(self._uneven),
            "loss_scaling": get_args(LossScaling).index(self._loss_scaling),
            "seed": mix(self._seed) >> 1,
            "epoch": self._epochs.epoch,
            "round": self._round,
            "step": self._step,
        }
        self._channel.agree(fields)
        self._agreed = True

    def _restore(self, state: dict[str, Any]) -> None:
        self._epochs.restore(state[self.EPOCH_KEY], state[self.STARTED_KEY])
        self._source_state = state[self.SOURCE_KEY]
        self._round, self._step = state[self.ROUND_KEY], state[self.STEP_KEY]
        self._plan = np.frombuffer(state[self.PLAN_KEY] or b"", "<i8").reshape(-1, 4)
        self._emitted, self._splits = state[self.EMITTED_KEY], state[self.SPLITS_KEY]
        self._last, self._drained = state[self.LAST_KEY], state[self.DRAINED_KEY]
        self._received, self._unemitted = state[self.FILLER_KEY], state[self.UNEMITTED_KEY]
        self.source.reset(detach(self._source_state))
        if self._emitted == len(self._plan) and self._last:
            return  # It stands at the end of the epoch.
        if self._received is not None:
            self._filler = decode_sample(self._received)
        elif self._drained or self._emitted < len(self._plan):
            self._pull_again()

    def _pull_again(self) -> None:
        """Pull the groups of the round that the state stands in, or those to fill from."""
        most = self._round_size if self._drained else self._round_steps()
        groups = self._pull(most)
        needed = 1 if self._drained else int(self._plan[:, 0].max()) + 1 - self._splits
        if len(groups) < needed:
            raise StateError(
                f"{type(self).__name__} cannot restore round {self._round} of epoch "
                f"{self._epochs.epoch}: its source yielded {needed} groups or more when the state "
                f"was saved, but yields {len(groups)} now. Resume over the data that it was saved "
                "on."
            )
        self._settle(groups, self._ladder(groups, most)[1])
        if self._drained:
            self._groups = []

    # --- a round ------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        """Settle the next round with the other ranks.

        Raises:
            StopIteration: there is none.
        """
        if self._last:
            if self._peers_go_on:
                self._attend()
            raise StopIteration
        channel = self._channel
        assert channel is not None
        where = f"round {self._round} of epoch {self._epochs.epoch} (from step {self._step})"
        try:
            most = self._round_steps()
            groups = [] if self._drained else self._pull(most)
            offer, ladder = self._ladder(groups, most)
        except Exception as error:
            channel.fail(error, where)
            raise
        self._agree()
        empty = not groups and self._filler is None
        header = [len(offer.table), offer.groups, offer.ended, empty and self._uneven == "fill"]
        rows = channel.gather(np.array([*header, *offer.table.ravel()], dtype=np.int64), where)
        offers = [_read_offer(row) for row in rows]
        key = mix(self._seed, self._epochs.epoch, self._round)
        plan = plan_round(offers, uneven=self._uneven, key=key)
        if len(plan.totals):
            self._share_filler(rows, groups, where)
        own = offer.groups if self._uneven == "join" else len(plan.totals)
        self._plan = np.column_stack((plan.groups[channel.rank], plan.totals))[:own]
        self._emitted, self._splits = 0, plan.splits[channel.rank]
        self._last = plan.last or (self._uneven == "join" and offer.ended)
        self._peers_go_on = not plan.last
        self._settle(groups, ladder)
        if self._uneven == "stop" and plan.last:
            self._count_unemitted([*self._groups[len(self._plan) :], self._ahead or []])
        if not len(self._plan):
            self._end_round()

    def _pull(self, most: int) -> list[list[Sample]]:
        """Return the next round's groups, and look one group further for whether there are more.

        Without that, a rank could find out too late that it should have kept a sample to fill with.
        """
        groups = [] if self._ahead is None else [self._ahead]
        while len(groups) < most and (group := self._pull_one()) is not None:
            groups.append(group)
        self._next_source_state = detach(self.source.state_dict())
        self._ahead = self._pull_one() if len(groups) == most else None
        self._ended = self._ahead is None
        return groups

    def _pull_one(self) -> list[Sample] | None:
        group = next(self.source, None)
        if group is None or (
            isinstance(group, list) and all(isinstance(one, Sample) for one in group)
        ):
            return group
        raise TypeError(
            "`source` of RankAligner must yield groups, `list[Sample]`, but yielded "
            f"`{type(group).__name__}` instead. Put a `WindowBucketer` before it."
        )

    def _ladder(self, groups: list[list[Sample]], most: int) -> tuple[Offer, SplitLadder[Sample]]:
        return make_offer(
            groups, most=most, ended=self._ended, measure=self._measure, tokens=_tokens
        )

    def _settle(self, groups: list[list[Sample]], ladder: SplitLadder[Sample]) -> None:
        self._groups = ladder.groups(self._splits)
        if groups:
            self._filler = _cheapest(groups)

    def _emit(self) -> AlignedGroup:
        step = self._emitted
        index, samples, targets, flags = self._plan[step].tolist()
        micro_step = step % self._accumulate
        together = self._plan[step - micro_step : step - micro_step + self._accumulate]
        group, is_filler = self._take(index)
        info = StepInfo(
            step=self._step,
            local_samples=0 if is_filler else len(group),
            local_targets=0 if is_filler else sum(sample.targets for sample in group),
            all_samples_this_step=samples,
            all_targets=targets,
            is_filler=is_filler,
            micro_step=micro_step,
            micro_steps=len(together),
            optimizer_samples=int(together[:, 1].sum()),
            optimizer_targets=int(together[:, 2].sum()),
            modalities=tuple(name for bit, name in enumerate(self._modalities) if flags >> bit & 1),
        )
        self._emitted += 1
        self._step += 1
        if self._emitted == len(self._plan):
            self._end_round()
        return AlignedGroup(group, replace(info, loss_scale=self._loss_scale(info)))

    def _take(self, index: int) -> tuple[list[Sample], bool]:
        if index != FILLER:
            return self._groups[index], False
        assert self._filler is not None  # `_share_filler` saw to it
        return [self._filler], True

    def _loss_scale(self, info: StepInfo) -> float:
        assert self._channel is not None
        if self._loss_scaling == "none" or info.is_filler:
            return float(not info.is_filler)
        if self._loss_scaling == "exact":
            local, total = info.local_targets, info.optimizer_targets
        else:
            local, total = info.local_samples, info.optimizer_samples
        return self._channel.world_size * local / total if total else 0.0

    def _end_round(self) -> None:
        """Stand at the beginning of the next round, or at the end of the epoch."""
        self._groups = []
        if self._last:
            self._hold_source()
            return
        self._plan, self._emitted, self._splits = self._plan[:0], 0, 0
        self._round += 1
        self._drained = self._ended
        if not self._drained:  # Else the source's state stays: the filler comes from there.
            self._source_state = self._next_source_state

    def _hold_source(self) -> None:
        self._source_state = detach(self.source.state_dict())

    def _round_steps(self) -> int:
        """Return how many steps a full round has."""
        if self._channel is None or self._channel.world_size == 1:
            return self._accumulate
        ramp = _FIRST_ROUND_STEPS << min(self._round, 16)
        return min(self._round_size, round_up(ramp, self._accumulate))

    def _measure(self, group: Sequence[Sample]) -> GroupCost:
        flags = sum(
            1 << bit
            for bit, is_in in enumerate(self._modalities.values())
            if any(map(is_in, group))
        )
        targets = sum(sample.targets for sample in group)
        return GroupCost(
            len(group), targets, check_count("cost_fn", self._cost_fn(group), 0), flags
        )

    # --- unequal ranks ------------------------------------------------------------------------

    def _share_filler(self, rows: IntArray, groups: list[list[Sample]], where: str) -> None:
        """Give ranks that never had a sample one of another rank's."""
        channel = self._channel
        assert channel is not None
        if not rows[:, _NEEDS_FILLER].any():
            return
        donor = int(np.flatnonzero(rows[:, _GROUPS])[0])
        data = None
        if channel.rank == donor:
            try:
                data = encode_sample(_cheapest(groups))
            except SampleError as error:
                channel.fail(error, f"{where}, sending a sample to a rank that has none")
                raise
        received = channel.broadcast(data, donor, where)
        if rows[channel.rank, _NEEDS_FILLER]:
            self._received, self._filler = received, decode_sample(received)

    def _count_unemitted(self, left: list[list[Sample]]) -> None:
        pending = [getattr(node, "remaining_samples", 0) for node in walk(self.source)]
        self._unemitted = sum(map(len, left)) + sum(pending)
        if self._unemitted:
            warnings.warn(
                f'`uneven="stop"`: another rank has ended, so {self._unemitted} samples of rank '
                f"{self._config()['rank']} are not emitted in epoch {self._epochs.epoch}.",
                stacklevel=2,
            )

    def _attend(self) -> None:
        """Go on answering the other ranks, which still have data, from a thread."""
        self._peers_go_on = False
        self._attendance = threading.Thread(
            target=self._answer, name="odb_nodes-attendance", daemon=True
        )
        self._attendance.start()

    def _answer(self) -> None:
        channel = self._channel
        assert channel is not None
        try:
            ended = False
            while not ended:
                rows = channel.gather(np.array([0, 0, 1, 0]), "the rest of the epoch")
                ended = bool(rows[:, _ENDED].all())
        except (PeerError, StateError, Interrupted):
            return  # The next exchange of this rank finds out for itself.

    def _end_attendance(self) -> None:
        thread, self._attendance = self._attendance, None
        if thread is not None:
            thread.join()  # Ends: each round of the others ends within `timeout_s`.

    def _config(self) -> dict[str, Any]:
        rank, world_size = group_rank(self._process_group)
        return {
            "rank": rank,
            "world_size": world_size,
            "round_size": self._round_size,
            "uneven": self._uneven,
            "loss_scaling": self._loss_scaling,
            "accumulate": self._accumulate,
            "seed": self._seed,
            "cost_fn": name_of(self._cost_fn),
            "modalities": list(self._modalities),
        }


def _tokens(sample: Sample) -> int:
    return sample.tokens


def _cheapest(groups: list[list[Sample]]) -> Sample:
    """Return the sample that is best to fill with: one that has a loss, and is short."""
    samples = [sample for group in groups for sample in group]
    return min(samples, key=lambda one: (one.targets == 0, one.patches, one.tokens))


def _read_offer(row: IntArray) -> Offer:
    """Return the offer that is in a message."""
    count = int(row[_ROWS])
    table = row[_HEADER : _HEADER + COLUMNS * count].reshape(count, COLUMNS)
    return Offer(table, int(row[_GROUPS]), bool(row[_ENDED]))
