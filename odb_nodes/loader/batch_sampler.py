"""A sampler of batches under a token budget, for loaders that are not ours."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from odb_nodes._core.checks import check_bool, check_count
from odb_nodes._core.hashing import hash_ints
from odb_nodes._core.processes import resolve_rank
from odb_nodes.contract.state import NodeState, seal_whole, unseal_whole
from odb_nodes.errors import StateError
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.auto_window import WindowSize
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.simulation import (
    PlanKeywords,
    SampleCosts,
    SimulationOptions,
    check_lengths,
    plan_steps,
)
from odb_nodes.sources.sharded_sampler import Permutation

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    With a `window` in samples, an `ODBDataLoader` whose samples have these lengths makes the same
    batches; with `"auto"`, in its first epoch. All ranks have the same number of batches, which
    differs from epoch to epoch; the batches of a step cost about the same. A rank that has no
    sample left for a step takes the shortest sample once more; with `uneven="stop"` all ranks end
    there. No `StepInfo` comes with a batch: weigh its loss by its number of targets yourself.

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
        window: samples that wait on each rank to be grouped. See `ODBDataLoader`.
        shuffle: whether each epoch has an order of its own; otherwise 0, 1, 2, ...
        seed: of the orders; the same on all ranks.
        options: `round_size`, `uneven`, `dearest_first`, `accumulate`, as for `ODBDataLoader`.

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
        window: WindowSize = JobOptions.window,
        shuffle: bool = True,
        seed: int = JobOptions.seed,
        **options: Unpack[PlanKeywords],
    ) -> None:
        tokens = check_lengths(lengths)
        self._rank, self._world_size = resolve_rank(rank, world_size)
        if self._world_size > len(tokens):
            raise ValueError(
                f"`lengths` must have a sample for each of the {self._world_size} ranks, but has "
                f"{len(tokens)}."
            )
        none = np.zeros_like(tokens)
        self._samples = SampleCosts(tokens, tokens - 1, patches=none, tasks=none)
        self._shuffle = check_bool("shuffle", shuffle)
        budget = TokenBudget.of(budget)
        if budget.max_patches is not None:
            raise ValueError("`budget` must have no `max_patches`: only lengths are known here.")
        if unknown := options.keys() - PlanKeywords.__annotations__.keys():
            raise TypeError(f"`{min(unknown)}` is no option of `{type(self).__name__}`.")
        self._job = SimulationOptions(
            world_size=self._world_size, budget=budget, window=window, seed=seed, **options
        )
        self.epoch = self.step = 0
        """The epoch, and how many of its batches are out."""
        self._is_resumed = self._is_at_end = self._has_ended = False
        self._next_epoch: int | None = None  # set while the batches of another one came
        self._planned: tuple[int, list[list[int]]] | None = None  # an epoch, and its batches
        self._settings = {
            **{f"budget.{name}": one for name, one in budget.fingerprint().items()},
            **{name: one for name, one in asdict(self._job).items() if name != "budget"},
            "lengths": f"{len(tokens)}, CRC-32 {zlib.crc32(tokens.astype('<i8').tobytes())}",
            "rank": self._rank,
            "shuffle": self._shuffle,
        }
        del self._settings["cost_fn"]

    @property
    def sampler(self) -> TokenBatchSampler:
        """This object: where Lightning looks for `set_epoch`."""
        return self

    def __len__(self) -> int:
        """Return how many batches the epoch has, the next one once all of them are out.

        Once `set_epoch` was called, that is the next one, too. It is planned as a whole for that.
        """
        return self._count(self.epoch if self._is_resumed else self._following())

    def _count(self, epoch: int) -> int:
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, [*self._plan(epoch)]
        return len(self._planned[1])

    def _following(self) -> int:
        """Return the epoch that the next iteration is of, if it does not go on with a state."""
        return self.epoch + self._is_at_end if self._next_epoch is None else self._next_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the epoch, or those that a loaded state has left of it."""
        if not self._is_resumed:  # A trainer that knows the length does not ask for the end.
            self._go_to(self._following())
        self._is_resumed = self._has_ended = False
        epoch, planned = self.epoch, self._planned
        known = planned[1] if planned is not None and planned[0] == epoch else None
        batches = islice(self._plan(epoch) if known is None else known, self.step, None)
        following = next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            self.step += 1
            self._is_at_end = following is None
            yield [*batch]
        self._is_at_end = self._has_ended = True  # also where a state had left nothing

    def _plan(self, epoch: int) -> Iterator[list[int]]:
        order = np.arange(len(self._samples.tokens))
        if self._shuffle:
            order = Permutation(len(order), hash_ints(self._job.seed, epoch))(order)
        shards = [order[rank :: self._world_size] for rank in range(self._world_size)]
        shortest = int(self._samples.tokens.argmin())
        for step in plan_steps(self._samples, shards, self._job, epoch=epoch):
            group = step[self._rank]
            yield [shortest] if group is None else group.data()

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
            if 0 < self.step < self._count(self.epoch):
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
