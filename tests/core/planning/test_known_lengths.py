"""Plans of whole epochs, of samples whose lengths are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import LIMITS, PACKED, ROW_SIZES

from odb_nodes import TokenBudget
from odb_nodes.core.planning import known_lengths
from odb_nodes.core.planning.known_lengths import EpochPlan, plan_known

few = settings(max_examples=max(10, settings.default.max_examples // 5))

WITHOUT_PATCHES = {**LIMITS, "max_patches": st.none()}


def budgets_of(**part):
    """Budgets with every limit that goes with known lengths, and with what else is given."""
    attention = {"attention_tokens": st.integers(1, 200)}
    return st.builds(TokenBudget, st.integers(16, 200), **WITHOUT_PATCHES, **part) | st.builds(
        TokenBudget, st.integers(300, 900), **WITHOUT_PATCHES, **attention, **part
    )


budgets = budgets_of(**ROW_SIZES) | budgets_of(**PACKED)
ROWS = {
    "any": range(1, 81),
    "even": [1, *range(2, 81, 2)],
    "friendly": [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64],
}
world_sizes = st.integers(1, 9)
options = {
    "window": st.none() | st.integers(1, 40),
    "largest_first": st.sampled_from([0, 0, 1, 3, 100]),
    "seed": st.integers(0, 2**63),
}


def drawn_lengths(count, seed, longest):
    return np.random.default_rng(seed).integers(1, longest + 1, count)


samples = st.builds(
    drawn_lengths,
    st.integers(0, 80),
    st.integers(0, 2**16),
    st.sampled_from([1, 2, 30, 120, 1000]),  # with 1000, most are oversize
)


def order_of(tokens, seed=0):
    """Numbers of the samples of an epoch, in an order; some samples are excluded."""
    return np.random.default_rng(seed).permutation(2 * len(tokens))[: len(tokens)]


def steps_of(plan, world_size):
    """The samples of each rank in each step."""
    steps = range(len(plan))
    return [[plan.group(step, rank).tolist() for rank in range(world_size)] for step in steps]


def planned(tokens, budget, world_size=1, **options):
    """The samples of each rank in each step, by the places of their lengths."""
    places = np.arange(len(tokens))
    plan = plan_known(places, np.array(tokens, np.int64), budget, world_size=world_size, **options)
    return steps_of(plan, world_size)


def lengths_of(group, tokens):
    return [int(tokens[place]) for place in group]


# --- what always holds ----------------------------------------------------------------------------


@given(samples, budgets, world_sizes, st.fixed_dictionaries(options))
def test_each_sample_is_in_one_group_within_the_budget(tokens, budget, world_size, options):
    rows = order_of(tokens)
    plan = plan_known(rows, tokens, budget, world_size=world_size, **options)
    steps = steps_of(plan, world_size)
    assert sorted(row for step in steps for group in step for row in group) == sorted(rows.tolist())
    assert all(all(step) for step in steps[:-1])  # All ranks have a group, but in the last step.
    if steps:
        has_group = [bool(group) for group in steps[-1]]
        assert has_group[0] and has_group == sorted(has_group, reverse=True)
    length = dict(zip(rows.tolist(), tokens.tolist(), strict=True))
    place = {row: index for index, row in enumerate(rows.tolist())}
    for group in [group for step in steps for group in step if len(group) > 1]:
        lengths = [length[row] for row in group]
        assert group == sorted(group, key=place.__getitem__)  # in the order of the epoch
        assert budget.cost(lengths) <= budget.tokens
        assert not any(map(budget.is_oversize, lengths))  # Those are alone.
        assert budget.max_samples is None or len(group) <= budget.max_samples
        if world_size == 1 and budget.layout == "padded" and budget.shapes is None:
            assert len(group) in ROWS[budget.row_sizes]


@given(samples, budgets, world_sizes, st.fixed_dictionaries(options), st.data())
@few
def test_numbers_from_gives_the_rest_of_an_epoch(tokens, budget, world_size, options, data):
    numbers = order_of(tokens)
    plan = plan_known(numbers, tokens, budget, world_size=world_size, **options)
    step, rank = data.draw(st.integers(0, len(plan))), data.draw(st.integers(0, world_size - 1))
    rest = [number for later in steps_of(plan, world_size)[step:] for number in later[rank]]
    assert plan.numbers_from(step, rank).tolist() == rest


@given(samples, budgets, world_sizes, st.integers(0, 2**63))
@few
def test_a_seed_shuffles_steps_and_changes_what_is_in_groups_no_more(tokens, budget, ranks, seed):
    """Over ranks, groups of like costs may share other steps."""
    steps, others = (
        planned(tokens, budget, ranks, seed=step_seed) for step_seed in (seed, seed + 1)
    )
    assert sorted(sum(steps, [])) == sorted(sum(others, []))
    if ranks == 1:
        assert sorted(map(str, steps)) == sorted(map(str, others))


@given(samples, budgets, world_sizes, st.fixed_dictionaries(options), st.integers(1, 40))
@few
def test_a_window_holds_the_samples_that_come_first(tokens, budget, ranks, options, window):
    size = window * ranks
    groups = sum(planned(tokens, budget, ranks, **{**options, "window": window}), [])
    windows = [{place // size for place in group} for group in groups if group]
    assert all(len(of_group) == 1 for of_group in windows)
    assert [*map(min, windows)] == sorted(map(min, windows))


@pytest.mark.parametrize(("ranks", "window"), [(1, 34), (2, 17), (3, 12)])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_very_long_epoch_is_planned_in_windows_of_equal_size(layout, ranks, window, monkeypatch):
    tokens, budget = drawn_lengths(100, 0, 30), TokenBudget(60, layout=layout)
    whole = planned(tokens, budget, ranks)
    monkeypatch.setattr(known_lengths, "SAMPLES_TOGETHER", 40)
    in_windows = planned(tokens, budget, ranks)
    assert in_windows == planned(tokens, budget, ranks, window=window) != whole
    assert sorted(place for step in in_windows for group in step for place in group) == [
        *range(100)
    ]
    monkeypatch.setattr(known_lengths, "SAMPLES_TOGETHER", 100)
    assert planned(tokens, budget, ranks) == whole


@given(samples.filter(len), budgets, world_sizes, st.fixed_dictionaries(options))
@few
def test_the_longest_samples_come_first_where_that_is_asked_for(tokens, budget, ranks, options):
    window, first = options["window"], options["largest_first"]
    if not first:
        return
    steps = planned(tokens, budget, ranks, **options)
    whole = [step for step in steps if all(step)]
    longest = [max(max(lengths_of(group, tokens)) for group in step) for step in whole]
    in_window = len(whole)
    if window is not None:
        in_window = sum(max(step[0]) < window * ranks for step in whole)
    assert longest[:first][:in_window] == sorted(longest[:in_window], reverse=True)[:first]


def test_a_plan_has_its_groups_by_step_and_rank():
    groups = [np.array(group) for group in ([5, 1], [2], [3], [0, 4, 6], [7])]
    plan = EpochPlan(groups, 2)
    assert len(plan) == 3
    assert steps_of(plan, 2) == [[[5, 1], [2]], [[3], [0, 4, 6]], [[7], []]]
    assert plan.numbers_from(1, 1).tolist() == [0, 4, 6]


# --- golden plans ---------------------------------------------------------------------------------

SEVEN = [9, 3, 8, 4, 2, 10, 5]


def test_padded_groups_are_runs_of_the_order_of_length():
    (steps,) = zip(*planned(SEVEN, TokenBudget(20)), strict=True)
    assert sorted(steps) == [[0, 5], [1, 3, 4], [2, 6]]


def test_packed_rows_take_samples_in_their_order_and_are_filled_from_those_that_wait(monkeypatch):
    monkeypatch.setattr(known_lengths, "RESERVE", 3)
    # The reserve holds 9, 3, 8. A row begins with 9, goes on with 4, 2 (15), and 3 fits best.
    # Then 8, 10 wait, and 5 is taken in: all that is left is partitioned.
    rows = planned(SEVEN, TokenBudget(18, layout="packed"))
    assert sorted(sum(rows, [])) == [[0, 1, 3, 4], [2, 5], [6]]


def test_a_row_of_most_samples_is_not_filled_further(monkeypatch):
    monkeypatch.setattr(known_lengths, "RESERVE", 2)
    rows = planned([1] * 9, TokenBudget(18, layout="packed", max_samples=2))
    assert sorted(map(len, sum(rows, []))) == [1, 2, 2, 2, 2]
    rows = planned([1] * 9, TokenBudget(18, layout="packed", max_samples=1))
    assert sorted(map(len, sum(rows, []))) == [1] * 9


def test_an_oversize_sample_has_a_packed_row_alone(monkeypatch):
    monkeypatch.setattr(known_lengths, "RESERVE", 2)
    rows = sum(planned([30, 2, 40, 3, 50, 4, 5], TokenBudget(18, layout="packed")), [])
    assert [0] in rows and [2] in rows and [4] in rows
    assert sorted(sum(rows, [])) == [*range(7)]


def test_a_reserve_gives_the_oldest_or_the_sample_that_fits_best():
    reserve = known_lengths._Reserve([5, 9, 5, 2, 9])
    for place in range(5):
        reserve.add(place)
    assert reserve.take_fitting(1) is None
    assert [reserve.take_fitting(8), reserve.take_fitting(8)] == [2, 0]  # of equal ones, the newest
    assert reserve.take_oldest() == 1  # 0 is gone
    assert sorted(reserve.places()) == [3, 4]
    assert (reserve.take_fitting(9), reserve.take_oldest(), len(reserve)) == (4, 3, 0)


# --- over ranks -----------------------------------------------------------------------------------


def costs_of(steps, tokens, budget):
    """What each rank's group of a step costs, (steps, ranks); 0 where it has none."""
    return np.array(
        [
            [budget.cost(lengths_of(group, tokens)) if group else 0 for group in step]
            for step in steps
        ]
    )


def some_lengths(count, cv=1.0, seed=0):
    sigma = np.sqrt(np.log(1 + cv**2))
    draws = np.random.default_rng(seed).lognormal(np.log(800) - sigma**2 / 2, sigma, count)
    return np.clip(draws, 16, 8192).astype(np.int64)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("world_size", [2, 8])
def test_groups_of_a_step_cost_the_same_but_those_that_are_levelled(layout, world_size):
    tokens, budget = some_lengths(4_000), TokenBudget(16_384, layout=layout)
    costs = costs_of(planned(tokens, budget, world_size, seed=3), tokens, budget)
    apart, part = costs.max(axis=1) - costs.min(axis=1), budget.tokens // 256
    # Where a level ends, a step holds its last groups and the first of the next.
    lowest_levels = {int(level) for level in costs.min(axis=1) // part}
    assert (apart <= part).sum() >= len(costs) - len(lowest_levels)
    assert np.mean(apart < budget.tokens / 64) > 0.8
    assert np.mean(apart < budget.tokens / 8) >= 1 - 1.5 / len(costs)


@pytest.mark.parametrize("count", range(8, 60, 3))
def test_the_number_of_groups_is_a_multiple_of_that_of_ranks(count):
    tokens = some_lengths(count)
    for world_size in (2, 3, 8):
        steps = planned(tokens, TokenBudget(16_384), world_size)
        assert all(all(step) for step in steps)


def test_the_last_step_has_fewer_groups_only_where_there_are_no_more_samples():
    assert planned([5, 5, 5], TokenBudget(16), 4) == [[[2], [1], [0], []]]
    (step,) = planned([5, 5, 5], TokenBudget(16), 2)
    assert sorted(map(len, step)) == [1, 2]


# --- how good they are ----------------------------------------------------------------------------

MANY = some_lengths(20_000)


def quality(tokens, budget, world_size, **options):
    """The share of padding, and that of the work of all ranks of the time of the largest."""
    steps = planned(tokens, budget, world_size, **options)
    costs = costs_of(steps, tokens, budget)
    return 1 - tokens.sum() / costs.sum(), tokens.sum() / world_size / costs.max(axis=1).sum()


@pytest.mark.parametrize("world_size", [1, 8])
def test_hardly_anything_is_padding_where_all_lengths_are_known(world_size):
    padding, efficiency = quality(MANY, TokenBudget(16_384), world_size)
    assert padding <= 0.003
    assert efficiency >= 0.99


@pytest.mark.parametrize("world_size", [1, 8])
def test_packed_rows_are_full_where_all_lengths_are_known(world_size):
    budget = TokenBudget(16_384, layout="packed")
    steps = planned(MANY[:8_000], budget, world_size)
    costs = costs_of(steps, MANY[:8_000], budget)
    assert MANY[:8_000].sum() / costs.size / budget.tokens >= 0.99  # the fewest rows
    assert MANY[:8_000].sum() / costs.max(axis=1).sum() / world_size >= 0.995
