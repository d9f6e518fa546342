"""The times of the steps of a run are recovered from its log."""

import json

import numpy as np
import pytest
from step_logs import TRUE, write_log, write_records

from odb_nodes.training.monitor import fitted_step_time


def terms(step_time):
    return [step_time.base, step_time.tokens, step_time.squares]


def test_the_step_times_of_a_run_are_recovered(tmp_path):
    write_log(tmp_path / "steps.jsonl", 200)
    fitted, origin = fitted_step_time(tmp_path / "steps.jsonl")
    assert terms(fitted) == pytest.approx(terms(TRUE), rel=1e-6)
    assert origin == "fitted to 200 steps of steps.jsonl"
    write_log(tmp_path / "noisy.jsonl", 2_000, noise=0.05)
    noisy, _ = fitted_step_time(tmp_path / "noisy.jsonl")
    assert terms(noisy) == pytest.approx(terms(TRUE), rel=0.1)


def test_slow_steps_and_other_lines_are_left_out_and_packed_rows_say_their_squares(tmp_path):
    path = tmp_path / "steps.jsonl"
    slow = {**write_log(path, 100)[0], "step_s": 60.0}
    lines = [json.dumps(slow), "{}", "cut", '{"rows": 0, "width": 3, "step_s": 1}', "3"]
    rng = np.random.default_rng(0)
    tokens, samples = rng.integers(100, 9000, 40), rng.integers(1, 20, 40)
    times = TRUE.seconds_of(tokens, tokens**2 / samples)
    lines += [
        json.dumps({"rows": 1, "width": int(width), "squares": width**2 / count, "step_s": time})
        for width, count, time in zip(tokens, samples, times, strict=True)
    ]
    path.write_text("\n".join([*lines, path.read_text()]))
    assert terms(fitted_step_time(path)[0]) == pytest.approx(terms(TRUE), rel=1e-6)


def test_a_token_takes_some_time_where_the_log_shows_none(tmp_path):
    lines = [{"rows": 1, "width": 100 * n, "step_s": 0.5} for n in range(1, 21)]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, lines)))
    fitted, _ = fitted_step_time(tmp_path / "steps.jsonl")
    assert fitted.base == pytest.approx(0.5)
    assert 0 < fitted.tokens * 1_050 < 0.001


def test_the_records_of_a_monitor_are_a_log(tmp_path):
    rng = np.random.default_rng(0)
    widths, waits = rng.choice([8, 32, 128, 512], (80, 2)), rng.uniform(0, 0.5, 80)
    tokens = rng.integers(1, 4096 // widths) * widths
    write_records(
        tmp_path,
        TRUE.seconds_of(tokens, tokens * widths).max(axis=1) + waits,
        tokens,
        tokens * widths,
        every=2,
        waits=waits,
    )
    fitted, origin = fitted_step_time(tmp_path)
    assert terms(fitted) == pytest.approx(terms(TRUE), rel=1e-4)  # waits are whole microseconds
    assert origin == f"fitted to 80 steps of {tmp_path.name}"


def test_a_log_without_steps_is_an_error(tmp_path):
    path = tmp_path / "steps.jsonl"
    write_log(path, 7)
    with pytest.raises(ValueError, match="at least 8 lines .* but has 7"):
        fitted_step_time(path)
    with pytest.raises(FileNotFoundError):
        fitted_step_time(tmp_path / "nowhere.jsonl")
