"""Plans of samples whose lengths are known, against loaders of real and of in-process ranks."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import run_ranks

from odb_nodes import ODBDataLoader, SampleError, TokenBudget, pop_step_info
from odb_nodes.planning import plan_epoch

BUDGETS = [
    64,
    TokenBudget(96, max_samples=4),
    TokenBudget(80, layout="packed"),
    TokenBudget(80, attention_tokens=30),
]
LENGTHS = np.random.default_rng(0).integers(1, 41, 900).tolist()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=80),
    budget=st.sampled_from(BUDGETS),
    world_size=st.integers(1, 5),
    window=st.integers(1, 90),
)
def test_each_sample_is_planned_once_within_the_budget(lengths, budget, **job):
    steps = plan_epoch(lengths, budget, **job)
    groups = [group for step in steps for group in step]
    assert sorted(itertools.chain(*groups)) == [*range(len(lengths))]
    assert {len(step) for step in steps} == {job["world_size"]}
    budget = TokenBudget.of(budget)
    for group in filter(None, groups):
        tokens = [lengths[index] for index in group]
        assert len(group) == 1 or budget.cost(tokens) <= budget.tokens
        assert len(group) <= (budget.max_samples or len(group))


def steps_of_rank(loader):
    """The indices of each step of a rank; none where it fills."""
    infos = [pop_step_info(batch) for batch in loader]
    return [[] if info.is_filler else [*info.keys] for info in infos]


def test_a_plan_of_one_rank_is_that_of_its_loader():
    loader = ODBDataLoader(
        LENGTHS,
        token_budget=128,
        window=64,
        shuffle=False,
        process_fn=lambda tokens: {"input_ids": [1] * tokens},
    )
    assert plan_epoch(LENGTHS, 128, window=64) == [[step] for step in steps_of_rank(loader)]


def spread(steps, costs):
    """How much the largest of a step costs, relative to the mean: 1 where ranks are even."""
    sums = np.array([[costs[group].sum() for group in step] for step in steps])
    return (sums.max(axis=1) / sums.mean(axis=1)).mean()


def test_the_groups_of_a_step_are_matched_by_costs():
    lengths = np.array(LENGTHS)
    costs = lengths**2  # What attention takes, whatever the budget is of.
    job = {"world_size": 4, "window": 128}
    by_costs = plan_epoch(lengths, 128, costs=costs, **job)
    assert spread(by_costs, costs) < spread(plan_epoch(lengths, 128, **job), costs) - 0.05


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"lengths": []}, ValueError, "lengths.*\\[\\]"),
        ({"lengths": [3, 0]}, ValueError, "lengths.*at least 1"),
        ({"lengths": [[3]]}, ValueError, "lengths.*one row"),
        ({"costs": [1]}, ValueError, "costs.*2 integers.*\\[1\\]"),
        ({"costs": [1, -1]}, ValueError, "costs.*at least 0"),
        ({"costs": [1, 1.5]}, ValueError, "costs.*integers"),
        ({"world_size": 0}, ValueError, "world_size.*0"),
        ({"window": 0}, ValueError, "window.*0"),
        ({"uneven": "no"}, ValueError, "uneven.*no"),
        ({"budget": TokenBudget(4, oversize="error")}, SampleError, "5 tokens"),
    ],
)
def test_refusals(arguments, error, words):
    with pytest.raises(error, match=words):
        plan_epoch(**{"lengths": [3, 5], "budget": 8, **arguments})


REAL_STEPS = """
import sys
lengths, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
options["process_fn"] = lambda tokens: {"input_ids": [1] * tokens}
loader = r.ODBDataLoader(lengths, shuffle=False, **options)
infos = [r.pop_step_info(batch) for batch in loader]
print(json.dumps([[] if info.is_filler else [*info.keys] for info in infos]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"window": 64, "accumulate": 3}, {"window": "auto"}])
def test_a_plan_is_what_real_ranks_train_on(tmp_path, options):
    options |= {"round_size": 8, "seed": 3}
    arguments = json.dumps(LENGTHS), json.dumps({"token_budget": 128, **options})
    ranks = run_ranks(tmp_path, REAL_STEPS, 4, *arguments)
    assert plan_epoch(LENGTHS, 128, world_size=4, **options) == [
        list(step) for step in zip(*ranks, strict=True)
    ]
