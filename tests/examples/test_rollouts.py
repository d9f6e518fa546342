"""Rollouts whose trainer and generators are killed at random moments: each prompt once."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "rollouts.py"


def test_each_prompt_is_trained_once_over_kills_and_long_ones_as_often_as_short_ones(tmp_path):
    command = [sys.executable, SCRIPT, "--kills", 2, "--prompts", 240, "--output", tmp_path]
    result = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ledger: OK" in result.stdout
    assert re.search(r"epoch 0: complete; \d+ steps; 240 trained", result.stdout)
    line = re.search(r"^killed 2 trainers and 2 generators; .*", result.stdout, re.M)[0]
    asked, trained, stale = re.findall(r"(\d+) prompts of (\S+) tokens", line)
    assert asked == trained == ("240", "32.5667") and stale[0] == "0"
