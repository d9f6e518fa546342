"""The last round of an epoch, for which ranks share out what is left: once each, and exactly."""

import random
import threading
from collections import Counter
from itertools import chain

import pytest
from aligned_ranks import TIMEOUT_S, described, epoch_of, ids_of, on_ranks
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling import fewer
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    LengthObserver,
    Loader,
    ParallelProcessor,
    PeerError,
    RankAligner,
    SampleError,
    ShardedSampler,
    Skipped,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes.core.nodes.read_ahead import ReadAhead
from odb_nodes.core.planning import StepTime

SAMPLES = 350  # of all ranks


def sample(index, ranks):
    """A sample, longer on rank 0: ranks with equal numbers of samples would end far apart."""
    most = 60 if index % ranks == 0 else 52
    return {"input_ids": [1] * random.Random(index).randint(1, most), "id": index}


def loader_of(exchange, kind="keys", budget=100, process=sample, **options):
    rank, ranks = exchange.rank, exchange.world_size
    if kind == "iterable":
        source = IterableWrapper([process(index, ranks) for index in range(rank, SAMPLES, ranks)])
    else:
        own = kind == "own data"
        place = {"rank": 0 if own else rank, "world_size": 1 if own else ranks}
        sampler = ShardedSampler(SAMPLES // (ranks if own else 1), shuffle=False, **place)
        at = (lambda index: index * ranks + rank) if own else int
        source = ParallelProcessor(sampler, lambda index: process(at(index), ranks), **place)
    groups = WindowBucketer(LengthObserver(source), budget, 64)
    if kind == "reads ahead":
        groups = ReadAhead(groups, 4)
    return Loader(
        RankAligner(groups, exchange, **{"round_size": 8, "timeout_s": TIMEOUT_S, **options})
    )


def epoch(ranks, **options):
    """Of each rank: its steps, and the states before and after them."""

    def run(exchange):
        with loader_of(exchange, **options) as loader:
            return epoch_of(loader)

    return on_ranks(ranks, run)


def places_before_the_last_round(states):
    """Those of the round before the one in which ranks share out what is left; none without."""
    return [step for step, state in enumerate(states) if state["root"]["settings"][3]]


def given_away(whole):
    """Ids of samples that came out on another rank than the one that their shard is of."""
    ranks = len(whole)
    return [
        index
        for rank, (steps, _) in enumerate(whole)
        for index in ids_of(steps)
        if index % ranks != rank
    ]


@pytest.mark.parametrize(
    "options",
    [*({"kind": kind} for kind in ("iterable", "own data", "reads ahead")), {"uneven": "stop"}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.uneven=.stop:UserWarning")
def test_nothing_is_given_away_where_it_cannot_be_made_again_or_ranks_end_apart(options):
    whole = epoch(2, **options)
    assert not given_away(whole)
    assert not any(places_before_the_last_round(states) for _, states in whole)


def test_ranks_with_other_budgets_give_nothing_away_and_still_end_together():
    whole = on_ranks(2, lambda e: epoch_of(loader_of(e, budget=100 + e.rank)))
    assert not given_away(whole)
    assert len(whole[0][0]) == len(whole[1][0])
    assert sorted(chain(*(ids_of(steps) for steps, _ in whole))) == [*range(SAMPLES)]


def test_an_error_while_the_rest_is_read_loses_nothing():
    fails = {"now": True}

    def process(index, ranks):
        if index == SAMPLES - 2 and fails["now"]:
            raise OSError("the disk is away")
        return sample(index, ranks)

    def run(exchange):
        loader, steps = loader_of(exchange, process=process), []
        expected = SampleError if exchange.rank == 0 else PeerError
        with pytest.raises(expected, match="the disk is away"):
            for item in loader:
                steps.append(described(item))
        state = loader.state_dict()
        barrier.wait(TIMEOUT_S)
        fails["now"] = False
        again = loader_of(exchange, process=process)
        again.load_state_dict(state)
        return [*steps, *map(described, again)]

    barrier = threading.Barrier(2)
    assert on_ranks(2, run) == [steps for steps, _ in epoch(2)]


@pytest.mark.parametrize("state", ["of before the error", "of after it"])
def test_a_skipped_gift_is_left_out_once_though_the_last_round_is_begun_again(state):
    moved, fails = {*given_away(epoch(3))}, [True]

    def run(exchange):
        def process(index, ranks):
            if index in moved and index % 3 != exchange.rank:
                if exchange.rank == 1:
                    return Skipped("not here")
                if fails[0]:
                    raise OSError("the disk is away")
            return sample(index, ranks)

        loader, items = loader_of(exchange, process=process), []
        with pytest.raises((SampleError, PeerError), match="the disk is away"):
            for item in loader:
                items.append(described(item))
        barrier.wait(TIMEOUT_S)
        fails[0] = False
        if state == "of after it":
            loader.root.reset(loader.root.state_dict())
            loader = loader.root
        items += map(described, loader)
        return ids_of(items), [
            (sample.key, sample.reason) for item in items for sample in item.left_out
        ]

    barrier = threading.Barrier(3)
    with pytest.warns(UserWarning, match="of them differ here: a sample.* is skipped here"):
        results = on_ranks(3, run)
    assert [bool(left_out) for _, left_out in results] == [False, True, False]
    left_out = dict(results[1][1])
    assert {*left_out.values()} == {"not here"} and len(left_out) == len(results[1][1])
    assert sorted(chain(*(ids for ids, _ in results), left_out)) == [*range(SAMPLES)]


def test_a_sample_that_is_another_one_on_another_rank_is_warned_of():
    moved = {*given_away(epoch(2))}

    def run(exchange):
        def process(index, ranks):
            made = sample(index, ranks)
            if index in moved and index % 2 != exchange.rank:
                made["input_ids"] = [2] * len(made["input_ids"])
            return made

        list(loader_of(exchange, process=process))

    with pytest.warns(
        UserWarning, match="has other content here. Either processing .`process_fn`. is"
    ):
        on_ranks(2, run)


# --- any data -------------------------------------------------------------------------------------

OVERSIZE_TOKENS = 150
EPOCHS = 2
JOBS = st.fixed_dictionaries(
    {
        "samples": st.sampled_from([2, 17, 60, 150, 150, 400, 400]),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**20),
        "skipped": st.sampled_from([0.0, 0.3]),
        "skips_tail": st.booleans(),
        "too_long": st.sampled_from([0.0, 0.03]),
        "oversize": st.sampled_from(["alone", "drop"]),
        "layout": st.sampled_from(["padded", "packed"]),
        "window": st.sampled_from([8, 64, "auto"]),
        "round_size": st.sampled_from([1, 4, 8, 16]),
        "accumulate": st.sampled_from([1, 3]),
        "read_ahead": st.sampled_from([0, 3]),
        "step_time": st.sampled_from([None, None, StepTime(), StepTime(squares=1 / 20)]),
    }
)


def any_sample(index, job):
    draw = random.Random(f"{job['seed']} {index}")
    in_tail = index >= 0.6 * job["samples"]
    if draw.random() < job["skipped"] or (job["skips_tail"] and in_tail):
        return Skipped("bad")
    tokens = OVERSIZE_TOKENS if draw.random() < job["too_long"] else draw.randint(1, 60)
    return {"input_ids": [1] * tokens, "id": index}


def is_emitted(index, job):
    made = any_sample(index, job)
    longest = OVERSIZE_TOKENS if job["oversize"] == "alone" else OVERSIZE_TOKENS - 1
    return not isinstance(made, Skipped) and len(made["input_ids"]) <= longest


def loader_of_job(job, rank, ranks, exchange=None):
    """Without an exchange, one that yields the indices of the shard."""
    place = {"rank": rank, "world_size": ranks}
    sampler = ShardedSampler(job["samples"], shuffle=job["shuffle"], **place)
    if exchange is None:
        return Loader(sampler)
    samples = ParallelProcessor(sampler, lambda index: any_sample(index, job), **place)
    budget = TokenBudget(100, oversize=job["oversize"], layout=job["layout"])
    groups = WindowBucketer(LengthObserver(samples), budget, job["window"])
    rounds = {name: job[name] for name in ("round_size", "accumulate", "step_time")}
    aligner = RankAligner(groups, exchange, timeout_s=TIMEOUT_S, **rounds)
    return Loader(ReadAhead(aligner, job["read_ahead"]) if job["read_ahead"] else aligner)


def loses_no_shard(job, ranks):
    """Whether no rank loses all that it has in an epoch: that is an error."""
    loaders = [loader_of_job(job, rank, ranks) for rank in range(ranks)]
    shards = [[*loader] for loader in loaders for _ in range(EPOCHS + 1)]
    return all(not shard or any(is_emitted(index, job) for index in shard) for shard in shards)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*exceeds the budget", "ignore:.* is skipped")
@pytest.mark.filterwarnings("ignore:of the .* samples read for")
@given(job=JOBS, ranks=st.integers(1, 5))
@fewer(8)
def test_each_sample_comes_once_and_a_resume_reaches_the_next_epoch(job, ranks):
    assume(loses_no_shard(job, ranks))
    draw = random.Random(job["seed"])
    emitted = {index for index in range(job["samples"]) if is_emitted(index, job)}

    def make(exchange):
        return loader_of_job(job, exchange.rank, ranks, exchange)

    def run(exchange):
        loader = make(exchange)
        return [epoch_of(loader) for _ in range(EPOCHS + 1)]

    whole = on_ranks(ranks, run)
    for number in range(EPOCHS):
        steps = [epochs[number][0] for epochs in whole]
        assert Counter(chain(*map(ids_of, steps))) == Counter(emitted)
        left_out = Counter(
            sample.key for rank in steps for step in rank for sample in step.left_out
        )
        assert left_out == Counter({*range(job["samples"])} - emitted)
        assert len({*map(len, steps)}) == 1
        assert [step.ends_epoch for step in steps[0]] == [False] * (len(steps[0]) - 1) + [True]

        place = draw.randint(0, len(steps[0]))

        def resumed(exchange, number=number, place=place):
            (_, states), (after, _) = whole[exchange.rank][number : number + 2]
            loader = make(exchange)
            loader.load_state_dict(states[place])
            assert loader.state_dict() == states[place]
            return [*map(described, loader)], [*map(described, loader)] == after

        expected = [(rank[place:], True) for rank in steps]
        assert on_ranks(ranks, resumed) == expected
