"""A short soak: the faults of a seed, in their order, and each sample once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "examples" / "soak.py"
SEED, FAULTS = 18, ["worker killed", "rank killed", "full disk", "short stop", "quiet"]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_each_sample_is_trained_once_over_the_faults_of_a_seed(tmp_path):
    options = {"minutes": 0.25, "seed": SEED, "samples": 1500, "timeout-s": 5, "step-ms": 20}
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    result = subprocess.run(
        [*map(str, (sys.executable, SOAK, *flags, "--output", tmp_path / "soak"))],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    faults = re.findall(r"step \d+: (.+), place", result.stdout)
    assert len(faults) >= 2  # at least one in each of two runs
    assert faults[: len(FAULTS)] == FAULTS[: len(faults)]
    assert result.stdout.count("samples, each once") == 2
