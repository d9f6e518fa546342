"""Samples are left out by their keys, in mid-run too, and all that is counted stays exact."""

import random
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from aligned_ranks import on_ranks

from odb_nodes import (
    GroupCollator,
    IterableSource,
    LengthObserver,
    Loader,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    Skipped,
    SourceMixer,
    StateError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)

SIZE = 72


def text(index):
    """A sample; every 17th is skipped, and some exceed the budget; some labels are masked."""
    if isinstance(index, tuple):  # of a mixture
        return {**text(index.item), "source": index.source}
    if index % 17 == 5:
        return Skipped("seventeenth")
    length = 90 if index in (40, 60) else 5 + index * 7 % 23
    labels = [-100 if (index + place) % 3 == 0 else 1 for place in range(length)]
    return {"input_ids": [1] * length, "labels": labels, "id": index}


def targets_of(index):
    return sum(label != -100 for label in text(index)["labels"][1:])


def plain(index):
    return text(index if index % 17 != 5 else index + 1) | {"id": index}


def collate(group):
    return {"id": [sample["id"] for sample in group]}


def permuted(**shard):
    return ShardedSampler(SIZE, **shard)


def iterable(**shard):
    return IterableSource(range(SIZE), **shard)


def uneven(rank, world_size):
    """The first rank has little, and the last one most."""
    return Few(rank, world_size)


class Few(IterableSource):
    """Ranks with data of unlike size, each index on one rank."""

    def __init__(self, rank, world_size):
        limits = [0, *(SIZE * (n + 1) ** 3 // world_size**3 for n in range(world_size))]
        super().__init__(range(limits[rank], limits[rank + 1]), rank=0, world_size=1)
        self.first = limits[rank]

    def item_key(self):
        key = super().item_key()
        return key._replace(key=key.key + self.first, world_size=1)


KINDS = {
    "replay": {},
    "packed": {"layout": "packed"},
    "payload": {"state": "payload"},
    "iterable": {"source": iterable},
    "uneven": {"source": uneven, "round_size": 8},
    "stop": {"uneven": "stop"},
    "stop-iterable": {"source": iterable, "uneven": "stop", "round_size": 12},
}


def make(
    exchange,
    exclude=None,
    *,
    source=permuted,
    layout="padded",
    state="replay",
    round_size=6,
    **options,
):
    shard = {"rank": exchange.rank, "world_size": exchange.world_size}
    node = LengthObserver(ParallelProcessor(source(**shard), text, **shard))
    budget = TokenBudget(64, oversize="drop", layout=layout)
    bucketer = WindowBucketer(node, budget, 8, state, exclude)
    aligner = RankAligner(bucketer, exchange, round_size, timeout_s=20.0, **options)
    return Loader(GroupCollator(aligner, collate))


def taken(loader, states=None):
    """What the rest of an epoch says of each step, in plain data."""
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in loader:
            info = pop_step_info(batch)
            assert info.is_filler or list(info.keys) == batch["id"]
            steps.append(info)
            if states is not None:
                states.append(loader.state_dict())
    return steps


def aligner_of(loader):
    return loader.root.source


def excluded_samples(loader):
    return aligner_of(loader).excluded_samples + aligner_of(loader).source.excluded_samples


def check_counts(ranks):
    """The sums that each rank is told are those of the rows of all ranks."""
    assert len({len(steps) for steps in ranks}) == 1
    optimizer_step = []
    for infos in zip(*ranks, strict=True):
        rows = [key for info in infos for key in info.keys]
        optimizer_step.append(infos)
        for info in infos:
            assert info.all_samples_this_step == len(rows)
            assert info.all_targets == sum(map(targets_of, rows))
            assert info.local_targets == sum(map(targets_of, info.keys))
            assert info.is_filler == (not info.keys)
            assert info.ends_optimizer_step == infos[0].ends_optimizer_step
        if not infos[0].ends_optimizer_step:
            continue
        rows = [key for infos in optimizer_step for info in infos for key in info.keys]
        targets = sum(map(targets_of, rows))
        assert rows
        for micro_step, infos in enumerate(optimizer_step):
            for info in infos:
                assert (info.micro_step, info.micro_steps) == (micro_step, len(optimizer_step))
                assert info.optimizer_samples == len(rows)
                assert info.optimizer_targets == targets
                local = sum(map(targets_of, info.keys))
                assert info.loss_scale == pytest.approx(len(infos) * local / targets)
        optimizer_step = []
    assert not optimizer_step


def check_once(before, after, keys, excluded, stops=False):
    """Each key comes once over both runs, and none that is excluded comes in the second.

    Where the ranks stop with the first that has ended, some are not even read.
    """
    infos_after = [info for steps in after for info in steps]
    infos = [info for steps in before for info in steps] + infos_after
    rows = [key for info in infos for key in info.keys]
    left_out = [one for info in infos for one in info.left_out]
    gone = {one.key for one in left_out if one.reason == "excluded"}
    assert not excluded & {key for info in infos_after for key in info.keys}
    assert gone <= excluded
    counts = Counter([*rows, *(one.key for one in left_out)])
    assert set(counts.values()) == {1}
    assert stops or not set(keys) - excluded - set(counts)
    assert stops or not infos_after or not set(keys) - set(counts)
    return gone


def excluded_at(step, seed, size=SIZE):
    rng = random.Random(1000 * step + seed)
    return set(rng.sample(range(size), rng.choice((1, 1, 2, 3))))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_resumes_leaves_them_out_wherever_they_are(
    kind, world_size, accumulate, exhaustive
):
    options = {**KINDS[kind], "accumulate": accumulate}
    stops = "uneven" in options

    def whole(exchange):
        loader = make(exchange, **options)
        states = [loader.state_dict()]
        return taken(loader, states), states

    def resumed(exchange):
        rank, states = exchange.rank, []
        loader = make(exchange, sorted(excluded), **options)
        loader.load_state_dict(runs[rank][1][at])
        iter(loader)
        if at % 2:  # saved before it goes on, too, and then nobody names them again
            again = loader.state_dict()
            loader = make(exchange, **options)
            loader.load_state_dict(again)
            iter(loader)
        states = [loader.state_dict()]
        steps = taken(loader, states)
        count = excluded_samples(loader)
        return steps, states, count, taken(loader)

    def resumed_later(exchange):
        loader = make(exchange, **options)
        loader.load_state_dict(second[exchange.rank][1][later])
        return taken(loader), taken(loader)

    runs = on_ranks(world_size, whole)
    first = [steps for steps, _ in runs]
    check_counts(first)
    places = range(len(first[0]) + 1)
    rng = random.Random(f"{kind} {world_size} {accumulate}")
    for at in places if exhaustive else sorted(rng.sample(places, min(6, len(places)))):
        excluded = excluded_at(at, world_size)
        before = [steps[:at] for steps in first]
        if at and not before[0][-1].ends_optimizer_step:
            with pytest.raises(StateError, match=r"it is within an optimizer step of 3 steps"):
                on_ranks(world_size, resumed)
            continue
        second = on_ranks(world_size, resumed)
        after = [steps for steps, *_ in second]
        check_counts(after)
        gone = check_once(before, after, range(SIZE), excluded, stops)
        if any(after):
            assert sum(count for *_, count, _ in second) == len(gone)
        next_epoch = [steps for *_, steps in second]
        check_counts(next_epoch)
        gone = check_once([], next_epoch, range(SIZE), excluded, stops)
        assert stops or gone == excluded
        ends = [n for n in range(len(after[0]) + 1)]
        for later in ends if exhaustive else rng.sample(ends, min(2, len(ends))):
            for rank, (rest, epoch) in enumerate(on_ranks(world_size, resumed_later)):
                assert rest == after[rank][later:]
                assert epoch == next_epoch[rank]
