"""Node: mixes named sources by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import check_count, check_type
from odb_nodes._support.processes import resolve_rank
from odb_nodes._support.text import counted
from odb_nodes.core.contract import NodeState, SourceStates, StatefulNode, snapshot
from odb_nodes.core.contract.again import ItemsAgain, make_again
from odb_nodes.core.contract.graph import begin_cycle, length_of, walk
from odb_nodes.core.contract.node import (
    ItemLocation,
    call_member,
    can_restore,
    check_node,
)
from odb_nodes.core.sample import ItemKey, Sample, Skipped, SourceItem
from odb_nodes.core.sources.mixing import (
    Mixing,
    Stop,
    Unit,
    WeightedRoundRobin,
    WeightSchedule,
    check_rules,
    check_schedule,
    checked_weights,
)
from odb_nodes.core.sources.sharded_sampler import ShardedOrder
from odb_nodes.errors import PeerError, SampleError, StateError, WorkerError


@dataclass(kw_only=True)
class MixerState(NodeState):
    """The position of a `SourceMixer`."""

    sources: SourceStates
    samples: dict[str, int]  # samples of the epoch so far, by source
    tokens: dict[str, int]  # tokens of the epoch so far, by source
    # sources that were exhausted at least once in the epoch, in that order
    exhausted: list[str]
    ended: bool  # the epoch has ended
    # weights of the last item, and the target of each source at the last change of weights; empty
    # unless weights follow a schedule or were set
    weights: dict[str, float] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    # sources that had a sample before the epoch was dealt to another number of ranks
    had: list[str] = field(default_factory=list)


class SourceMixer(StatefulNode[Any, MixerState]):
    """Yields items of several named sources in proportion to their weights.

    The next item comes from the source that has had the least relative to its weight (weighted fair
    queueing). No random numbers are drawn, and until a source is exhausted the shares stay within a
    few items of the weights.

    Items come out as `SourceItem`, for `PerSource`. A `Sample` comes out with the name of its
    source. `StepInfo.local_sources` counts both.

    State: the states of the sources, the counts of each, and weights that were set.

    Args:
        sources: name -> node.
        weights: name -> weight, any positive numbers; or a `WeightSchedule`. Default: equal.
        by: what the weights are shares of: `"samples"`, or `"tokens"` if the sources yield
            `Sample`.
        stop: when the epoch ends. `"first_exhausted"`: with the first source that ends;
            `"all_exhausted"`: when all have ended; `"cycle"`: when all have ended, and sources
            that end earlier begin again in another order.
        world_size: number of ranks; places of a schedule count what all ranks draw. Default: that
            of torch.distributed, or of `WORLD_SIZE`.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    STATE = MixerState
    retries_errors = True  # its sources decide
    same_on_all_ranks = True

    def __init__(
        self,
        sources: Mapping[str, BaseNode[Any]],
        weights: Mapping[str, float] | WeightSchedule | None = None,
        *,
        by: Unit = Mixing.by,
        stop: Stop = Mixing.stop,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        check_type("sources", sources, Mapping, 'Name the nodes: `{"web": web, "code": code}`.')
        if not sources:
            raise ValueError("`sources` must name at least 1 node, but is empty.")
        for name, node in sources.items():
            check_node(f"sources[{name!r}]", node)
        if len(set(map(id, sources.values()))) < len(sources):
            raise ValueError(
                f"`sources` must be different nodes, but of {sorted(sources)} two are the same, "
                "which would share its items out. Make one for each."
            )
        check_rules(by, stop)
        self.sources = dict(sources)
        self._by, self._stop = by, stop
        self._schedule = weights if isinstance(weights, WeightSchedule) else None
        if isinstance(weights, WeightSchedule):
            check_schedule(weights, sources, stop)
            self._initial: Mapping[str, float] = weights.places[0][1]
        else:
            shares = dict.fromkeys(sources, 1.0) if weights is None else weights
            self._initial = checked_weights(shares, sources)
        self._weights = self._initial  # at the beginning of an epoch
        ranks = resolve_rank(None, None)[1] if world_size is None else world_size
        self._world_size = check_count("world_size", ranks)
        self._exhausted: list[str] = []  # at least once in this epoch
        self._had: list[str] = []  # with a sample before the epoch was dealt to other ranks
        self._last = ""
        self._clear()

    def __len__(self) -> int:
        """Return how many items an epoch has."""
        if self._stop != "all_exhausted":
            raise TypeError(f'the length of an epoch is not known where `stop` is "{self._stop}".')
        return sum(map(length_of, self.sources.values()))

    def __repr__(self) -> str:
        weights = self._queue.weights
        total = sum(weights.values())
        shares = ", ".join(f"{name} {weights[name] / total:.3g}" for name in self.sources)
        return f'{type(self).__name__}(shares of {self._by}: {shares}; stop="{self._stop}")'

    @property
    def samples(self) -> dict[str, int]:
        """Samples of this epoch so far, by source."""
        return dict(self._samples)

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of this epoch so far, by source; 0 where the items are no `Sample`."""
        return dict(self._tokens)

    @property
    def dry_sources(self) -> tuple[str, ...]:
        """The sources that have ended in this epoch while others have not."""
        goes_on = self._stop == "all_exhausted" and not self._ended
        return tuple(self._exhausted) if goes_on else ()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Mix by these weights from the next epoch on. `Loader.set_weights` calls it."""
        self._weights = self.check_can_set(weights)

    def check_can_set(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return weights that an epoch may begin with, in the order of the sources."""
        if self._schedule is not None:
            raise ValueError(
                "`set_weights` needs a mixture of fixed weights, but they follow a "
                "`WeightSchedule`, which the weights set would contradict. Use one of the two."
            )
        return checked_weights(weights, self.sources)

    def begin_epoch(self) -> None:
        """Begin the epoch of every source."""
        self._clear()
        for node in self.sources.values():
            node.reset(None)

    def restore(self, state: MixerState) -> None:
        """Restore every source, the counts and the weights."""
        self._clear()
        if state.sources.keys() != self.sources.keys():
            raise StateError(
                f"the state of {type(self).__name__} has sources {sorted(state.sources)}, but "
                f"there are {sorted(self.sources)} now. Resume with the saved sources; others can "
                "begin with the next epoch."
            )
        for name, node in self.sources.items():
            node.reset(state.sources[name])
        self._samples, self._tokens = state.samples, state.tokens
        self._exhausted, self._ended, self._had = state.exhausted, state.ended, state.had
        if self._schedule is None:
            self._weights = state.weights or self._initial
        self._queue = WeightedRoundRobin(state.weights or self._weights, state.targets)

    def save(self) -> MixerState:
        """Return the states of the sources, their counts, and weights that have changed."""
        queue = self._queue
        has_others = self._schedule is not None or queue.weights != self._initial
        return MixerState(
            sources={name: snapshot(node) for name, node in self.sources.items()},
            samples=self._samples,
            tokens=self._tokens,
            exhausted=self._exhausted,
            ended=self._ended,
            weights=dict(queue.weights) if has_others else {},
            targets=queue.targets if has_others else {},
            had=self._had,
        )

    def next(self) -> Any:
        """Return the next item of the source that is furthest behind its weight."""
        exhausted: str | None = None
        while not self._ended:
            name = self._most_behind()
            try:
                item = next(self.sources[name])
            except StopIteration:
                if name == exhausted:
                    raise SampleError(
                        f"source {name!r} yielded nothing when it began again: it can be iterated "
                        'only once. Make it iterable again, or pass `stop="all_exhausted"`.'
                    ) from None
                self._exhaust(name)
                exhausted = name
                continue
            except (PeerError, StateError, WorkerError):
                raise
            except SampleError as error:
                raise SampleError(f"source {name!r}: {error}") from error
            except Exception as error:
                raise SampleError(
                    f"source {name!r}: reading its sample {self._samples[name]} of this epoch "
                    f"raised {error!r}"
                ) from error
            self._last = name
            if isinstance(item, Skipped):  # does not count for the shares
                return item.of_source(name)
            if self._by == "tokens" and not isinstance(item, Sample):
                raise SampleError(
                    f'`sources[{name!r}]` must yield `Sample` where `by` is "tokens", but yielded '
                    f"`{type(item).__name__}` instead. Process and observe each source first."
                )
            self._samples[name] += 1
            if not isinstance(item, Sample):
                return SourceItem(name, item)
            self._tokens[name] += item.tokens
            return item.of_source(name)
        raise StopIteration

    def item_location(self) -> ItemLocation:
        """Return where the last item comes from, for errors."""
        name = self._last
        within = call_member(self.sources[name], "item_location")
        return "sample %d of source %r%s", self._samples[name] - 1, name, within

    def item_key(self) -> ItemKey | None:
        """Return the key of the last item, with the name of its source."""
        within: ItemKey | None = call_member(self.sources[self._last], "item_key")
        return None if within is None else within.of_source(self._last)

    @property
    def can_restore(self) -> bool:
        """Whether all sources can make their items again."""
        return all(map(can_restore, self.sources.values()))

    def make_again(self, items: Sequence[ItemKey]) -> ItemsAgain:
        """Return items of this epoch that are made again when they are taken."""
        places, inner = self._by_source(items)
        of_sources = {name: make_again(node, inner[name]) for name, node in self.sources.items()}
        return _MixedAgain(items, places, of_sources)

    def _by_source(
        self, items: Sequence[ItemKey]
    ) -> tuple[list[tuple[str, int]], dict[str, list[ItemKey]]]:
        """Return the source of each item and its row there; and the items of each source."""
        places: list[tuple[str, int]] = []
        inner: dict[str, list[ItemKey]] = {name: [] for name in self.sources}
        for item in items:
            name = self._source_of(item)
            places.append((name, len(inner[name])))
            inner[name].append(item._replace(source=item.source[len(name) + 1 :]))
        return places, inner

    def _source_of(self, item: ItemKey) -> str:
        names = [name for name in self.sources if f"{item.source}/".startswith(f"{name}/")]
        if names:
            return max(names, key=len)  # one name may be a prefix of another
        raise StateError(
            f"there is no source of {item.source!r}: there are {sorted(self.sources)}. Resume with "
            "the sources that the state was saved with."
        )

    def _clear(self) -> None:
        self._samples = dict.fromkeys(self.sources, 0)
        self._tokens = dict.fromkeys(self.sources, 0)
        self._exhausted = []
        self._had = []
        self._ended = False
        self._queue = WeightedRoundRobin(self._weights)

    def _most_behind(self) -> str:
        """Return the next source, by the present weights."""
        names = self._candidates()
        had = self._tokens if self._by == "tokens" else self._samples
        if self._schedule is not None:
            drawn = sum(had.values()) * self._world_size
            self._queue.turn_to(self._schedule.at(drawn, names), names, had)
        return self._queue.first(names, had)

    def _candidates(self) -> list[str]:
        if self._stop == "cycle":
            return list(self.sources)
        return [name for name in self.sources if name not in self._exhausted]

    def _exhaust(self, name: str) -> None:
        # One of several ranks may have no sample of a small source that only ends sooner.
        may_be_empty = self._world_size > 1 and self._stop == "all_exhausted"
        if not (self._samples[name] or name in self._had or may_be_empty):
            raise self._no_sample(name)
        if name not in self._exhausted:
            self._exhausted.append(name)
        all_exhausted = len(self._exhausted) == len(self.sources)
        self._ended = all_exhausted or self._stop == "first_exhausted"
        if not self._ended and self._stop == "cycle":
            begin_cycle(self.sources[name])

    def _no_sample(self, name: str) -> SampleError:
        """Return the error for a source of which this rank has no sample."""
        if self._world_size == 1:
            return SampleError(
                f"source {name!r} yielded no sample in this epoch, so its weight cannot be kept. "
                "Leave it out, or make it iterable again: perhaps it can be read only once."
            )
        shared = [node.size for node in walk(self.sources[name]) if isinstance(node, ShardedOrder)]
        has = f"has {counted(sum(shared), 'sample')}" if shared else "has too few samples"
        return SampleError(
            f"source {name!r} {has} for {self._world_size} ranks, and this rank none in this "
            f'epoch. Where `stop` is "{self._stop}", each rank needs a sample of each source: '
            'leave it out, give it a sample per rank, or let `stop` be "all_exhausted".'
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only if it is equal."""
        schedule = self._schedule
        return {
            "sources": list(self.sources),  # their order decides between equals
            "weights": _ratios(self._initial) if schedule is None else schedule.fingerprint(),
            "by": self._by,
            "stop": self._stop,
            **({"ramp": True} if schedule is not None and schedule.ramp else {}),
        }

    def agreed(self) -> dict[str, Any]:
        """Return what ranks must share beside the fingerprint: the weights of the epoch."""
        return {} if self._schedule is not None else {"weights": _ratios(self._queue.weights)}


class _MixedAgain(ItemsAgain):
    """Items that the sources of a mixture make again."""

    def __init__(
        self,
        items: Sequence[ItemKey],
        places: Sequence[tuple[str, int]],
        of_sources: Mapping[str, ItemsAgain],
    ) -> None:
        self._items, self._places, self._of_sources = items, places, of_sources
        self._is_wanted = bytearray(len(places))

    def want(self, indices: Sequence[int]) -> None:
        """Queue these items: after all queued items, before the remaining ones."""
        new = [index for index in indices if not self._is_wanted[index]]
        for index in new:
            self._is_wanted[index] = True
        for name, indices_of_source in self._by_source(new).items():
            self._of_sources[name].want([self._places[index][1] for index in indices_of_source])

    def take(self, indices: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        """Return for each item a sequence that contains it, and its position in the sequence."""
        items: dict[int, tuple[Sequence[Any], int]] = {}
        self.want(indices)  # so that all sources work at the same time
        for name, indices_of_source in self._by_source(indices).items():
            places = [self._places[index][1] for index in indices_of_source]
            runs = self._of_sources[name].take(places)
            for index, (run, place) in zip(indices_of_source, runs, strict=True):
                items[index] = [_named(name, run[place])], 0
        return [items[index] for index in indices]

    def key_of(self, index: int) -> ItemKey:
        """Return the key of an item, which names its source."""
        return self._items[index]

    def _by_source(self, indices: Sequence[int]) -> dict[str, list[int]]:
        by_source: dict[str, list[int]] = {}
        for index in indices:
            by_source.setdefault(self._places[index][0], []).append(index)
        return by_source


def _named(name: str, item: Any) -> Any:
    """Return an item with the name of its source."""
    is_sample = isinstance(item, (Sample, Skipped))
    return item.of_source(name) if is_sample else SourceItem(name, item)


def _ratios(weights: Mapping[str, float]) -> dict[str, float]:
    """Return weights as multiples of the smallest: 2 to 1 is what 4 to 2 is."""
    least = min(weights.values())
    return {name: round(float(weight / least), 9) for name, weight in weights.items()}
