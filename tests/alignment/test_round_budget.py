"""A budget that becomes smaller within an epoch: by a rank's wish, or for a run that resumes."""

import re

import pytest
from aligned_ranks import TIMEOUT_S, on_ranks, shard
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
    pop_step_info,
)

SAMPLES = 240
SMALLER = 40
ASKS = [(5, -1, SMALLER), (17, 0, 30)]


class Job:
    """Loaders of ranks, each with samples of its own.

    Args:
        kind: "keys" or "iterable": whether a restore makes samples again by their keys.
        sizes: number of samples of each rank.
        asks: (step, rank, tokens) at which a rank asks for a smaller budget.
        options: of the aligner; also those of the budget.
    """

    def __init__(self, kind, ranks=2, sizes=None, asks=(), **options):
        self.kind, self.sizes = kind, sizes or [SAMPLES] * ranks
        self.asks = [(step, rank % ranks, tokens) for step, rank, tokens in asks]
        names = ("layout", "oversize")
        self.budget = {name: options.pop(name) for name in names if name in options}
        self.options = {"timeout_s": TIMEOUT_S, "round_size": 8, **options}
        self.whole = on_ranks(len(self.sizes), self.run)

    def loader(self, exchange, tokens=96, exclude=(), **limits):
        data = shard(exchange.rank, self.sizes[exchange.rank])
        if self.kind == "keys":
            sampler = ShardedSampler(len(data), rank=0, world_size=1)
            source = ParallelProcessor(sampler, data.__getitem__)
        else:
            source = IterableWrapper(data)
        budget = TokenBudget(tokens, **{**self.budget, **limits})
        bucketer = WindowBucketer(LengthObserver(source), budget, 12, exclude=exclude)
        aligner = RankAligner(bucketer, exchange, **self.options)
        return Loader(GroupCollator(aligner, rank=exchange.rank)), aligner

    def run(self, exchange, state=None, budget=(), **options):
        """Of each step: ids, info, and the state after it."""
        loader, aligner = self.loader(exchange, **dict(budget))
        found = []
        if state is not None:
            loader.load_state_dict(state, **options)
        for batch in loader:
            info = pop_step_info(batch)
            ids = [] if info.is_filler else batch["id"].tolist()
            for step, rank, tokens in self.asks:
                if (step, rank) == (info.step, exchange.rank):
                    aligner.ask_for_tokens(tokens)
            found.append((ids, info, loader.state_dict()))
        return found

    def resumed(self, place, states=None, **options):
        """The same from the state after the step `place` of this run, or of another."""
        states = states or self.whole
        return on_ranks(len(self.sizes), lambda e: self.run(e, states[e.rank][place][2], **options))

    def assert_resumes(self, places, whole=None, **options):
        for place in places:
            found = self.resumed(place, whole, **options)
            for steps, before in zip(found, whole or self.whole, strict=True):
                assert names_of(steps) == names_of(before[place + 1 :]), place

    def assert_changes(self, place, **budget):
        """Resumed with another budget: each sample comes once, in equal steps."""
        changed = self.resumed(place, change_budget=True, budget=budget)
        for rank, (before, steps) in enumerate(zip(self.whole, changed, strict=True)):
            dropped = [
                one.key for _, info, _ in [*before[: place + 1], *steps] for one in info.left_out
            ]
            found = ids_of([*before[: place + 1], *steps])
            assert len(found) == len({*found}) == self.sizes[rank] - len(dropped)
            assert [info.step for _, info, _ in steps] == [info.step for _, info, _ in changed[0]]
        return changed


def ids_of(steps):
    return sorted(index for ids, _, _ in steps for index in ids)


def names_of(steps):
    return [(ids, info.step, info.all_samples_this_step) for ids, info, _ in steps]


def costs_of(steps):
    return [info.most_cost for _, info, _ in steps]


JOBS = pytest.mark.parametrize(("kind", "ranks"), [("keys", 1), ("keys", 2), ("iterable", 2)])


@pytest.mark.parametrize("accumulate", [1, 3])
@JOBS
def test_the_smallest_wish_of_a_rank_is_what_all_ranks_form_groups_under(kind, ranks, accumulate):
    asks = [(5, 0, 60), (5, -1, SMALLER), (20, 0, 80)]
    job = Job(kind, ranks, asks=asks, accumulate=accumulate)
    for rank, steps in enumerate(job.whole):
        assert ids_of(steps) == [*range(1000 * rank, 1000 * rank + SAMPLES)]
        assert max(costs_of(steps[:6])) > SMALLER >= max(costs_of(steps[30:]))
        assert len(steps) == len(job.whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "packed"])
@JOBS
def test_a_run_whose_budget_shrinks_resumes_exactly(kind, ranks, layout, sampled):
    job = Job(kind, ranks, asks=ASKS, layout=layout)
    job.assert_resumes(range(0, len(job.whole[0]), sampled(every=11).get("every", 1)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keys", "iterable"])
@pytest.mark.filterwarnings("ignore:.uneven=.stop:UserWarning")
def test_ranks_that_end_with_the_first_shrink_alike_and_resume_exactly(kind, sampled):
    job = Job(kind, sizes=(SAMPLES, SAMPLES - 60), asks=ASKS, uneven="stop")
    for steps, size in zip(job.whole, job.sizes, strict=True):
        found = ids_of(steps)
        assert len(found) == len({*found}) <= size
        assert max(costs_of(steps[45:])) <= 30
    least = min(map(len, job.whole)) - 1
    job.assert_resumes(range(0, least, sampled(every=13).get("every", 1)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no token of the optimizer step")
@pytest.mark.parametrize(("kind", "accumulate"), [("keys", 3), ("iterable", 1)])
def test_a_rank_that_has_ended_goes_on_where_the_others_shrink(kind, accumulate, sampled):
    asks = [(4, 1, 30), (17, 0, 20)]
    job = Job(kind, sizes=(SAMPLES, 40), asks=asks, accumulate=accumulate)
    places = range(0, len(job.whole[0]), sampled(every=11).get("every", 1))
    job.assert_resumes(places)
    job.asks = []
    for place in places:
        job.assert_changes(place, tokens=50)


@JOBS
def test_a_sample_that_a_smaller_budget_refuses_was_not_in_the_round(kind, ranks):
    job, place = Job(kind, ranks, oversize="error"), 11
    with pytest.raises((PeerError, SampleError), match="`tokens` is 20") as raised:
        job.resumed(place, change_budget=True, budget={"tokens": 20})
    ordinal = int(re.search(r"sample (\d+) of the epoch", str(raised.value))[1])
    assert ordinal >= min(len(ids_of(steps[: place + 1])) for steps in job.whole)


def test_the_next_epoch_goes_on_with_the_smaller_budget():
    job = Job("keys", 1)

    def run(exchange, state=None):
        loader, aligner = job.loader(exchange)
        if state is not None:
            loader.load_state_dict(state)
            return max(pop_step_info(batch).most_cost for batch in loader)
        epochs = [[pop_step_info(batch).most_cost for batch in loader]]
        aligner.ask_for_tokens(SMALLER)
        epochs += [[pop_step_info(batch).most_cost for batch in loader] for _ in range(2)]
        return epochs, loader.state_dict()

    (first, second, third), state = on_ranks(1, run)[0]
    assert max(first) > SMALLER >= max([*second[4:], *third])
    assert on_ranks(1, lambda exchange: run(exchange, state))[0] <= SMALLER


def test_a_budget_may_only_become_smaller_and_only_if_that_is_said():
    job = Job("keys", 1)
    for budget, change, message in [
        ({"tokens": 200}, True, "`budget.tokens` was 96 .*but is 200 now"),
        ({"tokens": 60}, False, "`budget.tokens` was 96 .*but is 60 now"),
        ({"tokens": 96, "pad_to_multiple_of": 8}, True, "`budget.pad_to_multiple_of` was 1"),
    ]:
        with pytest.raises(StateError, match=message):
            job.resumed(6, change_budget=change, budget=budget)
    (steps,) = job.resumed(6, change_budget=True, budget={"tokens": 96, "max_samples": 2})
    assert max(len(ids) for ids, _, _ in steps[4:]) == 2
