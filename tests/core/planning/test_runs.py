"""Groups of padded rows: runs in order of length, chosen by work done, or mixed by task."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import lognormal, padded_budgets, pool_of, run, table_of
from refusals import refuses

from odb_nodes.core.planning import SimulationOptions, StepTime, TokenBudget
from odb_nodes.core.planning.caps import costs_of, joined_costs, times_of
from odb_nodes.core.planning.runs import (
    STEP_COST_SHARE,
    LengthRuns,
    check_diversity,
    diversities,
)
from odb_nodes.core.planning.table import ORDINALS, PATCHES, TOKENS

few = settings(max_examples=max(20, settings.default.max_examples // 5))


def test_the_run_is_chosen_whose_samples_are_most_of_its_cost():
    # With attention, 2 of 30 cost 2 * (30 + 90) = 240, and so do 6 of 15 but one; 3 of 16, less.
    budget = TokenBudget(240, attention_tokens=10)
    assert run([30, 15, 15, 30, 15, 15, 15, 15], budget, 8)[0] == [[0, 3], [1, 2, 4, 5, 6, 7]]


ROWS = {
    "any": {*range(1, 200)},
    "even": {1, *range(2, 200, 2)},
    "friendly": {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192},
}


def random_samples(count, longest, seed):
    """Tokens, patches and task of each sample."""
    highest = longest + 1, 21, 4
    draws = np.random.default_rng(seed).integers((1, 0, 0), highest, (count, 3))
    return [*map(tuple, draws.tolist())]


samples = st.builds(
    random_samples, st.integers(1, 25), st.sampled_from([20, 60, 120]), st.integers(0, 2**16)
)


def is_full_run(tokens, patches, budget):
    """Whether samples in order of length may be a group."""
    if len(tokens) == 1:
        return True
    rows = budget.shape(tokens)[0]
    return (
        len(tokens) <= rows
        and budget.cost(tokens) <= budget.tokens
        and not any(map(budget.is_oversize, tokens))
        and len(tokens) <= (budget.max_samples or len(tokens))
        and sum(patches) <= (budget.max_patches or sum(patches))
        and (budget.shapes is not None or len(tokens) in ROWS[budget.row_sizes])
    )


def full_runs(table, budget):
    """Of each sample, the longest run that ends with it."""
    tokens, patches = table[TOKENS].tolist(), table[2].tolist()
    return [
        next(
            (first, stop)
            for first in range(stop)
            if is_full_run(tokens[first:stop], patches[first:stop], budget)
        )
        for stop in range(1, len(tokens) + 1)
    ]


@given(samples, padded_budgets, st.integers(0, 24))
@few
def test_no_other_full_run_with_an_anchor_gets_more_done_for_the_cost_of_its_step(
    samples, budget, youngest_anchor
):
    table = table_of(samples)
    tokens = table[TOKENS].tolist()

    def score(first, stop):
        group = tokens[first:stop]
        cost = budget.cost(group) + STEP_COST_SHARE * budget.tokens
        return sum(map(budget.row_cost, group)) / cost

    def has_anchor(first, stop):
        return table[ORDINALS, first:stop].min() <= youngest_anchor

    chosen = LengthRuns(budget).choose(table, youngest_anchor)
    runs = [run for run in full_runs(table, budget) if has_anchor(*run)]
    assert (chosen.start, chosen.stop) in runs
    assert score(chosen.start, chosen.stop) == pytest.approx(max(score(*run) for run in runs))


def test_of_equally_good_runs_that_of_the_shortest_samples_is_chosen():
    assert LengthRuns(TokenBudget(40)).choose(table_of([(20, 0, 0)] * 2 + [(10, 0, 0)] * 4), 9) == (
        slice(0, 4)
    )


def test_a_group_may_have_as_many_patches_as_the_limit():
    runs = LengthRuns(TokenBudget(100, max_patches=4))
    assert runs.choose(table_of([(10, 2, 0), (11, 2, 0), (12, 2, 0)]), 9) == slice(1, 3)
    assert runs.choose(table_of([(10, 0, 0), (11, 4, 0), (12, 0, 0)]), 9) == slice(0, 3)


def test_a_run_that_does_not_fill_its_shape_costs_as_much_as_one_that_does():
    budget = TokenBudget(100, shapes=2)
    assert budget.shape_ladder() == ((12, 8), (1, 100))
    assert LengthRuns(budget).choose(table_of([(8, 0, 0), (8, 0, 0), (60, 0, 0)]), 9) == slice(2, 3)


@given(samples, padded_budgets)
@few
def test_the_largest_group_is_the_full_run_of_the_longest_sample(samples, budget):
    table = table_of(samples)
    run = LengthRuns(budget).largest(table)
    assert (run.start, run.stop) == full_runs(table, budget)[-1]


@given(samples, padded_budgets, st.data())
@few
def test_the_tail_without_one_group_makes_the_other_groups(samples, budget, data):
    table, runs = table_of(samples), LengthRuns(budget)
    groups = [group.tolist() for group in runs.partition(table)]
    assert sorted(number for group in groups for number in group) == [*range(len(samples))]
    gone = data.draw(st.sampled_from(groups))
    kept = table[:, ~np.isin(table[ORDINALS], gone)]
    again = [group.tolist() for group in runs.partition(kept)] if kept.size else []
    assert again == [group for group in groups if group != gone]


@pytest.mark.parametrize("sizes", ROWS)
def test_a_tail_is_cut_from_the_longest_down(sizes):
    table = table_of([(10, 0, 0)] * 5 + [(40, 0, 0)] * 3)
    sizes_of = [
        len(group) for group in LengthRuns(TokenBudget(120, row_sizes=sizes)).partition(table)
    ]
    assert sizes_of == {"any": [3, 5], "even": [2, 2, 4], "friendly": [3, 4, 1]}[sizes]


@pytest.mark.parametrize(
    ("lengths", "youngest_anchor", "caps", "chosen"),
    [
        ([*[10] * 4, 30, 30], 9, [40], (0, 4)),  # 4 * 10 fill the cap
        ([*[10] * 4, 30, 30], 9, [60], (4, 6)),  # 2 * 30 fill it, and 4 * 10 leave a third of it
        ([*[10] * 4, 30, 30], 9, [30, 60], (4, 6)),
        ([*[10] * 4, 30, 30], 0, [60], (0, 4)),  # the oldest is a short one
        # All seven with the oldest, of 11, leave much of 100; four fill the next lower cap.
        ([11, *[10] * 6], 0, [44, 100], (3, 7)),
        ([11, *[10] * 6], 0, [77, 100], (0, 7)),
        ([11, *[10] * 6], 0, [44, 60, 100], (2, 7)),  # of lower caps, only the next
        # A sample alone may cost more than any cap.
        ([90, 10, 10], 0, [20, 50], (2, 3)),
        ([10, 10, 90], 0, [20, 50], (0, 2)),
    ],
)
def test_under_caps_a_run_is_worth_how_full_it_makes_its_cap(
    lengths, youngest_anchor, caps, chosen
):
    """Other ranks fill the caps, so a group that costs less than its cap makes no step faster."""
    table = table_of([(length, 0, 0) for length in lengths])
    runs = LengthRuns(TokenBudget(100))
    assert runs.choose(table, youngest_anchor, np.array(caps)) == slice(*chosen)


def test_under_a_cap_less_padding_is_worth_some_of_it():
    # 3 * 120 are 360 of 400 without padding; 165 and 200 take all of it, and waste 35.
    table = table_of([(length, 0, 0) for length in (120, 120, 120, 165, 200)])
    assert LengthRuns(TokenBudget(1000)).choose(table, 9, np.array([400])) == slice(0, 3)


def test_a_pool_offers_the_costs_of_its_full_groups():
    # From the longest down: 1 x 70, 2 x 40, 3 x 30, 10 x 10; what is left is not full.
    pool = pool_of([70, 40, 40, *[30] * 3, *[10] * 65], 100)
    assert pool.offer(9).tolist() == [100, 100, 100, 100, 100, 100, 100, 90, 80, 70]


def test_the_shortest_full_group_is_offered_as_well():
    assert pool_of([10, 55, *[98] * 8], 100).offer(9).tolist() == [100, *[98] * 8, 55]


@pytest.mark.parametrize(
    "budget", [TokenBudget(100, layout="packed"), TokenBudget(100, shapes=3), TokenBudget(120)]
)
def test_packed_rows_and_fixed_shapes_and_small_pools_offer_nothing(budget):
    assert not len(pool_of([70, 40, 40, *[30] * 3, *[10] * 65], budget).offer(9))


@given(st.integers(0, 2**16), st.sampled_from(["even", "friendly"]))
@few
def test_under_a_limit_of_patches_groups_have_these_rows_until_the_data_ends(seed, sizes):
    lengths, patches = np.random.default_rng(seed).integers((1, 0), (61, 10), (100, 2)).T.tolist()
    budget = TokenBudget(600, max_patches=40, row_sizes=sizes)
    groups, _ = run(lengths, budget, 30, patches)
    out = np.cumsum([len(group) for group in groups])
    before_the_end = int(np.searchsorted(out, len(lengths) - 30, side="right"))
    assert {len(group) for group in groups[:before_the_end]} <= ROWS[sizes]


# --- for a time ----------------------------------------------------------------------------------

step_times = st.builds(
    StepTime,
    squares=st.sampled_from([0.0, 0.001, 1 / 40, 1.0]),
    patches=st.sampled_from([0.0, 0.5, 20.0]),
    base=st.sampled_from([0.0, 5.0]),
).filter(lambda times: not times.is_of_tokens)


def time_of(table, columns, step_time, budget):
    return replace(step_time, base=0.0).of_group(
        table[TOKENS, columns], table[PATCHES, columns], budget
    )


@given(
    samples,
    padded_budgets,
    step_times,
    st.integers(0, 4_000),
    st.none() | st.integers(0, 24),
    st.sampled_from([0.0, 0.5]),
)
@few
def test_a_run_for_a_time_is_within_every_limit_and_holds_the_sample_that_is_due(
    samples, budget, step_time, target, due, diversity
):
    table = table_of(samples)
    due = None if due is None else due % len(samples)
    runs = LengthRuns(budget, diversity, step_time)
    run = runs.aimed(table, joined_costs(target, budget.tokens), due)
    assert 0 <= run.start < run.stop <= len(samples)
    assert due is None or run.start <= due < run.stop
    tokens, patches = table[TOKENS, run].tolist(), int(table[PATCHES, run].sum())
    if len(tokens) > 1:  # an oversize sample is alone
        assert budget.cost(tokens) <= budget.tokens
        assert len(tokens) <= (budget.max_samples or len(tokens))
        assert patches <= (budget.max_patches or patches)
        if budget.shapes is None:
            assert len(tokens) in ROWS[budget.row_sizes]
        if budget.shapes is None and not step_time.patches:
            assert time_of(table, run, step_time, budget) <= target
    assert runs.aimed(table, joined_costs(target, budget.tokens), due) == run


@given(samples, padded_budgets, step_times, st.integers(1, 4_000))
@few
def test_all_samples_are_cut_into_runs_that_keep_to_a_time(samples, budget, step_time, most_time):
    table = table_of(samples)
    groups = LengthRuns(budget, step_time=step_time).cut(table, most_time)
    ordinals = np.concatenate(groups)
    assert ordinals[::-1].tolist() != [] and sorted(ordinals) == [*range(len(samples))]
    for group in groups:
        columns = np.flatnonzero(np.isin(table[ORDINALS], group))
        assert len(group) == 1 or budget.cost(table[TOKENS, columns].tolist()) <= budget.tokens
        if budget.shapes is None and not step_time.patches and len(group) > 1:
            assert time_of(table, columns, step_time, budget) <= most_time


def test_a_pool_offers_the_times_and_costs_of_its_full_groups():
    budget, step_time = TokenBudget(100), StepTime(squares=0.1)
    table = table_of([(50, 0)] * 20 + [(10, 0)] * 60)
    offer = LengthRuns(budget, step_time=step_time).offer(
        table, 15
    )  # The last one may not be full.
    assert offer[0] == 100
    assert times_of(offer[1:]).tolist() == [100 + 2 * 250] * 10 + [100 + 10 * 10] * 5
    assert costs_of(offer[1:]).tolist() == [100] * 15
    # Fewer budgets, for which groups are filled better without a target; one shape for all.
    for other, samples_of_other in (
        (budget, table[:, :-1]),
        (TokenBudget(100, shapes=3), table),
        (budget, table[:, :0]),
        (TokenBudget(100), table_of([(1_700, 0)])),
    ):
        assert not len(LengthRuns(other, step_time=step_time).offer(samples_of_other, 16))


def test_groups_take_about_as_long_as_they_should():
    lengths, budget, step_time = (
        lognormal(2_000, cv=1.0),
        TokenBudget(16_384),
        StepTime(squares=1 / 800),
    )
    targets = []

    def caps_of(pool):
        caps = pool.offer(8)[1:][::-1]
        targets.extend(times_of(caps)[::-1].tolist())
        return caps

    groups, _ = run(lengths, budget, 512, step_time=step_time, caps_of=caps_of)
    times = [
        step_time.of_group([lengths[index] for index in group], [0] * len(group), budget)
        for group in groups
    ]
    reached = np.array(times[: len(targets)][:-8]) / np.array(targets[: len(times)][:-8])
    assert len(reached) > 60
    assert reached.max() <= 1 and reached.mean() > 0.93


# --- groups that mix tasks more evenly, where a weight asks for them ------------------------------


def evenness(tasks, among):
    """The entropy of some tasks, as a share of that of `among` equal ones."""
    counts = Counter(tasks).values()
    shares = [count / sum(counts) for count in counts]
    return -sum(share * math.log(share) for share in shares) / math.log(among)


@given(tasks=st.lists(st.integers(0, 6), min_size=1, max_size=40), data=st.data())
@few
def test_the_diversity_of_a_run_is_its_entropy_among_the_tasks_of_the_pool(tasks, data):
    stop = np.arange(1, len(tasks) + 1)
    first = np.array([data.draw(st.integers(0, end - 1)) for end in stop.tolist()])
    among = len(set(tasks))
    expected = [
        evenness(tasks[begin:end], among) if among > 1 else 0.0
        for begin, end in zip(first, stop, strict=True)
    ]
    measured = diversities(np.array(tasks), first, stop)
    assert measured == pytest.approx(expected, abs=1e-6)
    assert measured.min() >= 0 and measured.max() <= 1 + 1e-6


def test_which_task_has_which_number_decides_nothing():
    rng = np.random.default_rng(0)
    tasks, numbers = rng.integers(0, 12, 800), rng.permutation(12) + 7
    first = rng.integers(0, 600, 2000)
    stop = first + rng.integers(1, 200, 2000)
    measured = diversities(tasks, first, stop)
    assert (diversities(numbers[tasks], first, stop) == measured).all()  # to the last bit
    lengths = lognormal(800)
    groups = run(lengths, 16_384, 256, tasks=tasks.tolist(), diversity=0.5)
    renamed = numbers[tasks].tolist()
    assert run(lengths, 16_384, 256, tasks=renamed, diversity=0.5) == groups


def mixed(means, samples):
    """Lengths and tasks of samples that come equally often, in an order drawn at random."""
    from odb_nodes.tools.simulate import lognormal_lengths

    tasks = np.random.default_rng(0).permutation(np.arange(samples) % len(means))
    lengths = np.empty(samples, np.int64)
    for task, mean in enumerate(means):
        places = np.flatnonzero(tasks == task)
        lengths[places] = lognormal_lengths(len(places), cv=0.8, mean_tokens=mean, seed=task)
    return lengths.tolist(), tasks.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("means", "window", "gain"),
    [
        ([800] * 3, 256, 0.056),
        ([300, 800, 2000, 300, 800, 2000, 300, 800], 1024, 0.041),
    ],
)
def test_groups_mix_tasks_more_evenly(means, window, gain):
    """`gain` is what docs/tasks.md says."""
    lengths, tasks = mixed(means, 8_000)

    def mean_of(weight):
        groups, _ = run(lengths, 16_384, window, tasks=tasks, diversity=weight)
        return np.mean([evenness([tasks[i] for i in group], len(means)) for group in groups])

    assert mean_of(0.5) - mean_of(0.0) >= gain / 2


@pytest.mark.parametrize(
    ("weight", "mixed"), [(0.0, False), (0.01, False), (0.1, True), (1.0, True)]
)
def test_a_weight_trades_how_full_a_group_is_for_how_mixed_it_is(weight, mixed):
    # 4 * 10 fill the budget; 2 * 15 leave a quarter of it, and are of two tasks.
    table = table_of([*[(10, 0, 0)] * 4, (15, 0, 0), (15, 0, 1)])
    chosen = LengthRuns(TokenBudget(40), weight).choose(table, 9)
    assert (chosen == slice(4, 6)) == mixed
    assert mixed or chosen == slice(0, 4)


def test_a_mixed_group_still_holds_an_anchor_and_of_equally_mixed_ones_the_fullest_is_chosen():
    table = table_of([*[(10, 0, 0)] * 4, (15, 0, 0), (15, 0, 1)])
    runs = LengthRuns(TokenBudget(40), 1.0)
    assert runs.choose(table, 0) == slice(0, 4)  # the oldest sample is among the short ones
    # Both mix two tasks evenly.
    table = table_of([(10, 0, 0), (10, 0, 1), (20, 0, 0), (20, 0, 1)])
    assert LengthRuns(TokenBudget(40), 1.0).choose(table, 9) == slice(2, 4)


test_a_weight_that_is_none_is_refused = refuses(
    [
        (1.5, ValueError, r"`diversity` must be in \[0, 1\], but is 1.5"),
        (-0.1, ValueError, "`diversity`"),
        (float("nan"), ValueError, "`diversity`"),
        ("1", TypeError, "`diversity` must be a number"),
        (True, TypeError, "`diversity`"),
    ],
    lambda weight: check_diversity(weight, TokenBudget(100)),
)


def test_a_weight_is_a_float_from_zero_to_one():
    weights = [check_diversity(weight, TokenBudget(100)) for weight in (0, 1, 0.5)]
    assert weights == [0.0, 1.0, 0.5] and {*map(type, weights)} == {float}


def test_packed_groups_refuse_it():
    budget = TokenBudget(100, layout="packed")
    with pytest.raises(ValueError, match="`diversity` must be 0 where groups are packed"):
        SimulationOptions(world_size=1, budget=budget, diversity=0.5)
    SimulationOptions(world_size=1, budget=budget, diversity=0)
