"""The last round of an epoch, for which ranks share out what is left: once each, and exactly."""

import json
import random
import threading
import warnings
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from aligned_ranks import (
    TIMEOUT_S,
    described,
    epoch_of,
    ids_of,
    on_ranks,
    places_before_the_last_round,
)
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    JsonlSource,
    LengthObserver,
    Loader,
    ParallelProcessor,
    PeerError,
    RankAligner,
    SampleError,
    ShardedSampler,
    Skipped,
    SourceMixer,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes.nodes.read_ahead import ReadAhead

SAMPLES = 700  # of all ranks


def sample(index, ranks):
    """A sample, longer on rank 0: ranks with equal numbers of samples would end far apart."""
    most = 60 if index % ranks == 0 else 52
    return {"input_ids": [1] * random.Random(index).randint(1, most), "id": index}


def loader_of(exchange, kind="keys", budget=100, process=sample, exclude=None, **options):
    rank, ranks = exchange.rank, exchange.world_size

    def shard(size, make):
        sampler = ShardedSampler(size, shuffle=False, rank=rank, world_size=ranks)
        return ParallelProcessor(sampler, make, rank=rank, world_size=ranks)

    if kind == "own data":
        sampler = ShardedSampler(SAMPLES // ranks, shuffle=False, rank=0, world_size=1)
        source = LengthObserver(
            ParallelProcessor(sampler, lambda at: process(at * ranks + rank, ranks))
        )
    elif kind == "mixture":
        half = SAMPLES // 2 // ranks * ranks
        source = SourceMixer(
            {
                "a": LengthObserver(shard(half, lambda at: process(at, ranks))),
                "b": LengthObserver(shard(SAMPLES - half, lambda at: process(half + at, ranks))),
            },
            stop="all_exhausted",
            world_size=ranks,
        )
    elif isinstance(kind, Path):
        lines = JsonlSource(kind, rank, ranks)
        source = LengthObserver(ParallelProcessor(lines, dict, rank=rank, world_size=ranks))
    elif kind == "iterable":
        found = [process(index, ranks) for index in range(rank, SAMPLES, ranks)]
        source = LengthObserver(IterableWrapper(found))
    else:
        source = LengthObserver(shard(SAMPLES, lambda at: process(at, ranks)))
    groups = WindowBucketer(source, budget, 64, exclude=exclude)
    if kind == "reads ahead":
        groups = ReadAhead(groups, 4)
    options = {"round_size": 8, "timeout_s": TIMEOUT_S, **options}
    return Loader(RankAligner(groups, exchange, **options))


def epoch(ranks, **options):
    """Of each rank: its steps, and the states before and after them."""
    return on_ranks(ranks, lambda exchange: epoch_of(loader_of(exchange, **options)))


def given_away(whole):
    """Ids of samples that came out on another rank than the one that their shard is of."""
    ranks = len(whole)
    return [
        index
        for rank, (steps, _) in enumerate(whole)
        for index in ids_of(steps)
        if index % ranks != rank
    ]


@pytest.mark.parametrize("kind", ["keys", "mixture"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_end_together_and_each_sample_comes_once(ranks, kind):
    whole = epoch(ranks, kind=kind)
    assert Counter(index for steps, _ in whole for index in ids_of(steps)) == Counter(
        range(SAMPLES)
    )
    assert len({len(steps) for steps, _ in whole}) == 1
    assert not any(step.is_filler for steps, _ in whole for step in steps)
    assert 0 < len(given_away(whole)) < SAMPLES / 10
    lengths = {index: len(sample(index, ranks)["input_ids"]) for index in range(SAMPLES)}
    tokens = [sum(lengths[index] for index in ids_of(steps)) for steps, _ in whole]
    assert max(tokens) - min(tokens) < 0.1 * max(tokens)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "mixture"},
        {"accumulate": 3},
        {"budget": TokenBudget(100, layout="packed", max_samples=20)},
        {"budget": TokenBudget(100, shapes=4)},
    ],
    ids=["", "mixture", "accumulate", "packed", "shapes"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_step_resumes_with_the_same_groups(ranks, options, sampled):
    whole = epoch(ranks, **options)
    assert given_away(whole)
    steps, dense = len(whole[0][0]), places_before_the_last_round(whole[0][1])[0]
    # All places of the last round, and of the one before: what is left comes with the last.
    sparse = range(0, dense, sampled(every=31).get("every", 1))
    for place in [*sparse, *range(dense, steps)]:

        def run(exchange, place=place):
            steps, states = whole[exchange.rank]
            loader = loader_of(exchange, **options)
            loader.load_state_dict(states[place])
            same = loader.state_dict() == states[place]
            return same, [*map(described, loader)] == steps[place:]

        assert on_ranks(ranks, run) == [(True, True)] * ranks


def test_records_of_files_are_given_away_too(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(f"{json.dumps(sample(index, 2))}\n" for index in range(SAMPLES)))
    whole = epoch(2, kind=path)
    assert given_away(whole)
    found = Counter(index for steps, _ in whole for index in ids_of(steps))
    assert found == Counter(range(SAMPLES))
    place = len(whole[0][0]) - 9

    def run(exchange):
        loader = loader_of(exchange, kind=path)
        loader.load_state_dict(whole[exchange.rank][1][place])
        return [*map(described, loader)]

    assert on_ranks(2, run) == [steps[place:] for steps, _ in whole]


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "iterable"},
        {"kind": "own data"},
        {"kind": "reads ahead"},
        {"uneven": "join"},
        {"uneven": "stop"},
    ],
    ids=str,
)
def test_nothing_is_given_away_where_it_cannot_be_made_again_or_ranks_end_apart(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what "stop" leaves over
        whole = epoch(2, **options)
    assert not given_away(whole)
    assert not any(places_before_the_last_round(states) for _, states in whole)


def test_ranks_with_other_budgets_give_nothing_away_and_still_end_together():
    whole = on_ranks(
        2, lambda exchange: [*map(described, loader_of(exchange, budget=100 + exchange.rank))]
    )
    assert not given_away([(steps, None) for steps in whole])
    assert len(whole[0]) == len(whole[1])
    assert Counter(index for steps in whole for index in ids_of(steps)) == Counter(range(SAMPLES))


def test_an_error_while_the_rest_is_read_loses_nothing():
    fails = {"now": True}

    def process(index, ranks):
        if index == SAMPLES - 2 and fails["now"]:
            raise OSError("the disk is away")
        return sample(index, ranks)

    def run(exchange):
        loader = loader_of(exchange, process=process)
        found = []
        expected = SampleError if exchange.rank == 0 else PeerError
        with pytest.raises(expected, match="the disk is away"):
            for item in loader:
                found.append(described(item))
        state = loader.state_dict()
        barrier.wait(TIMEOUT_S)
        fails["now"] = False
        again = loader_of(exchange, process=process)
        again.load_state_dict(state)
        return [*found, *map(described, again)]

    barrier = threading.Barrier(2)
    whole = epoch(2)
    assert on_ranks(2, run) == [steps for steps, _ in whole]


def test_a_sample_that_is_skipped_where_it_is_given_to_is_left_out():
    moved = {*given_away(epoch(2))}

    def run(exchange):
        def process(index, ranks):
            if index in moved and index % 2 != exchange.rank:
                return Skipped("not here")
            return sample(index, ranks)

        left_out, steps = [], []
        for item in loader_of(exchange, process=process):
            steps.append(described(item))
            left_out += [(one.key, one.reason) for one in item.info.left_out]
        return ids_of(steps), left_out

    with pytest.warns(UserWarning, match="are not what they were: a sample.* is skipped here"):
        found = on_ranks(2, run)
    assert {one for _, left_out in found for one in left_out} == {(at, "not here") for at in moved}
    ids = Counter(index for ids, _ in found for index in ids)
    assert ids == Counter({*range(SAMPLES)} - moved)


def test_a_skipped_gift_is_left_out_once_though_the_last_round_is_begun_again():
    moved, fails = {*given_away(epoch(3))}, [True]

    def run(exchange):
        def process(index, ranks):
            if index in moved and index % 3 != exchange.rank:
                if exchange.rank == 1:
                    return Skipped("not here")
                if fails[0]:
                    raise OSError("the disk is away")
            return sample(index, ranks)

        loader, left_out = loader_of(exchange, process=process), []
        with pytest.raises((SampleError, PeerError), match="the disk is away"):
            for item in loader:
                left_out += item.info.left_out
        barrier.wait(TIMEOUT_S)
        fails[0] = False
        for item in loader:
            left_out += item.info.left_out
        return [one.key for one in left_out]

    barrier = threading.Barrier(3)
    with pytest.warns(UserWarning, match="is skipped here"):
        found = on_ranks(3, run)
    assert [len(keys) > 0 for keys in found] == [False, True, False]
    assert len({*found[1]}) == len(found[1])


def test_a_sample_that_is_another_one_on_another_rank_is_warned_of():
    moved = {*given_away(epoch(2))}

    def run(exchange):
        def process(index, ranks):
            found = sample(index, ranks)
            if index in moved and index % 2 != exchange.rank:
                found["input_ids"] = [2] * len(found["input_ids"])
            return found

        return [*map(described, loader_of(exchange, process=process))]

    with pytest.warns(UserWarning, match="has other content here. Either processing is not determ"):
        on_ranks(2, run)


@pytest.mark.parametrize("whose", ["some", "all of a rank"])
@pytest.mark.parametrize("when", ["settled", "begins", "within"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_samples_are_excluded_before_and_within_the_last_round(accumulate, when, whose):
    whole = epoch(2, accumulate=accumulate)
    before = places_before_the_last_round(whole[0][1])
    place = {
        "settled": next(at for at in before if at % accumulate == 0),
        "begins": before[-1],
        "within": before[-1] + 2 * accumulate,
    }[when]
    left = [steps[place:] for steps, _ in whole]
    if whose == "some":
        gone = {step.ids[0] for rank in left for step in rank[3::4]}
    elif when == "within":
        gone = {*ids_of(left[0])}
    else:
        gone = {index for rank in left for index in ids_of(rank) if index % 2 == 0}
    options = {"accumulate": accumulate, "exclude": [*gone]}

    def resumed(exchange, states):
        loader = loader_of(exchange, **options)
        loader.load_state_dict(states[exchange.rank])
        return epoch_of(loader)

    found = on_ranks(2, lambda exchange: resumed(exchange, [rank[1][place] for rank in whole]))
    rests = [steps for steps, _ in found]
    kept = [[index for index in ids_of(rank) if index not in gone] for rank in left]
    if when == "within":
        assert [*map(ids_of, rests)] == kept
    assert Counter(chain(*map(ids_of, rests))) == Counter(chain(*kept))
    told = [(one.key, one.reason) for rest in rests for step in rest for one in step.left_out]
    assert Counter(told) == Counter((index, "excluded") for index in gone)
    assert len({*map(len, rests)}) == 1
    for at in range(0, len(rests[0]), 4):
        again = on_ranks(2, lambda exchange, at=at: resumed(exchange, [r[1][at] for r in found]))
        assert [steps for steps, _ in again] == [rest[at:] for rest in rests]
