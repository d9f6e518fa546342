"""A budget that becomes smaller within an epoch: by a rank's wish, or for a run that resumes."""

import random
import re

import pytest
from aligned_ranks import (
    TIMEOUT_S,
    epoch_of,
    errors_on_ranks,
    graph,
    ids_of,
    on_ranks,
    shard,
)
from elastic import ENDED_EARLY, LEFT_OUT
from jobs import Job, JobSpec
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ParallelProcessor,
    PeerError,
    RankAligner,
    SampleError,
    ShardedSampler,
    StateError,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.nodes.read_ahead import ReadAhead
from odb_nodes.core.planning import StepTime

ASKED = 40
"""The smallest number of tokens that a rank asks for in jobs that ask."""


@pytest.mark.parametrize(("kind", "ranks"), [("asks", 1), ("asks packed", 2)])
@pytest.mark.filterwarnings(*LEFT_OUT, ENDED_EARLY)
def test_all_ranks_use_the_smallest_requested_budget(kind, ranks):
    """That such a run resumes exactly is tested by the resume machine."""
    run = Job(JobSpec(kind, ranks, None))
    first, second = ([[batch.info for batch in step] for step in run.epoch()] for _ in range(2))
    run.end()
    assert max(info.most_cost for step in first[:4] for info in step) > ASKED
    assert max(info.most_cost for step in second[8:] for info in step) <= ASKED
    assert len(second) > len(first) > 10


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sample_that_a_smaller_budget_refuses_was_not_in_the_round(ranks):
    def make(exchange, tokens):
        samples, budget = shard(exchange.rank, 240), TokenBudget(tokens, oversize="error")
        return Loader(graph(exchange, samples, budget=budget, window=12, round_size=8))

    def run(exchange):
        loader = make(exchange, 20)
        loader.load_state_dict(whole[exchange.rank][1][12], change_budget=True)
        list(loader)

    whole = on_ranks(ranks, lambda exchange: epoch_of(make(exchange, 96)))
    for error in errors_on_ranks(ranks, run):
        with pytest.raises((PeerError, SampleError), match="`tokens` is 20"):
            raise error
        ordinal = int(re.search(r"sample (\d+) of the epoch", str(error))[1])
        assert ordinal >= min(len(ids_of(steps[:12])) for steps, _ in whole)


# --- a window that all ranks choose by the lengths of all, through resumes and epochs -------------


def loader_of(
    exchange=None, kind="keys", size=300, window="auto", read_ahead=0, scale=1, **options
):
    first = 0 if exchange is None else 10_000 * exchange.rank

    def sample(index):
        tokens = scale * random.Random(first + index).randint(1, 32)
        return {"input_ids": [1] * tokens, "id": first + index}

    if kind == "keys":
        source = ParallelProcessor(ShardedSampler(size, rank=0, world_size=1), sample)
    else:
        source = IterableWrapper([*map(sample, range(size))])
    state = "payload" if kind == "payload" else "replay"
    groups = WindowBucketer(LengthObserver(source), 100, window, state)
    aligner = RankAligner(groups, exchange, **{"round_size": 8, "timeout_s": TIMEOUT_S, **options})
    node = GroupCollator(aligner, lambda group: {"ids": [sample["id"] for sample in group]})
    return Loader(ReadAhead(node, read_ahead) if read_ahead else node)


def bucketer_of(loader):
    return next(node for node in walk(loader.root) if isinstance(node, WindowBucketer))


def window_of(loader):
    return bucketer_of(loader).window


def chosen_in(state):
    """The window that the state of an aligner has of the next round."""
    while "settings" not in state:
        state = state["root" if "root" in state else "source"]
    return state["settings"][2]


@pytest.mark.parametrize(("ranks", "size"), [(1, 1000), (3, 600)])
def test_an_auto_window_begins_with_128_and_suits_from_the_second_round_on(ranks, size):
    def run(exchange):
        loader = loader_of(exchange, size=size)
        windows, pool = [], bucketer_of(loader).planner
        pulled = []
        for _ in loader:
            windows.append((window_of(loader), chosen_in(loader.state_dict())))
            pulled.append(pool.pool.pulled)
        assert pulled[-1] == size
        next(iter(loader))
        return windows, pulled[0], pool.pool.pulled

    results = on_ranks(ranks, run)
    (window,) = {chosen for windows, _, _ in results for _, chosen in windows}
    assert 160 < window < 240  # 32 budgets of 100 tokens, at a mean of 16.5
    for windows, first, second in results:
        # In a short epoch each rank chooses by its own lengths for the first round.
        assert (128 <= first < 160) == (size > 4 * window)
        assert {samples for samples, _ in windows} == {window}  # of the rounds after that
        assert second >= window  # the second epoch begins with as many


def test_where_a_node_reads_ahead_below_the_aligner_each_rank_chooses_by_itself():
    def run(exchange):
        lengths = [10 * (exchange.rank + 1)] * 600
        bucketer = WindowBucketer(LengthObserver(IterableWrapper(lengths), int), 100)
        list(Loader(RankAligner(ReadAhead(bucketer, 2), exchange, timeout_s=TIMEOUT_S)))
        return bucketer.window

    assert on_ranks(2, run) == [320, 160]


def test_ranks_with_different_auto_windows_cannot_resume():
    def saved(exchange, scale):
        it = iter(loader := loader_of(exchange, scale=scale, step_time=len))
        next(it)  # the first round
        return loader.state_dict()

    states = [on_ranks(2, lambda exchange, scale=scale: saved(exchange, scale)) for scale in (1, 2)]

    def run(exchange):
        loader = loader_of(exchange, scale=exchange.rank + 1, step_time=len)
        loader.load_state_dict(states[exchange.rank][exchange.rank])
        with pytest.raises(StateError, match="window of the next round"):
            next(iter(loader))

    on_ranks(2, run)


# --- groups that are cut to the same costs on all ranks, through resumes; and where they are not --


def tokens_of_rank(rank):
    rng = random.Random(rank)
    return [rng.randint(1, 60) for _ in range(500)]


def loader_over(exchange, tokens, window=64, reads_ahead=False, **options):
    """Over samples of these lengths, each rank for itself."""
    samples = [
        {"input_ids": [1] * n, "id": (exchange.rank, index)} for index, n in enumerate(tokens)
    ]
    groups = WindowBucketer(LengthObserver(IterableWrapper(samples)), 100, window)
    groups = ReadAhead(groups, 4) if reads_ahead else groups
    return Loader(RankAligner(groups, exchange, timeout_s=TIMEOUT_S, **options))


def has_caps(state):
    """Whether the state of a graph has caps."""
    if not isinstance(state, dict):
        return False
    own = state.get("caps") or (state["settings"][1] if "settings" in state else ())
    return bool(own) or any(map(has_caps, state.values()))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (2, {"reads_ahead": True, "step_time": StepTime(squares=1)})],
)
def test_there_are_none_of_one_rank_nor_where_a_node_reads_ahead(ranks, options):
    def run(exchange):
        return epoch_of(loader_over(exchange, tokens_of_rank(exchange.rank)[:200], **options))

    assert not any(has_caps(state) for _, states in on_ranks(ranks, run) for state in states)
