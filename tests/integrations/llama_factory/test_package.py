"""LLaMA-Factory itself, in a separate environment that `--exhaustive` builds."""

import json
import os
import re
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PACKAGE = "llamafactory==0.9.5"
NEEDED = (  # the newest that it allows, of what its training imports
    "accelerate==1.11.0",
    "datasets==4.0.0",
    "omegaconf==2.4.0",
    "peft==0.18.1",
    "transformers==5.6.0",
    "trl==0.24.0",
)


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


def build(folder):
    """Make an environment with LLaMA-Factory above the packages of this one."""
    run(sys.executable, "-m", "venv", str(folder))
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "base.pth").write_text("\n".join(site.getsitepackages()))
    # It is imported for audio alone, and no build of it fits a torch for CPUs.
    (packages / "torchaudio.py").write_text("")
    constraint = folder / "constraint.txt"
    constraint.write_text(f"torch=={torch.__version__}")
    install = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
    run(*install, "-c", str(constraint), *NEEDED)
    run(*install, "--no-deps", PACKAGE)


@pytest.fixture(scope="module")
def python(request, exhaustive, tmp_path_factory):
    """The interpreter of the environment, which is kept for the next time."""
    if not exhaustive:
        pytest.skip("installs LLaMA-Factory, which takes a minute and 200 MB: use --exhaustive")
    kept = request.config.cache.mkdir("llama_factory") / f"{PACKAGE}-torch{torch.__version__}"
    if not kept.exists():
        built = kept.with_name(f"{kept.name}-{os.getpid()}")
        build(built)
        try:
            built.rename(kept)
        except OSError:  # Another process was faster.
            kept = built
    return str(kept / "bin" / "python")


@pytest.fixture(scope="module")
def environ():
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def folder(python, environ, tmp_path_factory):
    """Where the runs have written, their results among it."""
    folder = tmp_path_factory.mktemp("runs")
    run(python, str(HERE / "llama_factory_jobs.py"), str(folder), env=environ)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    ("name", "budget"), [("padded", 256), ("packed", 252), ("adapter", 256), ("texts", 256)]
)
def test_every_sample_comes_once_per_epoch_within_the_budget(results, name, budget):
    result = results[name]
    assert len(result["documents"]) == len({*result["documents"]}) == 60
    assert result["epoch"] == 1
    assert all(rows * width <= budget for rows, width in result["shapes"])
    assert all(rows == 1 for rows, _ in result["shapes"]) == (name == "packed")


def test_a_stream_brings_every_sample_before_one_comes_again(results):
    documents = results["streamed"]["documents"]
    assert len({*documents[:60]}) == 60 < len(documents)
    assert results["streamed"]["steps"] == 4


@pytest.mark.parametrize("name", ["padded", "packed", "adapter", "streamed", "texts"])
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(results, folder, name):
    (file,) = (folder / name).glob("*model.safetensors")
    for step in results[name]["resumed"]:
        assert (folder / f"{name}-{step}" / file.name).read_bytes() == file.read_bytes(), step


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_it_evaluates_at_the_end(results, name):
    assert len(results[name]["eval_loss"]) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown", r"ValueError: `odb` .* `ODBConfig` alone, but has \['windw'\]"),
        ("no mapping", "TypeError: `odb` must be a `Mapping` or None, but is 5"),
        ("ray", "ValueError: `USE_RAY` must not be set"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(results, folder, name, message):
    assert re.match(message, results["errors"][name])
    assert not (folder / "never").exists()


def test_a_version_that_makes_its_trainer_elsewhere_is_an_error(results):
    assert "Training would have fixed batches. This is another" in results["another version"]


def test_it_is_a_command_also_on_two_ranks(python, environ, folder):
    file, output = folder / "run.yaml", folder / "command"
    file.write_text((folder / "arguments.json").read_text())  # JSON is YAML, too
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (python, *ranks, "-m", "odb_nodes.integrations.llama_factory", str(file))
    run(*command, f"output_dir={output}", "ddp_backend=gloo", "odb.token_budget=128", env=environ)
    state = json.loads((output / "trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "odb/samples_per_step" in entry]
    assert state["epoch"] == 1 and len(logs) == state["global_step"]
    assert sum(entry["odb/samples_per_step"] for entry in logs) == 60
