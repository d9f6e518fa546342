"""`MemoryModel`: predictions for real steps, budgets, and errors."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from small_lm import make_batch, make_training

from odb_nodes import StateError, TokenBudget
from odb_nodes.testing import SavedTensorMeter
from odb_nodes.training.memory import MemoryModel
from odb_nodes.training.memory.meter import GIB

EIGHT_SHAPES = [(1, 16), (8, 16), (64, 16), (1, 64), (12, 64), (1, 192), (4, 192), (2, 128)]


def model_of(points):
    model = MemoryModel()
    for point in points:
        model.add(*point)
    return model


def synthetic(rows, width, patches=0, a=10**7, b=40_000, c=80, d=25_000):
    return a + b * rows * width + c * rows * width**2 + d * patches


def synthetic_model(shapes=EIGHT_SHAPES, factor_of=lambda rows: 1, **terms):
    points = [(n, w, 0, int(synthetic(n, w, **terms) * factor_of(n))) for n, w in shapes]
    return model_of(points)


@pytest.mark.slow
def test_from_8_points_it_predicts_other_shapes_of_a_real_model():
    training = make_training()

    def peak(rows, width):
        with SavedTensorMeter(GIB) as meter:
            training.train_step(make_batch(rows, width))
        return meter.peak_bytes()

    model, draw = model_of([(n, w, 0, peak(n, w)) for n, w in EIGHT_SHAPES]), random.Random(0)
    widths = [draw.randint(8, 256) for _ in range(50)]
    shapes = [(draw.randint(1, max(4096 // width, 1)), width) for width in widths]
    errors = [peak(*shape) / model.predict(*shape) - 1 for shape in shapes]
    assert sum(abs(error) <= 0.03 for error in errors) >= 47
    assert max(errors) <= model.fit().margin


@given(
    st.tuples(*[st.integers(0, 10**limit) for limit in (10, 5, 3, 6)]),
    st.integers(0, 2**32 - 1),
)
def test_exact_terms_are_recovered(terms, seed):
    a, b, c, d = terms
    terms, draw = {"a": a + 10**6, "b": b + 1, "c": c, "d": d}, random.Random(seed)
    shapes = [(draw.randint(1, 64), draw.randint(8, 512), draw.randint(0, 300)) for _ in range(12)]
    model = model_of([(*shape, synthetic(*shape, **terms)) for shape in shapes])
    for shape in [(3, 100, 0), (40, 300, 0), (1, 512, 200)]:
        assert model.predict(*shape) == pytest.approx(synthetic(*shape, **terms), rel=3e-3)


def test_the_margin_grows_with_the_scatter_of_the_points_and_is_a_guess_without():
    draw = np.random.default_rng(0)

    def margin(scale):
        factor_of = lambda _: 1 + scale * draw.standard_normal()  # noqa: E731
        return synthetic_model(EIGHT_SHAPES * 2, factor_of).fit().margin

    assert 0 < margin(0.001) < 0.02 < margin(0.03) < 0.5
    assert synthetic_model(EIGHT_SHAPES[:2]).fit().margin == 0.05


# --- budgets --------------------------------------------------------------------------------------


def test_the_largest_batches_just_fit():
    limit = 20 * GIB
    budget = synthetic_model().budget(limit, threshold=0.8, pad_to_multiple_of=8, max_samples=10**6)
    assert (budget.pad_to_multiple_of, budget.max_samples) == (8, 10**6)
    assert budget.attention_tokens == pytest.approx(40_000 / 80, rel=0.01)
    for width in (16, 48, 192, 1000, budget.capacity):
        rows = budget.tokens // budget.row_cost(width)
        assert synthetic(rows, width) <= 0.8 * limit
        if rows > 100:
            assert synthetic(rows, width) > 0.7 * limit


def test_the_margin_is_kept_free():
    model = synthetic_model(factor_of=lambda rows: 1 + rows % 3 / 50)
    budget = model.budget(20 * GIB, threshold=1.0)
    most = 20 * GIB / (1 + model.fit().margin)
    assert 0.95 * most < model.predict(budget.tokens // budget.row_cost(100), 100) <= most
    assert model.budget(20 * GIB, threshold=1.0, margin=0.0).tokens > 1.02 * budget.tokens


def test_a_budget_counts_only_what_takes_memory():
    budget = synthetic_model(c=0).budget(20 * GIB)
    assert budget == TokenBudget(budget.tokens)
    model = model_of([(n, w, n, synthetic(n, w)) for n, w in EIGHT_SHAPES])
    assert model.budget(20 * GIB) == synthetic_model().budget(20 * GIB)


def test_patches_get_the_share_that_they_had():
    points = [(n, w, n * 64) for n, w in EIGHT_SHAPES]
    model = model_of([(*point, synthetic(*point, c=0)) for point in points])
    budget = model.budget(20 * GIB, threshold=1.0)
    largest = synthetic(1, budget.tokens, budget.max_patches, c=0)
    assert 0.97 * 20 * GIB < largest <= 20 * GIB
    shares = [25_000 * p / (25_000 * p + 40_000 * n * w) for n, w, p in points]
    room_bytes = 20 * GIB - 10**7
    assert budget.max_patches * 25_000 == pytest.approx(np.mean(shares) * room_bytes, rel=0.01)


MODEL = synthetic_model()
NO_GROWTH = model_of([(n, w, 0, 10**9) for n, w in EIGHT_SHAPES])


test_what_cannot_be_is_an_error = refuses(
    [
        (MODEL, 10**7, {}, "a step without a single token .* 10,0"),
        (MODEL, 0, {}, "`limit_bytes` must be in 1"),
        (MODEL, GIB, {"threshold": 0}, "`threshold` must be in .0, 1.,"),
        (MODEL, GIB, {"threshold": "1"}, "`threshold` must be"),
        (MODEL, GIB, {"threshold": 10**400}, "`threshold` must be in .0, 1., but is 10"),
        (MODEL, GIB, {"margin": -0.1}, "`margin` must be .*, but is -0.1"),
        (MODEL, GIB, {"max_rows": 1}, "`max_rows` must not"),
        (MODEL, GIB, {"tokens": 5}, "`tokens` must not"),
        (MODEL, GIB, {"attention_tokens": 5}, "`attention_tokens` must not"),
        (NO_GROWTH, GIB, {}, "do not show how memory grows"),
    ],
    lambda model, limit_bytes, options: model.budget(limit_bytes, **options),
    error=(TypeError, ValueError),
)


def test_a_table_has_the_budget_of_each_card():
    budgets = [MODEL.budget(int(gib * GIB), threshold=0.8) for gib in (16, 141)]
    rows = [budget.tokens // budget.row_cost(192) for budget in budgets]
    assert MODEL.table([0.01, 16, 141], threshold=0.8).splitlines() == [
        "| card, GiB |    tokens | attention_tokens | rows of 192 |",
        "| --------: | --------: | ---------------: | ----------: |",
        "|      0.01 |         0 |                0 |           0 |",
        f"|        16 |   {budgets[0].tokens:,} |              500 |       {rows[0]:,} |",
        f"|       141 | {budgets[1].tokens:,} |              500 |      {rows[1]:,} |",
    ]
    assert [line.split()[1] for line in MODEL.table().splitlines()[2:]] == [
        *("16", "24", "40", "48", "80", "141")
    ]
    assert "attention_tokens" not in synthetic_model(c=0).table()
    for model, message in ((NO_GROWTH, "how memory grows"), (MemoryModel(), "2 points")):
        with pytest.raises(ValueError, match=message):
            model.table()
    for cards in ([], 0, [16, "24"]):
        with pytest.raises(ValueError, match=r"`cards_gib` must be numbers of GiB above 0"):
            MODEL.table(cards)
    assert MODEL.table(16) == MODEL.table([16]) == MODEL.table(np.int64(16))


def test_a_plan_takes_as_few_batches_as_memory_allows():
    budget, accumulate = MODEL.plan(20 * GIB, tokens_per_step=40_000, world_size=4)
    assert (budget.tokens, accumulate) == (10_000, 1)
    largest = MODEL.budget(20 * GIB).tokens
    budget, accumulate = MODEL.plan(20 * GIB, tokens_per_step=10 * largest, world_size=4)
    assert accumulate == 3
    assert 10 * largest <= budget.tokens * 4 * 3 < 10 * largest + 12
    with pytest.raises(ValueError, match="`tokens_per_step` must be in 4"):
        MODEL.plan(20 * GIB, tokens_per_step=3, world_size=4)


# --- its JSON -------------------------------------------------------------------------------------


def test_json_restores_a_model():
    for model in (MODEL, model_of([(1, 16, 3, 10**6)])):
        assert MemoryModel.from_json(model.to_json()).to_json() == model.to_json()
    assert MemoryModel.from_json(MODEL.to_json()).fit() == MODEL.fit()


def test_a_shape_has_its_newest_peak():
    model = model_of([(1, 10, 0, 900), (2, 10, 0, 200), (1, 10, 0, 100)])
    assert model.predict(1, 10) == 100 and model.fit().points == 2
    model.add(1, 10, 0, 120)
    assert model.predict(1, 10) == 120


BAD_POINTS = [[[1, 2, 3]], [[0, 2, 3, 4]], [[1, 2, 3, 4.5]], [5], {"a": 1}, None]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "{}", '{"version": 1}', '{"version": 2, "points": []}'),
        '{"version": 1, "points": [], "colour": "red"}',
        *(json.dumps({"version": 1, "points": points}) for points in BAD_POINTS),
    ],
)
def test_text_that_is_no_model_is_refused(text):
    with pytest.raises(StateError, match="no memory model of version 1"):
        MemoryModel.from_json(text)


test_points_are_checked = refuses(
    [
        (lambda: model_of([(1, 16, 0, 10**6)]).fit(), "2 points or more, but has 1"),
        (lambda: MemoryModel().predict(1, 1), "but has 0"),
        (lambda: MemoryModel().add(0, 1, 0, 1), "`rows`"),
        (lambda: MemoryModel().add(1, 0, 0, 1), "`width`"),
        (lambda: MemoryModel().add(1, 1, -1, 1), "`patches`"),
        (lambda: MemoryModel().add(1, 1, 0, 0), "`peak_bytes`"),
        (lambda: MemoryModel().add(1, 1, 0, 1.5), "`peak_bytes`"),
    ],
    error=(TypeError, ValueError),
)
