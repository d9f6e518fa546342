"""TRL's `AsyncGRPOTrainer` over a `FeedSource`: killed and resumed, it trains each prompt once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("trl_feed_job.py")


@pytest.mark.timeout(900)
def test_each_prompt_is_trained_once_over_a_kill(tmp_path):
    def run(*arguments):
        command = [sys.executable, str(JOB), str(tmp_path), *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=400, env=env, check=False
        )
        assert done.returncode == (-signal.SIGKILL if arguments else 0), done.stderr

    run("6")
    run()
    steps = {}
    for line in Path(tmp_path, "trained").read_text().splitlines():
        step, answers, *prompts = map(int, line.split())
        assert answers == 4 * len(prompts)
        steps.setdefault(step, []).append(prompts)
    assert sorted(steps) == [*range(12)]
    # The steps after the checkpoint of step 4 were trained, killed, and trained again.
    assert {step for step, attempts in steps.items() if len(attempts) == 2} == {4, 5, 6}
    assert sorted(prompt for attempts in steps.values() for prompt in attempts[-1]) == [*range(24)]
