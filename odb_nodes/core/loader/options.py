"""The options of the whole graph, with their defaults and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from odb_nodes._support.checks import (
    check_bool,
    check_callable,
    check_choice,
    check_names,
    check_seconds,
    check_type,
    keep_count,
)
from odb_nodes.core.alignment.aligned_round import LossRule, LossScaling
from odb_nodes.core.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.core.collate.protocol import Collate
from odb_nodes.core.nodes.exclusions import Exclude, ExcludedKeys
from odb_nodes.core.nodes.window_bucketer import StateMode
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.planning.auto_window import AUTO
from odb_nodes.core.planning.options import JobOptions, PlanOptions
from odb_nodes.core.planning.runs import check_diversity
from odb_nodes.core.processing import WorkerOptions
from odb_nodes.core.sample import Observe
from odb_nodes.core.sources import Mixing
from odb_nodes.core.sources.known_lengths import Lengths
from odb_nodes.core.sources.mixing import Weights

if TYPE_CHECKING:
    from odb_nodes.core.alignment.exchange.base import ProcessGroupLike

CollateIn = Literal["auto", "workers", "main"]
ProcessFn = Callable[[Any], Any] | None

_AUTO_IN_FLIGHT = 1024  # samples, for an `"auto"` window: its size is unknown when workers start


@dataclass(frozen=True, kw_only=True)
class BatchOptions(PlanOptions):
    """The options of batches under any trainer. See `ODBDataLoader` for the fields."""

    token_budget: int | TokenBudget
    collate_fn: Collate | None = None
    process_fn: ProcessFn | Mapping[str, ProcessFn] = None
    observe: Observe | None = None
    lengths: Lengths = None
    prefetch: int = 4
    state: StateMode = "replay"
    workers: WorkerOptions | None = None
    collate_in: CollateIn = "auto"
    timeout_s: float = PEER_TIMEOUT_S
    exclude: Exclude = None
    tasks: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_budget()
        check_callable("collate_fn", self.collate_fn)
        for name, function in _by_name("process_fn", self.process_fn).items():
            check_callable(name, function)
        check_callable("observe", self.observe)
        keep_count(self, "prefetch", 0)
        check_choice("state", self.state, get_args(StateMode))
        remedy = "For 4 worker processes, pass `WorkerOptions(num_workers=4)`."
        check_type("workers", self.workers, WorkerOptions | None, remedy)
        check_choice("collate_in", self.collate_in, get_args(CollateIn))
        check_seconds("timeout_s", self.timeout_s)
        object.__setattr__(self, "exclude", ExcludedKeys.of(self.exclude))
        object.__setattr__(self, "tasks", check_names("tasks", self.tasks))

    def _check_budget(self) -> None:
        check_diversity(self.diversity, TokenBudget.of(self.token_budget, "token_budget"))

    @property
    def budget(self) -> TokenBudget:
        """The budget that groups are formed under."""
        return TokenBudget.of(self.token_budget)

    def loader_options(self, **decided: Any) -> LoaderOptions:
        """Return the options of a loader; options that a trainer has `decided` override these."""
        options = {field.name: getattr(self, field.name) for field in fields(BatchOptions)}
        return LoaderOptions(**{**options, **decided})


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(BatchOptions, JobOptions):
    """All options of an `ODBDataLoader`, which documents the fields."""

    shuffle: bool | None = None
    num_workers: int = WorkerOptions.num_workers
    sampler: Iterable[int] | None = None
    pin_memory: bool = False
    process_group: ProcessGroupLike = None
    sharded: bool = False
    loss_scaling: LossScaling = LossRule.scaling
    weights: Weights | Mixing = None
    virtual_ranks: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle is not None:
            check_bool("shuffle", self.shuffle)
        keep_count(self, "num_workers", 0)
        check_bool("pin_memory", self.pin_memory)
        check_bool("sharded", self.sharded)
        check_choice("loss_scaling", self.loss_scaling, get_args(LossScaling))
        if self.virtual_ranks is not None:
            keep_count(self, "virtual_ranks")
            if self.sharded:
                raise ValueError(
                    "`sharded` must be False with `virtual_ranks`, which plan the same steps for "
                    "any number of ranks."
                )
        if self.workers is not None and self.num_workers:
            raise ValueError(
                "`num_workers` and `workers` must not both be given, but are "
                f"{self.num_workers} and {self.workers} instead."
            )

    @property
    def worker_options(self) -> WorkerOptions:
        """The options of workers, with enough samples in flight for a refill of the pool."""
        options = self.workers or WorkerOptions(num_workers=self.num_workers)
        if options.in_flight_samples is not None:
            return options
        window = _AUTO_IN_FLIGHT if self.window == AUTO else self.window
        ahead = 4 * options.nominal_chunk_samples * options.num_workers
        return replace(options, in_flight_samples=max(window, ahead))


def _by_name(name: str, functions: Any) -> dict[str, Any]:
    """Return functions by their names in errors: `name`, or `name['source']` for each source."""
    if not isinstance(functions, Mapping):
        return {name: functions}
    return {f"{name}[{source!r}]": function for source, function in functions.items()}
