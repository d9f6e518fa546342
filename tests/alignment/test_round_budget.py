"""A budget that becomes smaller within an epoch: by a rank's wish, or for a run that resumes."""

import re

import pytest
from aligned_ranks import TIMEOUT_S, cut, on_ranks, shard
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


class Job:
    """Loaders of ranks, each with samples of its own.

    Args:
        kind: "keys" or "iterable": whether a restore makes samples again by their keys.
    """

    def __init__(
        self,
        kind,
        ranks,
        accumulate=1,
        layout="padded",
        uneven="fill",
        oversize="alone",
        sizes=None,
    ):
        self.kind, self.ranks, self.accumulate, self.layout = kind, ranks, accumulate, layout
        self.uneven, self.oversize = uneven, oversize
        self.sizes = sizes or [SAMPLES] * ranks

    def size(self, rank):
        return self.sizes[rank]

    def loader(self, exchange, tokens=96, exclude=(), **limits):
        size = self.size(exchange.rank)
        data = [cut(one) for one in shard(exchange.rank, size)]
        if self.kind == "keys":
            source = ParallelProcessor(ShardedSampler(size, rank=0, world_size=1), data.__getitem__)
        else:
            source = IterableWrapper(data)
        budget = TokenBudget(tokens, layout=self.layout, oversize=self.oversize, **limits)
        bucketer = WindowBucketer(LengthObserver(source), budget, 12, exclude=exclude)
        options = {"timeout_s": TIMEOUT_S, "round_size": 8, "accumulate": self.accumulate}
        options["uneven"] = self.uneven
        self.aligner = aligner = RankAligner(bucketer, exchange, **options)
        return Loader(GroupCollator(aligner, rank=exchange.rank)), aligner

    def run(self, exchange, asks=(), state=None, **options):
        """Of each step: ids, cost, and the state after it; asks are (step, rank, tokens)."""
        loader, aligner = self.loader(exchange, **options.pop("budget", {}))
        found = []
        if state is not None:
            loader.load_state_dict(state, **options)
        for batch in loader:
            info = pop_step_info(batch)
            ids = [] if info.is_filler else batch["id"].tolist()
            for step, rank, tokens in asks:
                if (step, rank) == (info.step, exchange.rank):
                    aligner.terms.budget.ask_for(tokens)
            found.append((ids, info, loader.state_dict()))
        return found


def ids_of(steps):
    return sorted(index for ids, _, _ in steps for index in ids)


def names_of(steps):
    return [(ids, info.step, info.all_samples_this_step) for ids, info, _ in steps]


JOBS = [("keys", 1), ("keys", 2), ("iterable", 1), ("iterable", 2)]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("kind", "ranks"), JOBS)
def test_the_smallest_wish_of_a_rank_is_what_all_ranks_form_groups_under(kind, ranks, accumulate):
    job = Job(kind, ranks, accumulate)
    asks = [(5, 0, 60), (5, ranks - 1, SMALLER), (20, 0, 80)]
    found = on_ranks(ranks, lambda exchange: job.run(exchange, asks))
    for rank, steps in enumerate(found):
        assert ids_of(steps) == [*range(1000 * rank, 1000 * rank + SAMPLES)]
        costs = [info.most_cost for _, info, _ in steps]
        assert max(costs[:6]) > SMALLER
        assert max(costs[30:]) <= SMALLER
        assert [info.step for _, info, _ in steps] == [info.step for _, info, _ in found[0]]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("kind", "ranks"), JOBS)
def test_a_run_whose_budget_shrinks_resumes_exactly_at_every_step(kind, ranks, layout, sampled):
    job = Job(kind, ranks, layout=layout)
    asks = [(5, ranks - 1, SMALLER), (17, 0, 30)]
    whole = on_ranks(ranks, lambda exchange: job.run(exchange, asks))
    assert len(whole[0]) > 30
    for place in range(0, len(whole[0]), sampled(every=7).get("every", 1)):
        later = [one for one in asks if one[0] > place]

        def resume(exchange, place=place, later=later):
            return job.run(exchange, later, whole[exchange.rank][place][2])

        for steps, before in zip(on_ranks(ranks, resume), whole, strict=True):
            assert names_of(steps) == names_of(before[place + 1 :])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("kind", "ranks"), JOBS)
def test_a_run_resumes_with_a_smaller_budget_at_every_step(kind, ranks, accumulate, sampled):
    job = Job(kind, ranks, accumulate)
    whole = on_ranks(ranks, job.run)
    options = {"budget": {"tokens": SMALLER}}
    for place in range(0, len(whole[0]), sampled(every=7).get("every", 1)):

        def resume(exchange, place=place):
            state = whole[exchange.rank][place][2]
            return job.run(exchange, (), state, change_budget=True, **options)

        changed = on_ranks(ranks, resume)
        for rank, steps in enumerate(changed):
            seen = ids_of(whole[rank][: place + 1]) + ids_of(steps)
            assert sorted(seen) == [*range(1000 * rank, 1000 * rank + SAMPLES)]
            assert [info.step for _, info, _ in steps] == [info.step for _, info, _ in changed[0]]
            costs = [info.most_cost for _, info, _ in steps]
            assert max(costs[2 * 8 + 3 :], default=0) <= SMALLER

        again = min(3, len(changed[0]) - 1)  # within the round that was planned under the larger

        def resume_again(exchange, again=again, changed=changed):
            return job.run(exchange, (), changed[exchange.rank][again][2], **options)

        if again >= 0:
            for steps, before in zip(on_ranks(ranks, resume_again), changed, strict=True):
                assert names_of(steps) == names_of(before[again + 1 :])


@pytest.mark.parametrize("uneven", ["join", "stop"])
@pytest.mark.parametrize(("kind", "ranks"), [("keys", 2), ("iterable", 2)])
def test_ranks_that_end_apart_shrink_alike_and_resume_exactly(kind, ranks, uneven, sampled):
    job = Job(kind, ranks, uneven=uneven, sizes=(SAMPLES, SAMPLES - 60))
    asks = [(5, 1, SMALLER), (21, 0, 30)]
    whole = on_ranks(ranks, lambda exchange: job.run(exchange, asks))
    for rank, steps in enumerate(whole):
        found = ids_of(steps)
        assert len(found) == len({*found}) <= job.size(rank)
        assert uneven == "stop" or len(found) == job.size(rank)
        assert max(info.most_cost for _, info, _ in steps[45:]) <= 30
    for place in range(0, min(map(len, whole)) - 1, sampled(every=11).get("every", 1)):
        later = [one for one in asks if one[0] > place]

        def resume(exchange, place=place, later=later):
            return job.run(exchange, later, whole[exchange.rank][place][2])

        for steps, before in zip(on_ranks(ranks, resume), whole, strict=True):
            assert names_of(steps) == names_of(before[place + 1 :])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", ["keys", "iterable"])
def test_a_rank_that_has_ended_resumes_exactly_where_the_others_shrink(
    kind, layout, accumulate, sampled
):
    job = Job(kind, 2, accumulate, layout=layout, sizes=(SAMPLES, 40))
    asks = [(4, 1, 30), (17, 0, 20)]
    whole = on_ranks(2, lambda exchange: job.run(exchange, asks))
    for place in range(0, len(whole[0]), sampled(every=7).get("every", 1)):
        later = [one for one in asks if one[0] > place]

        def resume(exchange, place=place, later=later):
            return job.run(exchange, later, whole[exchange.rank][place][2])

        for steps, before in zip(on_ranks(2, resume), whole, strict=True):
            assert names_of(steps) == names_of(before[place + 1 :])

        def change(exchange, place=place):
            state, budget = whole[exchange.rank][place][2], {"tokens": 50}
            return job.run(exchange, (), state, change_budget=True, budget=budget)

        for rank, steps in enumerate(on_ranks(2, change)):
            found = ids_of([*whole[rank][: place + 1], *steps])
            assert sorted(found) == [*range(1000 * rank, 1000 * rank + job.size(rank))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_are_excluded_from_a_run_whose_budget_shrinks(ranks, sampled):
    job, gone = Job("keys", ranks), {*range(30, 200, 7)}
    asks = [(5, ranks - 1, SMALLER), (17, 0, 30)]
    whole = on_ranks(ranks, lambda exchange: job.run(exchange, asks))
    for place in range(0, len(whole[0]) - 1, sampled(every=11).get("every", 1)):
        later = [one for one in asks if one[0] > place]

        def resume(exchange, place=place, later=later):
            budget = {"exclude": gone}
            return job.run(exchange, later, whole[exchange.rank][place][2], budget=budget)

        for rank, steps in enumerate(on_ranks(ranks, resume)):
            before = ids_of(whole[rank][: place + 1])
            expected = {*range(SAMPLES)} - (gone - {one - 1000 * rank for one in before})
            assert sorted([*before, *ids_of(steps)]) == sorted(
                1000 * rank + one for one in expected
            )


@pytest.mark.parametrize(("kind", "ranks"), JOBS)
def test_samples_of_a_round_stay_though_a_smaller_budget_would_drop_them(kind, ranks, sampled):
    job = Job(kind, ranks, oversize="drop")
    whole = on_ranks(ranks, lambda exchange: job.run(exchange, [(9, 0, 60)]))
    options = {"budget": {"tokens": 20}}
    for place in range(0, len(whole[0]), sampled(every=11).get("every", 1)):

        def resume(exchange, place=place):
            state = whole[exchange.rank][place][2]
            return job.run(exchange, (), state, change_budget=True, **options)

        changed = on_ranks(ranks, resume)
        for rank, steps in enumerate(changed):
            fates = [*whole[rank][: place + 1], *steps]
            found, dropped = ids_of(fates), [one for _, info, _ in fates for one in info.left_out]
            assert len(found) == len({*found}) == SAMPLES - len(dropped)
            assert {one.reason for one in dropped} <= {"dropped"}
        for again in range(0, min(12, len(changed[0])), 3):  # in that round, and in the next

            def resume_again(exchange, again=again, changed=changed):
                return job.run(exchange, (), changed[exchange.rank][again][2], **options)

            for steps, before in zip(on_ranks(ranks, resume_again), changed, strict=True):
                assert names_of(steps) == names_of(before[again + 1 :])


@pytest.mark.parametrize(("kind", "ranks"), JOBS)
def test_a_sample_that_a_smaller_budget_refuses_was_not_in_the_round(kind, ranks, sampled):
    job = Job(kind, ranks, oversize="error")
    whole = on_ranks(ranks, job.run)
    for place in range(0, len(whole[0]) // 2, sampled(every=11).get("every", 1)):

        def resume(exchange, place=place):
            state = whole[exchange.rank][place][2]
            return job.run(exchange, (), state, change_budget=True, budget={"tokens": 20})

        with pytest.raises((PeerError, SampleError), match="`tokens` is 20") as raised:
            on_ranks(ranks, resume)
        ordinal = int(re.search(r"sample (\d+) of the epoch", str(raised.value))[1])
        assert ordinal >= min(len(ids_of(steps[: place + 1])) for steps in whole)


def test_the_next_epoch_goes_on_with_the_smaller_budget():
    job = Job("keys", 1)

    def run(exchange):
        loader, aligner = job.loader(exchange)
        epochs = [[pop_step_info(batch) for batch in loader]]
        aligner.terms.budget.ask_for(SMALLER)
        epochs += [[pop_step_info(batch) for batch in loader] for _ in range(2)]
        return epochs, loader.state_dict()

    ((first, second, third), state) = on_ranks(1, run)[0]
    assert max(info.most_cost for info in first) > SMALLER
    assert max(info.most_cost for info in [*second[4:], *third]) <= SMALLER

    def resume(exchange):
        loader, _ = job.loader(exchange)
        loader.load_state_dict(state)
        return [pop_step_info(batch) for batch in loader]

    assert max(info.most_cost for info in on_ranks(1, resume)[0]) <= SMALLER


@pytest.mark.parametrize(
    ("budget", "change", "message"),
    [
        ({"tokens": 200}, True, "`budget.tokens` was 96 when saved, but is 200 now"),
        ({"tokens": 60}, False, "`budget.tokens` was 96 when saved, but is 60 now"),
        ({"tokens": 96, "pad_to_multiple_of": 8}, True, "`budget.pad_to_multiple_of` was 1"),
    ],
)
def test_a_budget_may_only_become_smaller_and_only_if_that_is_said(budget, change, message):
    job = Job("keys", 1)
    state = on_ranks(1, job.run)[0][6][2]
    with pytest.raises(StateError, match=message):
        on_ranks(
            1, lambda exchange: job.run(exchange, (), state, change_budget=change, budget=budget)
        )


def test_samples_and_patches_may_be_fewer_too():
    job = Job("keys", 1)
    state = on_ranks(1, job.run)[0][6][2]
    budget = {"tokens": 96, "max_samples": 2}

    def resume(exchange):
        return job.run(exchange, (), state, change_budget=True, budget=budget)

    steps = on_ranks(1, resume)[0]
    assert max(len(ids) for ids, _, _ in steps[4:]) == 2
