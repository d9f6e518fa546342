"""Epochs that ranks end together, of any data: once each, and the same after a resume."""

import random
from collections import Counter
from itertools import chain

import pytest
from aligned_ranks import (
    TIMEOUT_S,
    described,
    epoch_of,
    ids_of,
    on_ranks,
    places_before_the_last_round,
)
from hypothesis import assume, event, given
from hypothesis import strategies as st
from sampling import fewer

from odb_nodes import (
    LengthObserver,
    Loader,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    Skipped,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes.nodes.read_ahead import ReadAhead

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
    }
)


def sample(index, job):
    draw = random.Random(f"{job['seed']} {index}")
    in_tail = index >= 0.6 * job["samples"]
    if draw.random() < job["skipped"] or (job["skips_tail"] and in_tail):
        return Skipped("bad")
    tokens = OVERSIZE_TOKENS if draw.random() < job["too_long"] else draw.randint(1, 60)
    return {"input_ids": [1] * tokens, "id": index}


def is_emitted(index, job):
    found = sample(index, job)
    dropped = job["oversize"] == "drop"
    return not isinstance(found, Skipped) and not (
        dropped and len(found["input_ids"]) == OVERSIZE_TOKENS
    )


def sampler_of(job, rank, ranks):
    return ShardedSampler(job["samples"], shuffle=job["shuffle"], rank=rank, world_size=ranks)


def loader_of(exchange, job):
    rank, ranks = exchange.rank, exchange.world_size
    samples = ParallelProcessor(
        sampler_of(job, rank, ranks), lambda at: sample(at, job), rank=rank, world_size=ranks
    )
    budget = TokenBudget(100, oversize=job["oversize"], layout=job["layout"])
    aligner = RankAligner(
        WindowBucketer(LengthObserver(samples), budget, job["window"]),
        exchange,
        round_size=job["round_size"],
        accumulate=job["accumulate"],
        timeout_s=TIMEOUT_S,
    )
    return Loader(ReadAhead(aligner, job["read_ahead"]) if job["read_ahead"] else aligner)


def loses_no_shard(job, ranks):
    """Whether no rank loses all that it has in an epoch: that is an error."""
    for rank in range(ranks):
        shards = Loader(sampler_of(job, rank, ranks))
        for _ in range(EPOCHS + 1):
            if (shard := [*shards]) and not any(is_emitted(index, job) for index in shard):
                return False
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of oversize samples
@given(job=JOBS, ranks=st.integers(1, 5))
@fewer(6)
def test_each_sample_comes_once_and_a_resume_goes_on_into_the_next_epoch(job, ranks):
    assume(loses_no_shard(job, ranks))
    draw = random.Random(job["seed"])
    emitted = {index for index in range(job["samples"]) if is_emitted(index, job)}

    def run(exchange):
        loader = loader_of(exchange, job)
        return [epoch_of(loader) for _ in range(EPOCHS + 1)]

    whole = on_ranks(ranks, run)
    shares = [bool(places_before_the_last_round(states)) for _, states in whole[0]]
    event(f"ranks share out what is left: {any(shares)}")
    for number in range(EPOCHS):
        steps = [epochs[number][0] for epochs in whole]
        assert Counter(chain(*map(ids_of, steps))) == Counter(emitted)
        left_out = Counter(one.key for rank in steps for step in rank for one in step.left_out)
        assert left_out == Counter({*range(job["samples"])} - emitted)
        assert len({*map(len, steps)}) == 1
        assert [step.ends_epoch for step in steps[0]] == [False] * (len(steps[0]) - 1) + [True]

        place = draw.randint(0, len(steps[0]))

        def resumed(exchange, number=number, place=place):
            (_, states), (after, _) = whole[exchange.rank][number : number + 2]
            loader = loader_of(exchange, job)
            loader.load_state_dict(states[place])
            assert loader.state_dict() == states[place]
            return [*map(described, loader)], [*map(described, loader)] == after

        expected = [(rank[place:], True) for rank in steps]
        assert on_ranks(ranks, resumed) == expected
