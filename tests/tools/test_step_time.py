import json

import numpy as np
import pytest
from step_logs import TRUE, write_log

from odb_nodes.tools.step_time import StepTime


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
    lines = [{"kind": "attempt", "step": 0, "resumed_at": 0, "every": 2, "version": 1}]
    lines[0] |= {"world_size": 2, "time_s": 0.0}
    for number in range(40):
        widths = rng.choice([8, 32, 128, 512], 2, replace=False)
        shapes = {f"{rng.integers(1, 4096 // width)}x{width}": 1 for width in widths}
        pairs = [(int(one.split("x")[0]), int(one.split("x")[1])) for one in shapes]
        took = sum(
            TRUE.constant_s + TRUE.token_s * n * w + TRUE.square_s * n * w * w for n, w in pairs
        )
        waited = rng.uniform(0, 0.5)
        sums = {"seconds": took + waited, "rank_seconds": 2 * (took + waited)}
        sums |= {"data_wait_s": 2 * waited}
        record = {"kind": "steps", "first_step": 2 * number + 1, "step": 2 * number + 2}
        groups = {"mean": {}, "sum": sums, "peak": {}, "last": {}}
        lines.append({**record, **groups, "shapes": shapes})
    (tmp_path / "monitor.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = StepTime.fitted(tmp_path)
    assert terms(found) == pytest.approx(terms(TRUE), rel=1e-6)
    assert found.origin == f"fitted to 80 steps of {tmp_path.name}"


def test_a_log_without_steps_is_an_error(tmp_path):
    path = tmp_path / "steps.jsonl"
    write_log(path, 7)
    with pytest.raises(ValueError, match="at least 8 lines .* but has 7"):
        StepTime.fitted(path)
    with pytest.raises(FileNotFoundError):
        StepTime.fitted(tmp_path / "nowhere.jsonl")
