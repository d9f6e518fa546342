"""The whole graph in one call."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert
from torchdata.nodes import BaseNode

from odb_nodes._compat.accelerate import has_accelerator
from odb_nodes._support.checks import check_type, explains_arguments
from odb_nodes._support.text import counted
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.alignment.aligned_round import LossScaling
from odb_nodes.core.alignment.exchange import group_rank
from odb_nodes.core.alignment.peers import VirtualTeam
from odb_nodes.core.alignment.virtual_ranks import VirtualRanks, progress_of
from odb_nodes.core.collate.protocol import Collate
from odb_nodes.core.contract.graph import length_of, walk
from odb_nodes.core.loader.loader import Loader
from odb_nodes.core.loader.options import CollateIn, LoaderOptions, ProcessFn
from odb_nodes.core.loader.pipeline import RankGraph, graphs_of_team, note_of_lengths
from odb_nodes.core.nodes.exclusions import Exclude
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.nodes.read_ahead import ReadAhead
from odb_nodes.core.nodes.window_bucketer import StateMode
from odb_nodes.core.planning import StepTime, TimeFn, TokenBudget, Uneven
from odb_nodes.core.planning.auto_window import WindowSize, WindowStart
from odb_nodes.core.processing import ParallelProcessor, WorkerOptions
from odb_nodes.core.sample import Observe
from odb_nodes.core.sources import Mixing
from odb_nodes.core.sources.datasets import order_of
from odb_nodes.core.sources.known_lengths import Lengths
from odb_nodes.core.sources.mixing import Weights
from odb_nodes.core.sources.source_mixer import SourceMixer
from odb_nodes.errors import StateError

if TYPE_CHECKING:
    from odb_nodes.core.alignment.exchange.base import ProcessGroupLike

_TORCH_ARGUMENTS = {
    "batch_size": "`token_budget=` bounds a batch, and `TokenBudget(max_samples=)` its samples",
    "batch_sampler": "batches are formed here: pass a `sampler`",
    "drop_last": "`uneven=` says what becomes of the last batches",
    "generator": "pass a `seed`",
    "multiprocessing_context": "pass `workers=WorkerOptions(start_method=)`",
    "persistent_workers": "workers always persist",
    "prefetch_factor": "pass `prefetch=`, in batches, or `WorkerOptions(in_flight_samples=)`",
    "timeout": "pass `workers=WorkerOptions(timeout_s=)`",
    "worker_init_fn": "pass `workers=WorkerOptions(worker_init_fn=)`",
}
"""Arguments of torch's `DataLoader` that this loader lacks -> what to pass instead."""

_ACCELERATE_INTEGRATIONS = ("accelerate", "huggingface", "lightning")

_ARGUMENTS = frozenset({"dataset", *LoaderOptions.__dataclass_fields__})


@explains_arguments("`DataLoader`", _TORCH_ARGUMENTS)
class ODBDataLoader(Loader[Any]):
    """Batches of a dataset under a token budget, each epoch shuffled anew, resumable at any step.

    The loader builds the graph `ShardedSampler` (or `IterableSource`), `ParallelProcessor`,
    `WindowBucketer`, `RankAligner`, `GroupCollator`, `ReadAhead`, `Loader`; the workers observe the
    lengths. The batches depend on data, seed and configuration alone, never on the number of
    workers. Under torch.distributed each rank makes a loader, over its share of the dataset, and
    all ranks take the same steps.

    Args:
        dataset: a map-style dataset (`__getitem__` and `__len__`), an iterable, or a source node
            such as `JsonlSource`; or a dict of these by name, which are mixed by `weights`. A
            method `set_epoch` is called with the number of each epoch, in the workers too.
        token_budget: padded tokens of a batch, or a `TokenBudget`.
        collate_fn: list of processed samples -> batch, a dict or another mutable mapping. Default:
            `PaddingCollate.of(budget)`, or `PackedCollate.of(budget)` if the budget's layout is
            `"packed"`. Workers call `prepare` of these two; any other function gets the samples as
            processing returned them.
        shuffle: whether to shuffle a map-style dataset, or a `JsonlSource`, anew in each epoch.
            Default: True without a `sampler`, unless the source has `shuffle=False`. Iterables and
            other nodes keep their order.
        seed: seed of the shuffling, of the permutations of steps, and of the random numbers of
            processing and of `collate_fn`.
        num_workers: number of worker processes; 0 processes in the training thread, and starts no
            other thread, unless a rank hosts several `virtual_ranks`.
        window: samples that wait in the pool, on each rank; `"auto"`: enough to fill 32 batches.
        process_fn: item of the dataset -> processed sample, or `Skipped`; runs in the workers.
            If `dataset` is a dict, one function for all, or a dict of functions. Default:
            the items are processed samples already. If dataset, `process_fn` and `observe` all
            have an attribute `draws_random_numbers = False`, nothing is seeded.
        observe: processed sample -> its tokens, or `Observation`; see `LengthObserver`.
        lengths: the length in tokens of each sample: the name of a column, an integer for each
            sample, or a file that `odb-nodes profile --save-lengths` has written. The whole epoch
            is then planned at once, up to 2**23 samples of all ranks; see docs/known-lengths.md.
            Default: the lengths of `input_ids` in a table of `datasets`, without `process_fn` and
            `observe`. `False`: lengths are observed.
        prefetch: number of batches that a thread makes ahead, if there are workers.
        state: how a state holds the pool, `"replay"` or `"payload"`; see `WindowBucketer`.
        workers: all options of the workers, in place of `num_workers`. By default at least
            `window` samples (1024 for `"auto"`) are in flight, so that a refill never waits.
        collate_in: where `collate_fn` runs. `"auto"`: in the workers if `lengths` are known, so
            that samples never reach the trainer's process, and in the trainer's process otherwise.
            `"workers"`: the same, and the log says where it has no effect. `"main"`: always in the
            trainer's process. See docs/performance.md.
        sampler: iterable of indices into a map-style dataset, 0 or more, in place of `shuffle`.
            Each iteration must yield the same order.
        pin_memory: whether batches are in pinned memory, for faster copies to the accelerator.
            Without CUDA it has no effect.
        process_group: the ranks that share the data; see `RankAligner`. Default: all ranks.
        sharded: whether `dataset` or `sampler` yields the samples of this rank alone, so that they
            are not split over the ranks here.
        uneven: if ranks have unequal data: `"fill"` or `"stop"`; see `RankAligner`.
        loss_scaling: `StepInfo.loss_scale` is `"exact"`, `"approx"` or `"none"`; see `RankAligner`.
        accumulate: number of batches of an optimizer step.
        round_size: number of steps between two messages of the ranks; see `RankAligner`.
        timeout_s: seconds to wait for another rank before it is an error.
        exclude: keys of samples to leave out from now on, the same on all ranks: integers, as in
            `StepInfo.keys`; where sources have names, a mapping of `row_sources` to keys; or the
            path of a file in JSON Lines, each line a key or `{"source": "ocr", "key": 17}`. States
            contain the keys. Excluded samples are still processed.
        tasks: names of all tasks of the samples, for `StepInfo.task_targets`; see `TaskWeights`.
        largest_first: batches of the longest samples that begin each epoch; see `WindowBucketer`.
        diversity: weight, in 0..1, of an even mix of tasks in a batch; see `WindowBucketer`.
        window_start: whether the first batch waits for the whole window: `"full"`, `"early"` or
            `"auto"`, by the length of the epoch; see `WindowBucketer`.
        weights: name of the dataset -> its share of the samples, if `dataset` is a dict;
            `"proportional"` to the samples of each; a `WeightSchedule`; or a `Mixing`, for shares
            of tokens, or another end of the epoch. Default: equal shares; each sample is emitted
            once in an epoch.
        virtual_ranks: plan the steps of this number of ranks, a multiple of the real number. Each
            real rank hosts the same number, and takes their batches in turn, as micro-steps: the
            optimizer steps are the same on any number of real ranks. See docs/resuming.md.
        step_time: cost model of a step, by which ranks are levelled; see `RankAligner`.

    Raises:
        TypeError, ValueError: an argument is not valid, `collate_fn` is a `PaddingCollate` or
            `PackedCollate` for another budget, or the dataset is empty, unless it is `sharded` and
            the job has several ranks.
    """

    yields_batches = True

    def __init__(
        self,
        dataset: Any,
        *,
        token_budget: int | TokenBudget,
        collate_fn: Collate | None = None,
        shuffle: bool | None = None,
        seed: int = LoaderOptions.seed,
        num_workers: int = LoaderOptions.num_workers,
        window: WindowSize = LoaderOptions.window,
        process_fn: ProcessFn | Mapping[str, ProcessFn] = None,
        observe: Observe | None = None,
        lengths: Lengths = LoaderOptions.lengths,
        prefetch: int = LoaderOptions.prefetch,
        state: StateMode = LoaderOptions.state,
        workers: WorkerOptions | None = None,
        collate_in: CollateIn = LoaderOptions.collate_in,
        sampler: Iterable[int] | None = None,
        pin_memory: bool = LoaderOptions.pin_memory,
        process_group: ProcessGroupLike = None,
        sharded: bool = LoaderOptions.sharded,
        uneven: Uneven = LoaderOptions.uneven,
        loss_scaling: LossScaling = LoaderOptions.loss_scaling,
        accumulate: int = LoaderOptions.accumulate,
        round_size: int = LoaderOptions.round_size,
        timeout_s: float = LoaderOptions.timeout_s,
        exclude: Exclude = LoaderOptions.exclude,
        tasks: Sequence[str] = LoaderOptions.tasks,
        largest_first: int = LoaderOptions.largest_first,
        diversity: float = LoaderOptions.diversity,
        window_start: WindowStart = LoaderOptions.window_start,
        weights: Weights | Mixing = None,
        virtual_ranks: int | None = LoaderOptions.virtual_ranks,
        step_time: StepTime | TimeFn | None = LoaderOptions.step_time,
    ) -> None:
        arguments = locals()  # A test compares their names with the fields of `LoaderOptions`.
        options = LoaderOptions(
            **{field.name: arguments[field.name] for field in fields(LoaderOptions)}
        )
        self.dataset, self.options = dataset, options
        """The dataset, and all other arguments."""
        root: BaseNode[Any]
        if options.virtual_ranks is None:
            self._graphs = [RankGraph(dataset, options)]
            root = self._graphs[0].collator
        else:
            team = VirtualTeam(options.virtual_ranks, process_group, timeout_s)
            self._graphs = graphs_of_team(dataset, options, team)
            root = VirtualRanks(
                [graph.collator for graph in self._graphs],
                [graph.aligner for graph in self._graphs],
                team,
            )
        note_of_lengths(self._graphs, options)
        if options.prefetch and options.worker_options.num_workers:
            root = ReadAhead(root, options.prefetch)
        super().__init__(root)

    @classmethod
    def from_dataloader(
        cls, loader: DataLoader[Any], *, token_budget: int | TokenBudget, **options: Any
    ) -> ODBDataLoader:
        """Return a loader over the dataset of a `DataLoader` or `StatefulDataLoader`.

        Dataset, order, collate function, workers and pinning stay. The budget replaces the
        batch size and `drop_last`; `WorkerOptions.in_flight_samples` and `prefetch` replace
        `prefetch_factor`, which counts batches of each worker. The default collate function
        replaces torch's, which cannot pad.

        Args:
            loader: a loader that a framework has built. It is not iterated.
            token_budget: padded tokens of a batch, or a `TokenBudget`.
            options: further arguments of `ODBDataLoader`, which override those of `loader`.

        Raises:
            TypeError: `loader` is no `DataLoader`.
            ValueError: the sampler of `loader` cannot yield its order again.
        """
        check_type("loader", loader, DataLoader)
        if loader.collate_fn not in (default_collate, default_convert):
            options.setdefault("collate_fn", loader.collate_fn)
        has_order = isinstance(loader.dataset, IterableDataset) or {"sampler", "shuffle"} & {
            *options
        }
        if not has_order:
            options = {**order_of(loader, group_rank(options.get("process_group"))), **options}
        if "workers" not in options and "num_workers" not in options:
            context = loader.multiprocessing_context
            options["workers"] = WorkerOptions(
                num_workers=loader.num_workers,
                start_method=None if context is None else context.get_start_method(),
                worker_init_fn=loader.worker_init_fn,
                timeout_s=loader.timeout or WorkerOptions.timeout_s,
            )
        options.setdefault("pin_memory", loader.pin_memory)
        return cls(loader.dataset, token_budget=token_budget, **options)

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator of a loaded state's epoch, or of the next one."""
        is_connected = any(
            f"odb_nodes.integrations.{name}" in sys.modules for name in _ACCELERATE_INTEGRATIONS
        )
        if not is_connected and has_accelerator():
            warn_user(
                "an `Accelerator` neither saves this loader nor moves its batches, not even after "
                "`accelerator.prepare`. Call `odb_nodes.integrations.accelerate."
                "configure_accelerator(accelerator, loader)`, or do both in your loop.",
                once="accelerator",
            )
        return super().__iter__()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS:
            cls = type(self)
            is_made = "root" in vars(self) and cls.__init__ is ODBDataLoader.__init__
            # A subclass may have a property of the same name.
            if is_made and getattr(cls, name, None) is getattr(ODBDataLoader, name, None):
                raise AttributeError(
                    f"`{name}` cannot be set on an existing loader: it would have no effect. Make "
                    f"another loader with `{name}=`; to continue at the position of this loader, "
                    "load its state there (`strict=False` lets some options change)."
                )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        mixers = [node for node in self._nodes_of_samples() if isinstance(node, SourceMixer)]
        parts = [str(mixers[0] if mixers else type(self.dataset).__name__)]
        parts.append(str(self.options.budget))
        if origin := self._graphs[0].origin:
            parts.append(f"planned from {origin}")
        if self.options.virtual_ranks is not None:
            parts.append(counted(self.options.virtual_ranks, "virtual rank"))
        return f"{type(self).__name__}({', '.join([*parts, self._progress_text()])})"

    def _progress_text(self) -> str:
        try:
            epoch, step, samples = self._progress()
        except StateError:
            return "loaded with a state of another graph"
        total = ""
        with suppress(TypeError):  # a dataset without a length
            if samples <= self.num_samples:  # Levelling may have given this rank more samples.
                about = "about " * (group_rank(self.options.process_group)[1] > 1)
                total = f" of {about}{self.num_samples}"
        return f"epoch {epoch}, step {step}: {samples}{total} samples done"

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next batch: e + 1 after the loop over epoch e.

        `for _ in range(loader.epoch, epochs)` takes the remaining epochs, also after a resume.
        """
        epoch = self._progress()[0]
        position = self.position
        has_ended = position is not None and (position.ended or position.left)
        if self._next_epoch is not None and (position is None or has_ended):
            return self._next_epoch
        return epoch + has_ended

    @property
    def step(self) -> int:
        """Number of batches of the epoch taken so far."""
        return self._progress()[1]

    @property
    def samples_done(self) -> int:
        """Number of this rank's samples in these batches; `num_samples` is the total."""
        return self._progress()[2]

    def _progress(self) -> tuple[int, int, int]:
        """Return epoch, step and samples done."""
        if (position := self.position) is None:
            return 0, 0, 0
        root: Any = position.root
        try:
            if self.options.virtual_ranks is not None:
                return progress_of(root)
            return root["epoch"], root["step"], root["samples"]
        except (KeyError, TypeError, IndexError):
            raise StateError(
                "the loaded state is of another graph, so its position is unknown; "
                "`iter(loader)` says what differs."
            ) from None

    def trust_labels(self) -> None:
        """Do not warn of loss weights: see `GroupCollator.trust_labels`."""
        for graph in self._graphs:
            graph.collator.trust_labels()

    @property
    def accumulate(self) -> int:
        """Number of batches of an optimizer step."""
        return self._graphs[0].aligner.accumulate * len(self._graphs)

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch on this rank; with several ranks, an approximate number.

        Raises:
            TypeError: the dataset does not know its length.
        """
        return sum(length_of(graph.samples) for graph in self._graphs)

    @property
    def replayed_samples(self) -> int:
        """Number of samples that the last restore processed again."""
        return sum(
            graph.bucketer.replayed_samples + graph.aligner.replayed_samples
            for graph in self._graphs
        )

    @property
    def oversize_samples(self) -> int:
        """Number of samples of this epoch so far that alone exceeded the budget."""
        return sum(graph.bucketer.oversize_samples for graph in self._graphs)

    @property
    def dropped_samples(self) -> int:
        """Number of samples of this epoch so far that `oversize="drop"` left out."""
        return sum(graph.bucketer.dropped_samples for graph in self._graphs)

    @property
    def skipped_samples(self) -> dict[str, int]:
        """Number of samples of this epoch so far that processing skipped, by reason."""
        reasons = [Counter(graph.bucketer.skipped_samples) for graph in self._graphs]
        return dict(sum(reasons, Counter()))

    @property
    def excluded_samples(self) -> int:
        """Number of samples of this epoch so far that `exclude` left out."""
        return sum(graph.bucketer.excluded_samples for graph in self._graphs)

    @property
    def unemitted_samples(self) -> int:
        """Number of samples of this rank and epoch that `uneven="stop"` left out."""
        return sum(graph.aligner.unemitted_samples for graph in self._graphs)

    @property
    def exchange_wait_s(self) -> float:
        """Seconds that the thread making batches has waited for other ranks so far."""
        return self._graphs[0].aligner.exchange_wait_s

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running worker processes."""
        kinds = (ParallelProcessor, PlannedGroups)
        nodes = (node for node in self._nodes_of_samples() if isinstance(node, kinds))
        return [pid for node in nodes for pid in node.worker_pids]

    def _nodes_of_samples(self) -> Iterator[BaseNode[Any]]:
        for graph in self._graphs:
            yield from walk(graph.samples)
