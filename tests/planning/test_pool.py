from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import budgets, lognormal, long_budgets, run

from odb_nodes.planning import MAX_AGE_WINDOWS, RollingPool, TokenBudget
from odb_nodes.planning.attention import with_attention


@given(
    lengths=st.lists(st.integers(1, 120), max_size=200),
    budget=budgets | long_budgets,
    window=st.integers(1, 50),
    data=st.data(),
)
def test_every_sample_comes_out_once_within_the_budget_and_before_its_age(
    lengths, budget, window, data
):
    patches = data.draw(st.lists(st.integers(0, 50), min_size=len(lengths), max_size=len(lengths)))
    groups, age = run(lengths, budget, window, patches)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert age <= MAX_AGE_WINDOWS * window
    for group in groups:
        assert group == sorted(group)
        if len(group) == 1:
            continue  # an oversize sample is alone
        packed, multiple = budget.layout == "packed", budget.pad_to_multiple_of
        real = sum(lengths[i] for i in group)
        width = -(-(real if packed else max(lengths[i] for i in group)) // multiple) * multiple
        assert width * (1 if packed else len(group)) <= budget.tokens
        assert not any(budget.is_oversize(lengths[i], patches[i]) for i in group)
        assert budget.cost([lengths[i] for i in group]) <= budget.tokens
        if budget.shapes is not None:
            rows, wide = budget.shape([lengths[i] for i in group])
            assert (rows, wide) in budget.shape_ladder()
            assert rows >= (1 if packed else len(group)) and wide >= width
        assert budget.max_samples is None or len(group) <= budget.max_samples
        assert budget.max_patches is None or sum(patches[i] for i in group) <= budget.max_patches


@given(
    lengths=st.lists(st.integers(1, 120), max_size=200),
    budget=budgets,
    window=st.integers(1, 50),
)
def test_attention_that_costs_nothing_changes_no_group(lengths, budget, window):
    if budget.layout == "packed":
        budget = replace(budget, pad_to_multiple_of=1)
    cheap = replace(budget, attention_tokens=2**31 - 1)
    assert run(lengths, cheap, window) == run(lengths, budget, window)


def test_the_run_is_chosen_whose_samples_are_most_of_its_cost():
    # With attention, 2 of 30 cost 2 * (30 + 90) = 240, and so do 6 of 15 but one; 3 of 16, less.
    budget = TokenBudget(240, attention_tokens=10)
    assert run([30, 15, 15, 30, 15, 15, 15, 15], budget, 8)[0] == [[0, 3], [1, 2, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("attention_tokens", "layout", "steps"),
    [
        (None, "padded", 2085),
        (32_768, "padded", 1748),
        (8192, "padded", 1249),
        (2048, "padded", 765),
        (2048, "packed", 690),
    ],
)
def test_groups_fill_a_budget_with_attention_as_well_as_one_of_tokens(
    attention_tokens, layout, steps
):
    longest = with_attention(8192, attention_tokens)
    budget = TokenBudget(2 * longest, attention_tokens=attention_tokens, layout=layout)
    lengths = lognormal(40_000)
    groups, _ = run(lengths, budget, 1024)
    costs = [budget.cost([lengths[i] for i in group]) for group in groups]
    assert len(groups) == steps
    assert max(costs) <= budget.tokens and np.mean(costs) >= 0.95 * budget.tokens


def test_a_stream_that_starves_one_length_still_serves_it_in_time():
    # A few long samples among streams of others that always make a better group.
    lengths = [100 if i % 97 == 0 else 10 + 30 * (i // 64 % 2) for i in range(4000)]
    groups, age = run(lengths, 400, 64)
    assert age <= MAX_AGE_WINDOWS * 64
    assert sum(map(len, groups)) == 4000


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), tokens=st.integers(30, 99))
def test_what_is_left_at_the_end_goes_out_in_the_fewest_groups(lengths, tokens):
    pool = RollingPool(TokenBudget(tokens), len(lengths))
    pool.add(lengths, lengths, [0] * len(lengths), range(len(lengths)))
    pool.pulled = len(lengths)
    groups = []
    while len(pool):
        groups.append(pool.take(draining=True))
    left, fewest = sorted(lengths), 0
    while left:
        left, fewest = left[: max(0, len(left) - tokens // left[-1])], fewest + 1
    assert len(groups) == fewest


def test_the_tail_goes_out_in_order_of_the_oldest_not_of_length():
    lengths = [5, 90, 5, 50, 5, 90]
    assert run(lengths, 100, 64)[0] == [[0, 2], [1], [3, 4], [5]]


@pytest.mark.parametrize(
    ("window", "real_to_padded", "fill"), [(1024, 0.975, 0.93), (256, 0.93, 0.88)]
)
def test_groups_are_full_and_hardly_padded(window, real_to_padded, fill):
    lengths = lognormal(30_000)
    groups, age = run(lengths, 16384, window)
    padded = [len(group) * max(lengths[i] for i in group) for group in groups]
    assert sum(lengths) / sum(padded) >= real_to_padded
    assert np.mean(padded) / 16384 >= fill
    assert max(padded) <= 16384
    assert age <= MAX_AGE_WINDOWS * window


def test_the_rule_has_not_changed():
    """Golden: another grouping of the same data would break every saved state."""
    groups, _ = run(lognormal(120, seed=7), 4096, 32)
    assert groups[:6] == GOLDEN
    assert len(groups) == GOLDEN_COUNT


GOLDEN = [
    [0, 6, 12, 14, 28, 29],
    [34, 37],
    [1, 11, 23, 24, 36],
    [7, 44],
    [3, 4, 8, 9, 17, 27, 31, 33, 35, 38],
    [49],
]
GOLDEN_COUNT = 24


@pytest.mark.parametrize("layout", ["padded", "packed", "even", "friendly"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_patches": 10}, {"max_samples": 3}, {"shapes": 4}, {"attention_tokens": 30}],
)
def test_the_tail_of_a_restored_pool_is_that_of_the_pool(layout, options):
    field = "layout" if layout in ("padded", "packed") else "row_sizes"
    rng, budget = np.random.default_rng(0), TokenBudget(500, **{field: layout}, **options)
    for _ in range(50):
        lengths, patches = rng.integers(1, 120, 20), rng.integers(0, 10, 20)

        def filled(ordinals, lengths=lengths, patches=patches):
            pool = RollingPool(budget, 20)
            pool.add(ordinals, lengths[ordinals], patches[ordinals], ordinals)
            pool.pulled = 20
            return pool

        pool = filled(list(range(20)))
        pool.take()
        while len(pool):
            restored = filled(list(pool.items()))
            assert pool.take(draining=True) == restored.take(draining=True)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_empty_pool_has_no_group(layout):
    with pytest.raises(IndexError, match="empty"):
        RollingPool(TokenBudget(8, layout=layout), 4).take()


def test_bounded_shapes_cost_little_padding():
    lengths, free = lognormal(30_000), TokenBudget(16384)
    ladder = TokenBudget(16384, shapes=60)
    padded = [
        sum(budget.cost([lengths[i] for i in group]) for group in run(lengths, budget, 256)[0])
        for budget in (free, ladder)
    ]
    assert len(ladder.shape_ladder()) <= 60
    assert padded[1] / padded[0] <= 1.06


@pytest.mark.parametrize(
    ("tokens", "shapes", "longest", "most"),
    [(512, 8, 60, 1.3), (4096, 8, 2048, 1.3), (4096, 4, 2048, 1.8)],
)
def test_few_shapes_cost_few_batches_however_short_the_samples_are(tokens, shapes, longest, most):
    lengths = np.random.default_rng(0).integers(1, longest + 1, 500).tolist()
    free, few = (
        len(run(lengths, TokenBudget(tokens, shapes=at_most), 256)[0]) for at_most in (None, shapes)
    )
    assert few / free <= most


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_what_is_removed_comes_out_no_more_also_of_the_tail(layout):
    lengths = [3 + n * 7 % 23 for n in range(40)]
    pool = RollingPool(TokenBudget(64, layout=layout), 64)
    pool.add([*range(40)], lengths, [0] * 40, [*range(40)])
    out = pool.take(draining=True)
    gone = [one for one in range(40) if one not in out][:-3]  # whole groups of the tail
    assert pool.remove(gone) == gone
    while len(pool):
        group = pool.take(draining=True)
        assert group
        out += group
    assert sorted([*out, *gone]) == [*range(40)]
