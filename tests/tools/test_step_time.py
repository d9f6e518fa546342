import json
from dataclasses import replace

import numpy as np
import pytest
from step_logs import TRUE, write_log, write_records

from odb_nodes import TokenBudget
from odb_nodes.planning import SimulationOptions
from odb_nodes.tools.length_table import LengthTable
from odb_nodes.tools.simulate import lognormal_lengths
from odb_nodes.tools.step_time import StepTime
from odb_nodes.tools.table_epoch import TableEpoch
from odb_nodes.tools.tuning import Choice, Simulator, _measure

BUDGET = 16_384


def terms(one):
    return [one.constant_s, one.token_s, one.square_s]


def test_the_time_of_batches_by_hand():
    time = StepTime(constant_s=1.0, token_s=0.5, square_s=0.25)
    padded, squares = np.array([[6.0, 0.0]]), np.array([[18.0, 0.0]])
    assert time.seconds(padded, squares).tolist() == [[1 + 3 + 4.5, 0.0]]


def test_the_times_of_a_run_are_found_again(tmp_path):
    write_log(tmp_path / "steps.jsonl", 200)
    found = StepTime.fitted(tmp_path / "steps.jsonl")
    assert terms(found) == pytest.approx(terms(TRUE), rel=1e-6)
    assert found.origin == "fitted to 200 steps of steps.jsonl"
    write_log(tmp_path / "noisy.jsonl", 2_000, noise=0.05)
    assert terms(StepTime.fitted(tmp_path / "noisy.jsonl")) == pytest.approx(terms(TRUE), rel=0.1)


def test_steps_that_took_far_longer_and_other_lines_are_left_out(tmp_path):
    path = tmp_path / "steps.jsonl"
    records = write_log(path, 100)
    slow = {**records[0], "step_s": 60.0}
    others = [json.dumps(slow), "{}", "cut", '{"rows": 0, "width": 3, "step_s": 1}', "3"]
    path.write_text("\n".join([*others, path.read_text()]))
    assert terms(StepTime.fitted(path)) == pytest.approx(terms(TRUE), rel=1e-6)


def test_the_records_of_a_monitor_are_a_log(tmp_path):
    rng = np.random.default_rng(0)
    widths, waits = rng.choice([8, 32, 128, 512], (80, 2)), rng.uniform(0, 0.5, 80)
    tokens = rng.integers(1, 4096 // widths) * widths
    write_records(
        tmp_path,
        TRUE.seconds(tokens, tokens * widths).max(axis=1) + waits,
        tokens,
        tokens * widths,
        every=2,
        waits=waits,
    )
    found = StepTime.fitted(tmp_path)
    assert terms(found) == pytest.approx(terms(TRUE), rel=1e-4)  # waits are whole microseconds
    assert found.origin == f"fitted to 80 steps of {tmp_path.name}"


def test_a_log_may_say_the_squares_of_packed_rows(tmp_path):
    rng = np.random.default_rng(0)
    tokens, samples = rng.integers(100, 9000, 40), rng.integers(1, 20, 40)
    times = TRUE.seconds(tokens, tokens**2 / samples)
    lines = [
        {"rows": 1, "width": int(width), "squares": float(width**2 / count), "step_s": float(time)}
        for width, count, time in zip(tokens, samples, times, strict=True)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert terms(StepTime.fitted(tmp_path / "steps.jsonl")) == pytest.approx(terms(TRUE), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "window", "every"), [(1, "padded", 1024, 1), (8, "packed", 128, 10)]
)
def test_a_run_under_one_budget_tells_the_times_under_smaller_ones(
    tmp_path, ranks, layout, window, every
):
    """Its batches are all full, so that a step's constant cannot be seen, and times are noisy."""
    job = SimulationOptions(world_size=ranks, budget=BUDGET, window=window)
    lengths = lognormal_lengths(24_000, cv=1.0)
    budget = TokenBudget(BUDGET, layout=layout)
    steps = [*TableEpoch(table=LengthTable.of(lengths)).steps(replace(job, budget=budget))]
    _, _, tokens, squares = _measure(steps, budget)
    seconds = TRUE.seconds(tokens, squares).max(axis=1)
    seconds *= np.random.default_rng(0).normal(1, 0.02, len(steps))
    write_records(tmp_path, seconds, tokens, squares, every=every)
    fitted = StepTime.fitted(tmp_path)
    assert "too much alike" in fitted.origin
    epoch = TableEpoch(table=LengthTable.of(lengths[:8_000]))
    for smaller in (BUDGET, BUDGET // 2, BUDGET // 4):
        choice = Choice(
            budget=TokenBudget(smaller, layout=layout), window=window, accumulate=1, round_size=32
        )
        found, expected = (
            Simulator(epoch=epoch, job=job, step_time=one)(choice).epoch_s for one in (fitted, TRUE)
        )
        assert found == pytest.approx(expected, rel=0.15)


def test_a_log_without_steps_is_an_error(tmp_path):
    path = tmp_path / "steps.jsonl"
    write_log(path, 7)
    with pytest.raises(ValueError, match="at least 8 lines .* but has 7"):
        StepTime.fitted(path)
    with pytest.raises(FileNotFoundError):
        StepTime.fitted(tmp_path / "nowhere.jsonl")
