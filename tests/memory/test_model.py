"""`MemoryModel`: what it predicts of real steps, what it learns, and what it refuses."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_lm import make_batch, make_training

from odb_nodes import StateError, TokenBudget
from odb_nodes.memory import MemoryModel
from odb_nodes.memory.points import MAX_POINTS
from odb_nodes.testing import SavedTensorMeter

GIB = 2**30
EIGHT_SHAPES = [(1, 16), (8, 16), (64, 16), (1, 64), (12, 64), (1, 192), (4, 192), (2, 128)]


def model_of(points, fitted=True):
    model = MemoryModel()
    for rows, width, patches, peak_bytes in points:
        model.add(rows, width, patches, peak_bytes)
    if fitted:
        model.fit()
    return model


def synthetic(rows, width, patches=0, a=10**7, b=40_000, c=80, d=25_000, floor=0):
    return max(floor, a + b * rows * width + c * rows * width**2 + d * patches)


def synthetic_model(shapes=EIGHT_SHAPES, **terms):
    return model_of([(n, w, 0, synthetic(n, w, **terms)) for n, w in shapes])


def peak_of_a_step(training, rows, width):
    with SavedTensorMeter(GIB) as meter:
        training.train_step(make_batch(rows, width))
    return meter.peak_bytes()


@pytest.mark.slow
def test_from_8_points_it_predicts_100_other_shapes_of_a_real_model():
    training = make_training()
    model = model_of([(n, w, 0, peak_of_a_step(training, n, w)) for n, w in EIGHT_SHAPES])
    shapes = random.Random(0)
    errors = []
    for _ in range(100):
        width = shapes.randint(8, 256)
        rows = shapes.randint(1, max(4096 // width, 1))
        errors.append(peak_of_a_step(training, rows, width) / model.predict(rows, width) - 1)
    assert sum(abs(error) <= 0.03 for error in errors) >= 95
    assert max(errors) <= model.accuracy().margin


@given(
    st.tuples(*[st.integers(0, 10**limit) for limit in (10, 5, 3, 6)]),
    st.integers(0, 2**32 - 1),
)
def test_terms_that_are_exact_are_found_again(terms, seed):
    a, b, c, d = terms
    draw = random.Random(seed)
    shapes = [(draw.randint(1, 64), draw.randint(8, 512), draw.randint(0, 300)) for _ in range(12)]
    model = model_of([(*one, synthetic(*one, a=a + 10**6, b=b + 1, c=c, d=d)) for one in shapes])
    for rows, width, patches in [(3, 100, 0), (40, 300, 0), (1, 512, 200)]:
        true = synthetic(rows, width, patches, a=a + 10**6, b=b + 1, c=c, d=d)
        assert model.predict(rows, width, patches) == pytest.approx(true, rel=3e-3)


def test_terms_are_never_negative():
    draw = np.random.default_rng(0)
    for _ in range(20):
        noisy = [(n, w, 0, int(10**8 * draw.uniform(0.5, 2))) for n, w in EIGHT_SHAPES]
        fit = model_of(noisy).fit()
        assert min(fit.constant_bytes, fit.token_bytes, fit.square_bytes, fit.patch_bytes) >= 0


@pytest.mark.parametrize("at_floor", [1, 3])
def test_points_at_the_floor_are_left_out(at_floor):
    shapes = [*EIGHT_SHAPES, (5, 100)]
    peaks = sorted(synthetic(n, w) for n, w in shapes)
    floor = (peaks[at_floor - 1] + peaks[at_floor]) // 2
    model = synthetic_model(shapes, floor=floor)
    assert model.fit().floor_bytes == floor
    for rows, width in [(1, 8), (10, 200), (300, 30)]:
        true = synthetic(rows, width, floor=floor)
        assert model.predict(rows, width) == pytest.approx(true, rel=1e-6)


def test_the_margin_grows_with_the_scatter_of_the_points():
    draw = np.random.default_rng(0)

    def with_noise(scale):
        return model_of(
            [
                (n, w, 0, int(synthetic(n, w) * (1 + scale * draw.standard_normal())))
                for n, w in EIGHT_SHAPES * 2
            ]
        )

    small, large = with_noise(0.001).fit().margin, with_noise(0.03).fit().margin
    assert 0 < small < 0.02 < large < 0.5


def test_two_points_have_no_scatter_so_the_margin_is_a_guess():
    assert synthetic_model(EIGHT_SHAPES[:2]).fit().margin == 0.05


class TestBudget:
    def test_the_largest_batches_just_fit(self):
        model = synthetic_model()
        limit = 20 * GIB
        budget = model.budget(limit, threshold=0.8)
        assert budget.attention_tokens == pytest.approx(40_000 / 80, rel=0.01)
        for width in (16, 50, 192, 1000, budget.capacity):
            rows = budget.tokens // budget.row_cost(width)
            assert synthetic(rows, width) <= 0.8 * limit
            if rows > 100:
                assert synthetic(rows, width) > 0.7 * limit

    def test_the_margin_is_kept_free(self):
        model = model_of(
            [(n, w, 0, int(synthetic(n, w) * (1 + n % 3 / 50))) for n, w in EIGHT_SHAPES]
        )
        budget = model.budget(20 * GIB, threshold=1.0)
        rows = budget.tokens // budget.row_cost(100)
        most = 20 * GIB / (1 + model.accuracy().margin)
        assert 0.95 * most < model.predict(rows, 100) <= most
        assert model.budget(20 * GIB, threshold=1.0, margin=0.0).tokens > 1.02 * budget.tokens

    def test_without_a_quadratic_part_it_counts_tokens_alone(self):
        budget = synthetic_model(c=0).budget(20 * GIB)
        assert budget == TokenBudget(budget.tokens)

    def test_patches_get_the_share_that_they_had(self):
        points = [(n, w, n * 64) for n, w in EIGHT_SHAPES]
        model = model_of([(*one, synthetic(*one, c=0)) for one in points])
        budget = model.budget(20 * GIB, threshold=1.0)
        largest = synthetic(1, budget.tokens, budget.max_patches, c=0)
        assert 0.97 * 20 * GIB < largest <= 20 * GIB
        assert budget.max_patches < model.budget(20 * GIB, patch_share=0.9).max_patches
        assert model.budget(20 * GIB, patch_share=0.0).max_patches is None

    def test_patches_that_take_no_memory_get_no_share_of_it(self):
        model = model_of([(n, w, n, synthetic(n, w)) for n, w in EIGHT_SHAPES])
        assert model.budget(20 * GIB, patch_share=0.5) == model.budget(20 * GIB)

    def test_further_fields_are_those_of_a_token_budget(self):
        budget = synthetic_model().budget(20 * GIB, pad_to_multiple_of=8, max_samples=64)
        assert (budget.pad_to_multiple_of, budget.max_samples) == (8, 64)

    @pytest.mark.parametrize(
        ("limit_bytes", "options", "message"),
        [
            (10**7, {}, "a step without a single token is predicted to take 10,0.* bytes"),
            (0, {}, "`limit_bytes` must be in 1"),
            (GIB, {"threshold": 0}, "`threshold` must be above 0 and at most 1, but is 0"),
            (GIB, {"threshold": "1"}, "`threshold` must be"),
            (GIB, {"margin": -0.1}, "`margin` must be finite and at least 0.0, but is -0.1"),
            (GIB, {"patch_share": 1.0}, "`patch_share` must be at least 0 and below 1"),
            (GIB, {"patch_share": 0.5}, "`patch_share` must be 0 or None where no point has"),
            (GIB, {"max_rows": 1}, "`max_rows` is neither an argument of `budget` nor of `Token"),
            (GIB, {"tokens": 5}, "`tokens` is what the model finds"),
            (GIB, {"attention_tokens": 5}, "`attention_tokens` is what the model finds"),
        ],
    )
    def test_what_cannot_be_is_an_error(self, limit_bytes, options, message):
        with pytest.raises((TypeError, ValueError), match=message):
            synthetic_model().budget(limit_bytes, **options)

    def test_a_floor_above_the_limit_is_an_error(self):
        model = synthetic_model(floor=3 * 10**7)
        with pytest.raises(ValueError, match="predicted to take 31,5"):
            model.budget(3 * 10**7, threshold=1.0)

    def test_points_that_show_no_growth_are_an_error(self):
        model = model_of([(n, w, 0, 10**9) for n, w in EIGHT_SHAPES])
        with pytest.raises(ValueError, match="do not show how memory grows"):
            model.budget(GIB)


class TestPlan:
    def test_a_step_that_fits_at_once_is_not_accumulated(self):
        budget, accumulate = synthetic_model().plan(20 * GIB, tokens_per_step=40_000, world_size=4)
        assert (budget.tokens, accumulate) == (10_000, 1)

    def test_a_large_step_takes_as_few_batches_as_memory_allows(self):
        model = synthetic_model()
        largest = model.budget(20 * GIB).tokens
        budget, accumulate = model.plan(20 * GIB, tokens_per_step=10 * largest, world_size=4)
        assert accumulate == 3
        assert 10 * largest <= budget.tokens * 4 * 3 < 10 * largest + 12
        assert budget.tokens <= largest

    def test_fewer_tokens_than_ranks_are_an_error(self):
        with pytest.raises(ValueError, match="`tokens_per_step` must be in 4"):
            synthetic_model().plan(20 * GIB, tokens_per_step=3, world_size=4)


class TestLearning:
    def test_it_follows_a_run_whose_memory_changes(self):
        model = synthetic_model()
        draw = random.Random(0)
        for _ in range(3000):
            rows, width = draw.randint(1, 32), draw.randint(16, 192)
            model.add(rows, width, 0, synthetic(rows, width, b=60_000))
        assert model.accuracy().steps.largest_under > 0.1
        model.fit()
        assert model.predict(20, 100) == pytest.approx(synthetic(20, 100, b=60_000), rel=0.02)

    def test_its_memory_does_not_grow_with_the_run(self):
        model = synthetic_model()
        draw = random.Random(0)
        sizes = []
        for _ in range(4):
            for _ in range(1500):
                rows, width = draw.randint(1, 999), draw.randint(1, 999)
                model.add(rows, width, 0, synthetic(rows, width), draw.choice("ab"))
            sizes.append(len(model.to_json()))
        assert model.fit().points == MAX_POINTS
        assert max(sizes) < 1.1 * min(sizes)

    def test_a_run_at_its_budget_does_not_push_out_what_was_calibrated(self):
        model = synthetic_model()
        for step in range(3000):
            width = 16 + step % 900
            model.add(4096 // width, width, 0, synthetic(4096 // width, width))
        kept = {(rows, width) for _, rows, width, *_ in json.loads(model.to_json())["points"]}
        assert len(kept) == MAX_POINTS
        assert {(1, 16), (8, 16), (1, 64), (1, 192), (2, 128)} <= kept

    def test_it_says_how_far_off_it_was(self):
        model = synthetic_model()
        assert model.accuracy().steps.steps == 0
        predicted = model.predict(10, 100)
        for factor in (1.0, 1.0, 0.9, 1.1):
            model.add(10, 100, 0, int(predicted * factor))
        steps = model.accuracy().steps
        assert steps.steps == 4
        assert steps.mean_error == pytest.approx(0.05, rel=1e-3)
        assert steps.largest_under == pytest.approx(0.1, rel=1e-3)
        assert steps.beyond_margin == 0.25

    def test_a_source_that_takes_more_has_a_factor_of_its_own(self):
        model = synthetic_model()
        for rows in range(10, 50):
            for source, factor in (("text", 1.0), ("code", 1.2)):
                model.add(rows, 100, 0, int(synthetic(rows, 100) * factor), source)
        model.fit()
        text, code = (model.predict(25, 100, source=one) for one in ("text", "code"))
        assert code / text == pytest.approx(1.2, rel=0.02)
        assert model.predict(25, 100, source="new") == model.predict(25, 100)
        assert model.accuracy().by_source["code"].mean_error > 0.1
        assert set(model.accuracy().by_source) == {"code", "text"}


class TestJson:
    def learned(self):
        model = synthetic_model()
        for rows in range(1, 9):
            model.add(rows, 77, 3, synthetic(rows, 77), "code")
        return model

    def test_it_comes_back_as_it_was(self):
        model = self.learned()
        again = MemoryModel.from_json(model.to_json())
        assert again.to_json() == model.to_json()
        assert again.predict(9, 99) == model.predict(9, 99)
        assert again.accuracy() == model.accuracy()
        assert again.fit() == model.fit()

    def test_a_model_without_a_fit_comes_back(self):
        model = model_of([(1, 16, 0, 10**6)], fitted=False)
        assert MemoryModel.from_json(model.to_json()).to_json() == model.to_json()

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data.update(version=2),
            lambda data: data.pop("version"),
            lambda data: data.update(colour="red"),
            lambda data: data.pop("points"),
            lambda data: data["points"].append([1, 2, 3]),
            lambda data: data["points"].append(["", 0, 2, 3, 4]),
            lambda data: data["points"].append(["", 1, 2, 3, 4.5]),
            lambda data: data.update(points={"a": 1}),
            lambda data: data["errors"].append(["", float("nan")]),
            lambda data: data["errors"].append([1, 0.5]),
            lambda data: data["factors"].update(a="b"),
            lambda data: data["fit"].pop("margin"),
            lambda data: data["fit"].update(colour=1),
            lambda data: data["fit"].update(margin=float("inf")),
            lambda data: data["fit"].update(token_bytes=-1.0),
        ],
    )
    def test_what_it_does_not_know_is_refused(self, change):
        data = json.loads(self.learned().to_json())
        change(data)
        with pytest.raises(StateError, match="no memory model of version 1"):
            MemoryModel.from_json(json.dumps(data))

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
    def test_no_model_at_all_is_refused(self, text):
        with pytest.raises(StateError, match="no memory model"):
            MemoryModel.from_json(text)

    def test_it_says_what_it_is_instead(self):
        with pytest.raises(StateError, match=r"it must be a JSON object, but is \[\] instead"):
            MemoryModel.from_json("[]")


def test_one_point_is_too_few():
    with pytest.raises(ValueError, match="needs 2 points or more, but there are 1"):
        model_of([(1, 16, 0, 10**6)])
    with pytest.raises(ValueError, match="but there are 0"):
        MemoryModel().predict(1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 0, 1), "`rows`"),
        ((1, 0, 0, 1), "`width`"),
        ((1, 1, -1, 1), "`patches`"),
        ((1, 1, 0, 0), "`peak_bytes`"),
        ((1, 1, 0, 1.5), "`peak_bytes`"),
        ((1, 1, 0, 1, None), "`source`"),
    ],
)
def test_points_are_checked(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MemoryModel().add(*arguments)
