"""Packed rows that are filled for a time: full, within every limit, and near the target."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pools import LIMITS, lognormal, run, streams, table_of

from odb_nodes import TokenBudget
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.aimed_packing import LEAST_ROWS, flat_targets, profile_of
from odb_nodes.core.planning.caps import costs_of, joined_costs, times_of
from odb_nodes.core.planning.packing import Packing
from odb_nodes.core.planning.table import ORDINALS, PATCHES, TOKENS

few = settings(max_examples=max(20, settings.default.max_examples // 5))

LIMITS = LIMITS | {"layout": st.just("packed")}
packed = st.one_of(
    st.builds(TokenBudget, st.integers(16, 200), **LIMITS),
    st.builds(TokenBudget, st.integers(300, 900), attention_tokens=st.integers(1, 200), **LIMITS),
)
step_times = st.builds(
    StepTime,
    squares=st.sampled_from([0.0, 0.001, 1 / 40, 1.0]),
    patches=st.sampled_from([0.0, 0.5, 20.0]),
).filter(lambda times: not times.is_of_tokens)


def cap_of(target, budget):
    return joined_costs(target, budget.tokens)


def aimed(samples, budget, step_time, target, *, is_due=False):
    """The numbers of the samples of a row."""
    table = table_of(samples)
    due = int(table[ORDINALS].argmin()) if is_due else None
    columns = Packing(budget, step_time).aimed(table, cap_of(target, budget), due)
    return table[ORDINALS, columns].tolist()


@given(streams.filter(len), packed, step_times, st.integers(0, 4_000), st.booleans())
@example([(300, 0, 0)] * 3, TokenBudget(100, layout="packed"), StepTime(squares=1), 0, False)
@example(
    [(1, 2, 0)],
    TokenBudget(16, max_patches=1, layout="packed"),
    StepTime(squares=0.001),
    1584,
    False,
)
@few
def test_a_row_is_within_every_limit_and_holds_the_sample_that_is_due(
    samples, budget, step_time, target, is_due
):
    row = aimed(samples, budget, step_time, target, is_due=is_due)
    assert len({*row}) == len(row) >= 1
    assert 0 in row or not is_due
    tokens, patches, _ = zip(*(samples[number] for number in row), strict=True)
    if len(row) > 1:  # an oversize sample is alone
        assert budget.cost(tokens) <= budget.tokens
        assert sum(patches) <= (budget.max_patches or sum(patches))
        assert len(row) <= (budget.max_samples or len(row))
    assert aimed(samples, budget, step_time, target, is_due=is_due) == row


BUDGET = TokenBudget(16_384, layout="packed")
SHARES = {"a fifth": 1 / 6_000, "half": 1 / 1_600, "most": 1 / 400}


def misses(lengths, window, step_time, budget=BUDGET, patches=None):
    """How full each row is, and how far its extra is from its cap, as a share of its time."""
    targets, extra = [], step_time.extra(np.array(lengths), np.array(patches or [0] * len(lengths)))

    def caps_of(pool):
        caps = pool.offer(8)[1:][::-1]
        targets.extend(times_of(caps)[::-1].tolist())
        return caps

    groups, _ = run(lengths, budget, window, patches, step_time=step_time, caps_of=caps_of)
    aimed = [group for group in groups if max(group) < len(lengths) - window][: len(targets)]
    fills = [sum(lengths[index] for index in group) / budget.tokens for group in aimed]
    times = [
        abs(extra[group].sum() - target) / (budget.tokens + target)
        for group, target in zip(aimed, targets, strict=False)
    ]
    return np.array(fills), np.array(times)


@pytest.mark.parametrize("share", SHARES)
def test_rows_are_full_and_take_as_long_as_they_should(share):
    fills, missed = misses(lognormal(1_600, cv=1.0, seed=2), 400, StepTime(squares=SHARES[share]))
    assert len(fills) > 40
    assert fills.mean() > 0.995
    assert missed.mean() < 0.02
    assert np.quantile(missed, 0.9) < 0.05


def test_the_target_decides_which_samples_a_row_has():
    samples = [(length, 0) for length in lognormal(600, cv=1.0, seed=5)]
    step_time = StepTime(squares=1 / 800)
    extras = []
    for target in (10_000, 20_000, 40_000):
        row = aimed(samples, BUDGET, step_time, target)
        tokens = np.array([samples[number][0] for number in row])
        assert tokens.sum() > 0.98 * BUDGET.tokens
        extras.append(int(step_time.extra(tokens, 0 * tokens).sum()))
    assert extras == pytest.approx([10_000, 20_000, 40_000], rel=0.05)


def test_a_pool_that_has_nothing_that_fits_gives_its_oldest_sample():
    """What is oversize takes far longer than any target."""
    budget = TokenBudget(100, layout="packed")
    assert aimed([(300, 0), (200, 0)], budget, StepTime(squares=1), 0) == [0]


# --- what is offered ------------------------------------------------------------------------------


def test_targets_share_out_the_extra_of_a_pool_evenly():
    costs, extra = np.full(20, 50), np.full(20, 30)
    assert flat_targets(costs, extra, 100, 5).tolist() == [60] * 5
    assert flat_targets(costs, extra, 100, 3).tolist() == [60] * 3


def test_the_largest_samples_have_targets_of_their_own():
    costs = np.array([90, *[10] * 91])  # 10 rows of 100
    extra = np.array([1_000, *[1] * 91])
    first, *others = flat_targets(costs, extra, 100, 10).tolist()
    assert first == 1_001
    assert {*others} == {10}


def test_a_pool_of_few_rows_has_no_targets():
    rows = LEAST_ROWS * 2
    assert len(flat_targets(np.full(rows, 50), np.full(rows, 30), 100, 5)) == 5
    assert not len(flat_targets(np.full(rows - 1, 50), np.full(rows - 1, 30), 100, 5))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=90), step_times, st.integers(1, 9))
@few
def test_targets_descend_and_have_the_extra_of_the_pool(lengths, step_time, count):
    costs = np.sort(np.array(lengths))
    extra = step_time.extra(costs, costs // 4)
    targets = flat_targets(costs, extra, 60, count)
    assert len(targets) in (0, count)
    assert (np.diff(targets) <= 0).all() and (targets >= 0).all()
    rows = int(costs.sum()) // 60
    if len(targets):
        every = flat_targets(costs, extra, 60, rows)
        assert every.sum() >= 0.9 * extra.sum() - rows or every.max() >= extra.max() - 1


def test_targets_are_at_most_what_a_cap_holds():
    costs = np.full(20, 50)
    targets = flat_targets(costs, np.full(20, 2**31 - 1), 100, 5)
    assert targets.tolist() == [2**31 - 1] * 5


def test_an_offer_is_of_targets_under_the_budget_and_none_of_tokens_alone():
    budget = TokenBudget(100, layout="packed")
    table = table_of([(50, 0)] * 20)
    offer = Packing(budget, StepTime(squares=0.01)).offer(table, 3)
    assert offer[0] == 100
    assert times_of(offer[1:]).tolist() == [50] * 3 and costs_of(offer[1:]).tolist() == [100] * 3
    assert not len(Packing(budget).offer(table, 3))
    assert not len(Packing(budget, StepTime(squares=0.01)).offer(table[:, :0], 3))
    assert not len(Packing(budget, StepTime(squares=0.01)).offer(table[:, :7], 3))


def test_the_least_time_of_a_row_with_a_sample_is_its_own_and_that_of_light_ones():
    budget, step_time = TokenBudget(100, layout="packed"), StepTime(squares=0.1)
    table = table_of([(10, 0)] * 9 + [(40, 0)])
    assert profile_of(table[TOKENS], step_time.extra(table[TOKENS], table[PATCHES])).heavy == 10
    packing = Packing(budget, step_time)
    assert packing.least_cap_time(table, 9) == 160 + 60
    assert packing.least_cap_time(table, 0) == 10 + 90
    assert packing.least_cap_time(table_of([(10, 0)] * 9 + [(200, 0)]), 9) == 4_000  # oversize
