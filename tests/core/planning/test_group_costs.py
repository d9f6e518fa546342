"""Costs of groups, as other ranks are told them, and the sample that a rank fills with."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_nodes import Sample, SampleError, TokenBudget
from odb_nodes.core.planning.group_costs import (
    MOST_MODALITIES,
    GroupCostEstimator,
    best_filler,
    cost_of_group,
    counted_in,
    samples_of,
    time_of_group,
)
from odb_nodes.core.planning.rounds import FLAG_BITS, GroupCost
from odb_nodes.core.planning.step_time import StepTime
from odb_nodes.core.sample import COUNTED
from odb_nodes.core.sample_block import SampleBlock

few = settings(max_examples=max(20, settings.default.max_examples // 5))


def block(*samples):
    return SampleBlock.of([*samples])


def estimator(budget=None, step_time=None, modalities=None, tasks=()):
    return GroupCostEstimator(budget, step_time, modalities, tasks)


def test_a_group_cost_has_samples_targets_and_cost():
    group = block(Sample(None, 5, 4), Sample(None, 9, 0), Sample(None, 2, 1))
    assert estimator()(group) == GroupCost(samples=3, targets=5, cost=27)


def test_a_group_costs_under_a_budget_what_its_batch_costs():
    group = block(Sample(None, 5, 4), Sample(None, 9, 0))
    for budget in (TokenBudget(64), TokenBudget(64, layout="packed", attention_tokens=4)):
        assert cost_of_group(group, budget) == budget.cost([5, 9])
        assert estimator(budget)(group).cost == budget.cost([5, 9])
    assert cost_of_group(group, None) == 18


def test_no_group_costs_more_than_a_cost_may_be():
    group = block(Sample(None, 2**20, 1))
    assert cost_of_group(group, TokenBudget(64, attention_tokens=1)) == 2**31 - 1


def test_times_are_those_of_a_step_time_in_the_layout_of_the_budget():
    group = block(Sample(None, 5, 4), Sample(None, 9, 0, patches=7))
    by_time = StepTime(squares=1, patches=2)
    packed = TokenBudget(64, layout="packed")
    assert estimator(TokenBudget(64), by_time)(group).time == 18 + 2 * 81 + 14
    assert estimator(None, by_time)(group).time == 18 + 2 * 81 + 14  # as padded
    assert estimator(packed, by_time)(group).time == 14 + 25 + 81 + 14
    assert estimator(TokenBudget(64))(group).time is None
    assert estimator()(group).time is None


def test_a_function_of_the_user_gets_the_samples_of_the_group():
    group = block(Sample("a", 5, 4), Sample("b", 9, 0))

    def time(samples):
        assert [sample.data for sample in samples] == ["a", "b"]
        return 70

    cost = estimator(TokenBudget(64, layout="packed"), time)(group)
    assert (cost.cost, cost.time) == (14, 70)


def test_a_group_without_a_time_is_ordered_by_its_cost():
    assert GroupCost(1, 1, 30).costs == GroupCost(1, 1, 30, time=30).costs
    assert GroupCost(1, 1, 30).costs < GroupCost(1, 1, 30, time=31).costs
    assert GroupCost(1, 1, 99, time=0).costs == 99


def test_a_planned_group_is_measured_by_its_samples_rows_and_lengths_alone():
    seen = []

    def time(samples):
        seen.extend(
            (sample.data, sample.tokens, sample.targets, sample.patches) for sample in samples
        )
        return 5

    rows, tokens = np.array([7, 3]), np.array([10, 20])
    arguments = (
        time,
        tokens,
        np.array([0, 0]),
        None,
        lambda: samples_of(rows, tokens, tokens - 1, 4),
    )
    assert time_of_group(*arguments) == 5
    assert seen == [(7, 10, 9, 4), (3, 20, 19, 4)]
    assert time_of_group(None, *arguments[1:]) is None
    assert [sample.targets for sample in samples_of(rows, tokens)] == [0, 0]


def test_the_fingerprint_has_all_that_decides_times():
    def name(*arguments):
        return estimator(*arguments).fingerprint()["step_time"]

    padded, packed = TokenBudget(64), TokenBudget(64, layout="packed")
    assert name(padded) == name(TokenBudget(99, max_samples=3)) == name(None) == "None"
    assert name(packed) == "None" != name(padded, StepTime())
    close = StepTime(squares=0.5), StepTime(squares=0.5 + 1e-9)  # Plans differ by less.
    assert name(padded, close[0]) != name(padded, close[1])
    assert name(padded, StepTime(squares=0.5)) != name(padded, StepTime(squares=0.5, base=3))


def test_without_modalities_a_group_has_images_where_a_sample_has_patches():
    measure = estimator()
    text, image = Sample(None, 5, 4), Sample(None, 5, 4, patches=3)
    assert measure.modalities_in(measure(block(text, text)).flags) == ()
    assert measure.modalities_in(measure(block(text, image)).flags) == ("image",)


names = [f"m{number}" for number in range(MOST_MODALITIES)]


@given(st.sets(st.sampled_from(names)), st.sets(st.sampled_from(COUNTED)))
@few
def test_the_flags_of_groups_name_their_modalities_and_what_they_count(modalities, counted):
    functions = {name: lambda sample, name=name: name in sample.data for name in names}
    measure = estimator(modalities=functions)
    sizes = [(name,) for name in modalities] or [()]
    kinds = [*counted] or [""]
    samples = [Sample(data, 2, 1, counted=kind) for data in sizes for kind in kinds]
    flags = measure(block(*samples)).flags
    assert 0 <= flags < 2**FLAG_BITS
    assert {*measure.modalities_in(flags)} == modalities
    assert counted_in(flags) == "+".join(kind for kind in COUNTED if kind in counted)
    # The flags of a step are those of its groups, joined by "or".
    alone = [measure(block(sample)).flags for sample in samples]
    assert np.bitwise_or.reduce(alone) == flags


def test_targets_are_counted_by_task_in_the_order_of_the_tasks():
    measure = estimator(tasks=["chat", "code", "math"])
    samples = [
        Sample(None, 9, 3, task="code"),
        Sample(None, 9, 4, source="chat"),  # whose source is its task
        Sample(None, 9, 5, source="chat", task="code"),
    ]
    assert measure(block(*samples)).tasks == (4, 8, 0)
    assert estimator()(block(*samples)).tasks == ()


def test_a_task_that_is_none_of_those_named_is_an_error_that_names_the_sample():
    measure = estimator(tasks=["chat"])
    with pytest.raises(SampleError, match=r"source 'x', key 7.* is 'code', which is none of"):
        measure(block(Sample(None, 9, 3, source="x", key=7, task="code")))


def test_more_modalities_than_flags_are_refused():
    functions = dict.fromkeys(map(str, range(MOST_MODALITIES)), bool)
    estimator(modalities=functions)
    with pytest.raises(ValueError, match=f"`modalities` must be at most {MOST_MODALITIES}"):
        estimator(modalities={**functions, "more": bool})


@pytest.mark.parametrize(
    ("time", "error"),
    [
        (-1, ValueError),
        (2**31, ValueError),
        (2.5, TypeError),
        (float("nan"), TypeError),
        ("9", TypeError),
        (None, TypeError),
    ],
)
def test_a_time_that_is_no_integer_of_31_bits_is_refused(time, error):
    def seconds(group):
        return time

    group = block(Sample(None, 5, 4), Sample(None, 9, 4))
    with pytest.raises(
        error, match=r"`step_time` must return an integer in 0\.\.2147483647"
    ) as raised:
        estimator(None, seconds)(group)
    expected = f"the function `seconds` returned {time!r} for a group of 2 samples and 14 tokens"
    assert expected in str(raised.value)
    assert "the longest sample has 9" in str(raised.value)
    assert estimator(None, lambda group: 0)(group).time == 0


def test_the_best_filler_has_targets_then_few_patches_then_few_tokens():
    by_rank = [
        Sample("targets, short", 3, 1),
        Sample("targets", 9, 5),
        Sample("targets, patches", 2, 1, patches=4),
        Sample("none, short", 1, 0),
        Sample("none", 2, 0),
    ]
    for count in range(1, len(by_rank) + 1):
        best = by_rank[-count]
        for order in permutations(by_rank[-count:]):
            assert order[best_filler(block(*order))] is best


def test_of_equally_good_fillers_the_first_is_taken():
    twins = [Sample(number, 3, 1) for number in range(3)]
    assert best_filler(block(Sample("long", 4, 1), *twins)) == 1
