"""A budget that becomes smaller within an epoch: by a rank's wish, or for a run that resumes."""

import random
import re

import pytest
from aligned_ranks import TIMEOUT_S, assert_resumes, epoch_of, on_ranks, shard
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
from odb_nodes.contract.graph import walk
from odb_nodes.nodes.read_ahead import ReadAhead

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


# --- a window that all ranks choose by the lengths of all, through resumes and epochs -------------


def loader_of(
    exchange=None, kind="keys", size=300, window="auto", read_ahead=0, scale=1, **options
):
    first = 0 if exchange is None else 10_000 * exchange.rank

    def sample(at):
        tokens = scale * random.Random(first + at).randint(1, 32)
        return {"input_ids": [1] * tokens, "id": first + at}

    if kind == "keys":
        source = ParallelProcessor(ShardedSampler(size, rank=0, world_size=1), sample)
    else:
        source = IterableWrapper([*map(sample, range(size))])
    state = "payload" if kind == "payload" else "replay"
    groups = WindowBucketer(LengthObserver(source), 100, window, state)
    aligner = RankAligner(groups, exchange, **{"round_size": 8, "timeout_s": TIMEOUT_S, **options})
    node = GroupCollator(aligner, lambda group: {"ids": [one["id"] for one in group]})
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
def test_an_epoch_begins_with_128_and_the_second_round_has_what_suits(ranks, size):
    def run(exchange):
        loader = loader_of(exchange, size=size)
        pools = []
        for _ in loader:
            pools.append((window_of(loader), chosen_in(loader.state_dict())))
        assert bucketer_of(loader).planner.pool.pulled == size
        next(iter(loader))
        return pools, bucketer_of(loader).planner.pool.pulled, window_of(loader)

    found = on_ranks(ranks, run)
    (window,) = {chosen for pools, _, _ in found for _, chosen in pools}
    assert 160 < window < 240  # 32 budgets of 100 tokens, at a mean of 16.5
    first_round = 1 if ranks == 1 else 4
    for pools, pulled, later in found:
        first = {samples for samples, _ in pools[:first_round]}
        # In a short epoch each rank chooses by its own lengths until then.
        assert first == {128} if size > 4 * window else min(first) > 128
        assert {samples for samples, _ in pools[first_round + 1 :]} == {window}
        assert later == window <= pulled  # the second epoch begins with as many


def test_each_epoch_chooses_by_its_own_lengths():
    class Growing(IterableWrapper):
        """Three times as long in each epoch."""

        tokens = 3

        def reset(self, initial_state=None):
            super().reset(initial_state)
            self.tokens *= 3

    source = Growing(range(600))
    observer = LengthObserver(source, observe=lambda _: source.tokens)
    loader = Loader(RankAligner(WindowBucketer(observer, 600)))
    windows = []
    for _ in range(3):
        list(loader)
        windows.append(window_of(loader))
    assert windows == [round(32 * 600 / tokens) for tokens in (9, 27, 81)]


def test_a_rank_that_ended_in_the_first_round_begins_the_next_epoch_like_the_others():
    def run(exchange):
        loader = loader_of(exchange, size=[600, 20][exchange.rank])
        list(loader)
        resumed = loader_of(exchange, size=[600, 20][exchange.rank])
        resumed.load_state_dict(loader.state_dict())
        next(iter(loader))
        next(iter(resumed))
        return window_of(loader), window_of(resumed)

    first, second = on_ranks(2, run)
    assert first == second
    assert first[0] == first[1] > 128


def test_ranks_with_a_window_of_their_own_choose_nothing_and_hold_no_one_up():
    def run(exchange):
        options = {"size": 500, "window": ["auto", 64][exchange.rank]}
        loader = loader_of(exchange, **options)
        steps = [(batch["ids"], loader.state_dict()) for batch in loader]
        resumed = loader_of(exchange, **options)
        resumed.load_state_dict(steps[9][1])
        assert [batch["ids"] for batch in resumed] == [ids for ids, _ in steps[10:]]
        return window_of(loader)

    auto, fixed = on_ranks(2, run)
    assert (fixed, auto > 128) == (64, True)


def test_where_a_node_reads_ahead_below_the_aligner_each_rank_chooses_by_itself():
    def run(exchange):
        lengths = [10 * (exchange.rank + 1)] * 600
        bucketer = WindowBucketer(LengthObserver(IterableWrapper(lengths), int), 100)
        list(Loader(RankAligner(ReadAhead(bucketer, 2), exchange, timeout_s=TIMEOUT_S)))
        return bucketer.window

    assert on_ranks(2, run) == [320, 160]


def test_ranks_that_have_chosen_different_windows_do_not_go_on():
    def saved(exchange, scale):
        it = iter(loader := loader_of(exchange, scale=scale, cost_fn=len))
        for _ in range(4):  # the first round
            next(it)
        return loader.state_dict()

    states = [on_ranks(2, lambda exchange, scale=scale: saved(exchange, scale)) for scale in (1, 2)]

    def run(exchange):
        loader = loader_of(exchange, scale=exchange.rank + 1, cost_fn=len)
        loader.load_state_dict(states[exchange.rank][exchange.rank])
        with pytest.raises(StateError, match="window of the next round"):
            next(iter(loader))

    on_ranks(2, run)


@pytest.mark.parametrize(("before", "now"), [("auto", 200), (200, "auto")])
def test_a_number_in_place_of_auto_is_another_configuration(before, now):
    loader = loader_of(window=before, size=1500)
    it = iter(loader)
    taken = [next(it)["ids"] for _ in range(6)]
    changed = loader_of(window=now, size=1500)
    changed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=f"`window` was {before!r} when saved, but is {now!r} now"):
        iter(changed)
    changed.load_state_dict(loader.state_dict(), strict=False)
    with pytest.warns(UserWarning, match="`window` was"):
        rest = [batch["ids"] for batch in changed]
    assert sorted(sum(taken + rest, [])) == [*range(1500)]
    assert window_of(changed) == (200 if now == 200 else pytest.approx(194, abs=20))


# --- groups that are cut to the same costs on all ranks, through resumes; and where they are not --


def tokens_of_rank(rank):
    rng = random.Random(rank)
    return [rng.randint(1, 60) for _ in range(500)]


def loader_over(exchange, tokens, window=64, reads_ahead=False, **options):
    """Over samples of these lengths, each rank for itself."""
    samples = [{"input_ids": [1] * n, "id": (exchange.rank, at)} for at, n in enumerate(tokens)]
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
    ("ranks", "options"), [(1, {}), (2, {"cost_fn": len}), (2, {"reads_ahead": True})]
)
def test_there_are_none_of_one_rank_nor_of_other_costs_nor_where_a_node_reads_ahead(ranks, options):
    def run(exchange):
        return epoch_of(loader_over(exchange, tokens_of_rank(exchange.rank)[:200], **options))

    assert not any(has_caps(state) for _, states in on_ranks(ranks, run) for state in states)


def test_a_rank_that_has_drained_in_a_short_round_fills_with_the_same_sample_again():
    def make(exchange):
        rank, size = exchange.rank, [118, 260, 260][exchange.rank]
        seeds = [1000 * rank + index + (10**6 if rank == 0 else 0) for index in range(size)]
        shortest, most, times = (3, 9, 3) if rank == 0 else (1, 12, 5)
        tokens = [times * random.Random(seed).randint(shortest, most) for seed in seeds]
        return loader_over(exchange, tokens, window=40)

    whole = on_ranks(3, lambda exchange: epoch_of(make(exchange)))
    place = len(whole[0][0]) - 3
    assert whole[0][0][place].is_filler
    assert_resumes(make, whole, [place])
