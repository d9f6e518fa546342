"""A sampler of batches under a token budget, for loaders that are not ours."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy.typing as npt

from odb_nodes._core.checks import check_bool, check_count, check_type
from odb_nodes._core.processes import resolve_rank
from odb_nodes.contract.state import NodeState, seal_whole, unseal_whole
from odb_nodes.errors import StateError
from odb_nodes.planning import StepTime, TokenBudget
from odb_nodes.planning.auto_window import AUTO, WindowSize
from odb_nodes.planning.known_epochs import KnownJob, known_window
from odb_nodes.planning.known_lengths import EpochPlan
from odb_nodes.planning.sample_costs import SampleCosts
from odb_nodes.sources.sharded_sampler import epoch_order


@dataclass(kw_only=True)
class BatchSamplerState(NodeState):
    """Where a `TokenBatchSampler` stands: after `step` batches of an epoch of these settings."""

    epoch: int
    step: int
    settings: dict[str, Any]
    next_epoch: int | None = None  # what `set_epoch` has set meanwhile


class TokenBatchSampler:
    """Yields batches of indices under a token budget, for known lengths.

        sampler = TokenBatchSampler(lengths, 16_384, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    It is for a `DataLoader`, a `StatefulDataLoader`, or a trainer that wants a `batch_sampler`.
    It makes the batches of an `ODBDataLoader(dataset, lengths=lengths)` with the same options, on
    each rank and in each epoch; on several ranks that loader orders its steps anew. (Not with
    `oversize="drop"`, where samples that are too long are no part of this plan.) All ranks have
    the same number of batches, which may differ from epoch to epoch; the batches of a step cost
    about the same. A rank that has no sample left for a step takes the shortest sample once more.
    No `StepInfo` comes with a batch: weigh its loss by its number of targets yourself.

    After all batches of an epoch, the next iteration begins the next epoch; `set_epoch` chooses
    another one. A `StatefulDataLoader` saves the sampler's state. A plain `DataLoader` with workers
    reads ahead: save `state_dict(step)` with the number of batches that were trained on. Lightning
    takes the length of the first epoch for all epochs, unless you pass
    `Trainer(reload_dataloaders_every_n_epochs=1)`.

    Args:
        lengths: tokens of each sample, (n,).
        budget: padded tokens of a batch, or a `TokenBudget` without a limit of patches.
        rank: this rank. Default: from torch.distributed, or `RANK`.
        world_size: number of ranks. Default: from torch.distributed, or `WORLD_SIZE`.
        window: samples of each rank that are planned together. `"auto"`: all of the epoch; without
            `shuffle` 2048.
        shuffle: whether each epoch has an order of its own; otherwise 0, 1, 2, ... The batches of a
            window come in an order drawn from `seed` either way.
        largest_first: steps of the longest samples that begin each epoch.
        seed: of the orders; the same on all ranks.
        accumulate: batches of an optimizer step, which have unlike lengths.
        step_time: what a step takes, as for `RankAligner`, by lengths alone.

    Raises:
        TypeError, ValueError: an argument is not valid.
        SampleError: a sample is too long under `oversize="error"` (on iteration).
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        budget: int | TokenBudget,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        window: WindowSize = AUTO,
        shuffle: bool = True,
        largest_first: int = 0,
        seed: int = 0,
        accumulate: int = 1,
        step_time: StepTime | None = None,
    ) -> None:
        self._samples = SampleCosts.of_lengths(lengths)
        tokens = self._samples.tokens
        self._rank, self._world_size = resolve_rank(rank, world_size)
        if self._world_size > len(tokens):
            raise ValueError(
                f"`lengths` must have a sample for each of the {self._world_size} ranks, but has "
                f"{len(tokens)}."
            )
        self._shuffle = check_bool("shuffle", shuffle)
        check_type("step_time", step_time, StepTime | None)
        budget = TokenBudget.of(budget)
        if budget.max_patches is not None:
            raise ValueError("`budget` must have no `max_patches`: only lengths are known here.")
        self._job = KnownJob(
            budget=budget,
            world_size=self._world_size,
            window=known_window(window, in_order=not self._shuffle),
            largest_first=largest_first,
            seed=seed,
            accumulate=accumulate,
            step_time=step_time,
        )
        self.epoch = self.step = 0
        """The epoch, and how many of its batches are out."""
        self._is_resumed = self._is_at_end = self._has_ended = False
        self._next_epoch: int | None = None  # set while the batches of another one came
        self._planned: tuple[int, EpochPlan] | None = None  # of an epoch
        self._settings = {
            **{f"budget.{name}": one for name, one in budget.fingerprint().items()},
            **{name: one for name, one in asdict(self._job).items() if name != "budget"},
            "lengths": f"{len(tokens)}, CRC-32 {zlib.crc32(tokens.astype('<i8').tobytes())}",
            "rank": self._rank,
            "shuffle": self._shuffle,
        }

    @property
    def sampler(self) -> TokenBatchSampler:
        """This object: where Lightning looks for `set_epoch`."""
        return self

    def __len__(self) -> int:
        """Return how many batches the epoch has, the next one once all of them are out.

        Once `set_epoch` was called, that is the next one, too.
        """
        return len(self._plan(self.epoch if self._is_resumed else self._following()))

    def _following(self) -> int:
        """Return the epoch that the next iteration is of, if it does not go on with a state."""
        return self.epoch + self._is_at_end if self._next_epoch is None else self._next_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the epoch, or those that a loaded state has left of it."""
        if not self._is_resumed:  # A trainer that knows the length does not ask for the end.
            self._go_to(self._following())
        self._is_resumed = self._has_ended = False
        plan, shortest = self._plan(self.epoch), int(self._samples.tokens.argmin())
        for step in range(self.step, len(plan)):
            self.step = step + 1
            self._is_at_end = self.step == len(plan)
            yield plan.group(step, self._rank).tolist() or [shortest]
        self._is_at_end = self._has_ended = True  # also where a state had left nothing

    def _plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch, which is made once."""
        if self._planned is None or self._planned[0] != epoch:
            order = epoch_order(
                len(self._samples.tokens), self._job.seed, epoch, shuffle=self._shuffle
            )
            self._planned = epoch, self._job.plan(self._samples, order, epoch)
        return self._planned[1]

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one that begins.

        An iteration goes on within its epoch; a state that is saved there gives the rest of that
        epoch, and then `epoch`. A state within `epoch`, loaded before, goes on there.

        Raises:
            StateError: the loaded state is within another epoch, of which batches remain.
        """
        epoch = check_count("epoch", epoch, 0)
        if self.step and not self._is_resumed:
            self._next_epoch = epoch
            return
        if epoch != self.epoch:
            if 0 < self.step < len(self._plan(self.epoch)):
                raise StateError(
                    f"`set_epoch` must be given {self.epoch}, the epoch that the state stands "
                    f"within, but got {epoch}, and batches of epoch {self.epoch} remain. Call "
                    f"`set_epoch({self.epoch})` to go on with them; to leave them out, load "
                    f"nothing and call `set_epoch({epoch})`."
                )
            self._go_to(epoch)
        self._next_epoch = None

    def _go_to(self, epoch: int) -> None:
        self.epoch, self.step, self._next_epoch = epoch, 0, None
        self._is_resumed = self._is_at_end = self._has_ended = False

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position of the sampler.

        A state after the last batch of an epoch is at its end: the next iteration yields nothing,
        and the one after it the next epoch. Once the iteration has ended, it is the next epoch.

        Args:
            step: batches of the epoch that were trained on. Default: all batches that are out,
                some of which the workers of a plain `DataLoader` may hold.

        Raises:
            ValueError: `step` is more than the batches that are out.
        """
        out = self.step if step is None else check_count("step", step, 0)
        if out > self.step:
            raise ValueError(
                f"`step` must be at most {self.step}, the batches of epoch {self.epoch} that are "
                f"out, but is {out} instead."
            )
        epoch, following = self.epoch, self._next_epoch
        if step is None and self._has_ended:
            epoch, out, following = self._following(), 0, None
        state = BatchSamplerState(
            epoch=epoch, step=out, settings=self._settings, next_epoch=following
        )
        return seal_whole(type(self).__name__, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the next iteration go on where a state stands.

        Raises:
            StateError: it is damaged, or is that of a sampler with other settings.
        """
        name = type(self).__name__
        state = unseal_whole(state_dict, name, BatchSamplerState)
        for field in sorted({*state.settings, *self._settings}):
            saved, present = state.settings.get(field), self._settings.get(field)
            if saved != present:
                raise StateError(
                    f"the state does not fit this {name}: `{field}` was {saved!r} when saved, but "
                    f"is {present!r} now. Build it as it was; or, to leave out the rest of the "
                    f"epoch, load nothing and call `set_epoch({state.epoch + 1})`."
                )
        self._go_to(state.epoch)
        self.step, self._is_resumed, self._next_epoch = state.step, True, state.next_epoch
