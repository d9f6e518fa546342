"""`preflight`: which batches it tries, and what it says of one that does not fit."""

import pytest
from small_lm import assert_same, make_batch, make_training, snapshot

from odb_nodes import ODBDataLoader, TokenBudget
from odb_nodes.memory import ShapeTooLargeError, preflight
from odb_nodes.testing import SavedTensorMeter

MIB = 2**20
ROOM = SavedTensorMeter(900 * MIB)


def tried(budget, train_step=None, make_batch=make_batch, meter=ROOM, **options):
    train_step = make_training().train_step if train_step is None else train_step
    return preflight(train_step, make_batch, budget, meter=meter, **options)


def shapes_of(trials):
    return [(trial.rows, trial.width) for trial in trials]


@pytest.mark.parametrize(
    ("budget", "widths", "expected"),
    [
        (TokenBudget(100), None, [(1, 100), (100, 1)]),  # both are as full as can be
        (100, [64, 8, 20], [(1, 64), (2, 50), (12, 8)]),
        (TokenBudget(100), [30], [(3, 30)]),
        (TokenBudget(100), [8, 500], [(1, 500), (1, 100), (12, 8)]),  # oversize, so alone
        (TokenBudget(100, oversize="drop"), [8, 500], [(1, 100), (12, 8)]),
        (TokenBudget(100, oversize="error"), [500], [(1, 100)]),
        (TokenBudget(100, pad_to_multiple_of=8), [9, 101], [(1, 104), (6, 16)]),
        (TokenBudget(100, row_sizes="friendly"), [9, 100], [(1, 100), (2, 50), (8, 9)]),
        (TokenBudget(100, row_sizes="even"), [9, 100], [(1, 100), (10, 9)]),
        (TokenBudget(100, max_samples=6), [4, 80], [(1, 80), (2, 50), (6, 4)]),
        (TokenBudget(100, attention_tokens=50), [10, 60], [(1, 60), (1, 50), (8, 10)]),
        (TokenBudget(256, shapes=3), [9, 300], [(1, 300), (18, 14)]),
        (TokenBudget(100, layout="packed"), None, [(1, 100)]),
        (TokenBudget(100, layout="packed"), [8, 130], [(1, 130), (1, 100)]),
    ],
)
def test_it_tries_the_widest_the_fullest_and_the_most_numerous_batch(budget, widths, expected):
    trials = tried(budget, widths=widths)
    assert all(trial.fits and trial.peak_bytes > 0 for trial in trials)
    shapes, budget = shapes_of(trials), TokenBudget.of(budget)
    assert (shapes[0], shapes[-1]) == (expected[0], expected[-1])
    costs = {budget.batch_cost(shape, []) for shape in shapes}
    assert max(costs) == max(budget.batch_cost(shape, []) for shape in expected)
    assert len(shapes) <= 3


def test_the_loader_makes_no_batch_that_is_larger_than_the_tried_ones():
    budget = TokenBudget(100, row_sizes="friendly")
    lengths = [8, *[11] * 40, 170]
    shapes = shapes_of(tried(budget, widths=[min(lengths), max(lengths)]))
    samples = [{"input_ids": [1] * length} for length in lengths]
    with pytest.warns(UserWarning, match="exceeds the budget"):
        made = [batch["input_ids"].shape for batch in ODBDataLoader(samples, token_budget=budget)]
    assert max(width for _, width in made) == max(width for _, width in shapes) == 170
    assert max(rows for rows, _ in made) <= max(rows for rows, _ in shapes)


def test_every_peak_is_that_of_a_step_in_the_middle_of_a_run():
    training = make_training()
    training.train_step(make_batch(2, 10))
    before = snapshot(training)
    trials = tried(TokenBudget(120), training.train_step, widths=[12, 120])
    assert_same(before, snapshot(training))
    assert len(trials) == 2
    for trial in trials:
        with ROOM:
            ROOM.reset()
            training.train_step(make_batch(trial.rows, trial.width))
        assert trial.peak_bytes == ROOM.peak_bytes()


def test_patches_are_as_many_as_the_budget_allows():
    trials = tried(TokenBudget(100, max_patches=40), widths=[10, 100], patches_per_row=16)
    assert [(trial.rows, trial.patches) for trial in trials] == [(1, 16), (10, 40)]


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_a_batch_that_does_not_fit_is_named_and_nothing_has_changed(fails_in):
    training, meter = make_training(), SavedTensorMeter(2 * MIB, fails_in=fails_in)
    before = snapshot(training)
    with pytest.raises(ShapeTooLargeError, match="50 rows of 20 tokens does not fit") as e:
        tried(TokenBudget(1000), training.train_step, meter=meter, widths=[10, 20])
    assert "Lower `tokens` of the budget, which is 1000, call `find_budget`" in str(e.value)
    assert (e.value.rows, e.value.width, e.value.patches) == (50, 20, 0)
    assert_same(before, snapshot(training))


def test_of_one_long_row_it_says_to_leave_long_samples_out():
    with pytest.raises(ShapeTooLargeError, match="1 rows of 700 .* Leave longer samples out"):
        tried(TokenBudget(700), meter=SavedTensorMeter(2 * MIB), widths=[10, 700])


class ElsewhereMeter(SavedTensorMeter):
    def peak_bytes(self):
        return 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "`budget` must be in 1"),
        ({"budget": None}, "`budget` must be an integer"),
        ({"meter": None}, "`meter` must have"),
        ({"meter": ElsewhereMeter(MIB)}, "`meter` sees nothing of `train_step`: 3"),
        ({"widths": []}, "`widths` must have one length or more"),
        ({"widths": [0]}, "`widths` must be in 1"),
        ({"train_step": 5}, "`train_step` must be a function"),
        ({"make_batch": 5}, "`make_batch` must be a function"),
        ({"patches_per_row": -1}, "`patches_per_row` must be in 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        tried(**{"budget": TokenBudget(100), **options})
