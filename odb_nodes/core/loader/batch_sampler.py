"""A sampler of batches under a token budget, for the `DataLoader` of torch and other loaders."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy.typing as npt

from odb_nodes._support.arrays import int64_bytes
from odb_nodes._support.checks import check_bool, check_count, check_type
from odb_nodes._support.processes import resolve_rank
from odb_nodes.core.contract.state import NodeState, seal_whole, unseal_whole
from odb_nodes.core.planning import StepTime, TokenBudget
from odb_nodes.core.planning.auto_window import AUTO, WindowSize
from odb_nodes.core.planning.known_epochs import KnownJob, known_window
from odb_nodes.core.planning.known_lengths import EpochPlan
from odb_nodes.core.planning.sample_costs import SampleCosts
from odb_nodes.core.sources.dataset_order import epoch_order
from odb_nodes.errors import StateError


@dataclass(kw_only=True)
class BatchSamplerState(NodeState):
    """The state of a `TokenBatchSampler`."""

    epoch: int
    step: int  # batches of the epoch that were trained on
    settings: dict[str, Any]  # the arguments that decide batches
    next_epoch: int | None = None  # from a `set_epoch` within the epoch


class TokenBatchSampler:
    """Yields batches of indices under a token budget, for known lengths.

        sampler = TokenBatchSampler(lengths, 16_384, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    Use it with a `DataLoader`, a `StatefulDataLoader`, or a trainer that takes a `batch_sampler`.
    The batches are those of an `ODBDataLoader(dataset, lengths=lengths)` with the same options, on
    each rank and in each epoch; on several ranks, that loader permutes its steps. (With
    `oversize="drop"` they differ: this plan leaves out samples that are too long.) All ranks have
    the same number of batches, which may differ between epochs; the batches of a step cost about
    the same. A rank that has no sample for a step takes the shortest sample once more. No
    `StepInfo` comes with a batch: weigh the loss of each batch by its number of targets.

    After all batches of an epoch, the next iteration begins the next epoch, or the epoch of
    `set_epoch`. A `StatefulDataLoader` saves the sampler's state. A plain `DataLoader` with workers
    reads ahead: save `state_dict(step)` with the number of batches that were trained on. Lightning
    uses the length of the first epoch for all epochs, unless you pass
    `Trainer(reload_dataloaders_every_n_epochs=1)`.

    Args:
        lengths: tokens of each sample, (n,).
        budget: padded tokens of a batch, or a `TokenBudget` without a limit of patches.
        rank: this rank. Default: from torch.distributed, or `RANK`.
        world_size: number of ranks. Default: from torch.distributed, or `WORLD_SIZE`.
        window: samples of each rank that are planned together. `"auto"`: all of the epoch, up to
            2**23 samples of all ranks; without `shuffle` 2048.
        shuffle: whether to shuffle the samples anew in each epoch; otherwise 0, 1, 2, ... The
            batches of a window come in an order drawn from `seed` either way.
        largest_first: steps of the longest samples that begin each epoch.
        seed: seed of the orders; the same on all ranks.
        accumulate: batches of an optimizer step, which get different lengths.
        step_time: cost model of a step, as for `RankAligner`, by lengths alone.

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
        """The epoch, and the number of its batches that were yielded."""
        self._is_resumed = self._is_at_end = self._has_ended = False
        self._next_epoch: int | None = None  # from a `set_epoch` within an epoch
        self._planned: tuple[int, EpochPlan] | None = None  # an epoch and its plan
        job = asdict(self._job)
        del job["budget"]
        self._settings = {
            **{f"budget.{name}": value for name, value in budget.fingerprint().items()},
            **job,
            "lengths": f"{len(tokens)}, CRC-32 {zlib.crc32(int64_bytes(tokens))}",
            "rank": self._rank,
            "shuffle": self._shuffle,
        }

    @property
    def sampler(self) -> TokenBatchSampler:
        """This object. Lightning looks here for `set_epoch`."""
        return self

    def __len__(self) -> int:
        """Return the number of batches of the epoch; after its end or `set_epoch`, of the next."""
        return len(self._plan(self.epoch if self._is_resumed else self._following()))

    def _following(self) -> int:
        """Return the epoch of the next iteration, if it does not resume from a state."""
        return self.epoch + self._is_at_end if self._next_epoch is None else self._next_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the epoch, or after a loaded state its remaining batches."""
        if not self._is_resumed:  # A trainer that knows the length may not iterate to the end.
            self._go_to(self._following())
        self._is_resumed = self._has_ended = False
        plan = self._plan(self.epoch)
        shortest = int(self._samples.tokens.argmin())
        for step in range(self.step, len(plan)):
            self.step = step + 1
            self._is_at_end = self.step == len(plan)
            yield plan.group(step, self._rank).tolist() or [shortest]
        self._is_at_end = self._has_ended = True  # also after a state without remaining batches

    def _plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch. The last plan is kept."""
        if self._planned is None or self._planned[0] != epoch:
            order = epoch_order(
                len(self._samples.tokens), self._job.seed, epoch, shuffle=self._shuffle
            )
            self._planned = epoch, self._job.plan(self._samples, order, epoch)
        return self._planned[1]

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next epoch.

        A running iteration completes its epoch first; a state that is saved there gives the
        remaining batches, and then `epoch`. A state within `epoch` that was loaded before resumes.

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
                    f"`set_epoch` must be given {self.epoch}, the epoch of the loaded state, but "
                    f"got {epoch}, and batches of epoch {self.epoch} remain. Call "
                    f"`set_epoch({self.epoch})` to continue with them; to skip them, load no state "
                    f"and call `set_epoch({epoch})`."
                )
            self._go_to(epoch)
        self._next_epoch = None

    def _go_to(self, epoch: int) -> None:
        self.epoch, self.step, self._next_epoch = epoch, 0, None
        self._is_resumed = self._is_at_end = self._has_ended = False

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position of the sampler.

        With a state from after the last batch of an epoch, the next iteration yields nothing, and
        the following iteration the next epoch. With a state from after the end of the iteration,
        the next iteration yields the next epoch.

        Args:
            step: batches of the epoch that were trained on. Default: all batches that were
                yielded, some of which the workers of a plain `DataLoader` may hold.

        Raises:
            ValueError: `step` is more than the batches that were yielded.
        """
        trained = self.step if step is None else check_count("step", step, 0)
        if trained > self.step:
            raise ValueError(
                f"`step` must be at most {self.step}, the batches of epoch {self.epoch} that were "
                f"yielded, but is {trained} instead."
            )
        epoch, next_epoch = self.epoch, self._next_epoch
        if step is None and self._has_ended:
            epoch = self._following()
            trained = 0
            next_epoch = None
        state = BatchSamplerState(
            epoch=epoch, step=trained, settings=self._settings, next_epoch=next_epoch
        )
        return seal_whole(type(self).__name__, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration resume at a state.

        Raises:
            StateError: the state is damaged, or of a sampler with other settings.
        """
        name = type(self).__name__
        state = unseal_whole(state_dict, name, BatchSamplerState)
        for field in sorted({*state.settings, *self._settings}):
            saved, present = state.settings.get(field), self._settings.get(field)
            if saved != present:
                raise StateError(
                    f"the state does not fit this {name}: `{field}` was {saved!r} when saved, but "
                    f"is {present!r} now. Build it as it was; or, to skip the remaining batches of "
                    f"the epoch, load no state and call `set_epoch({state.epoch + 1})`."
                )
        self._go_to(state.epoch)
        self.step = state.step
        self._next_epoch = state.next_epoch
        self._is_resumed = True
