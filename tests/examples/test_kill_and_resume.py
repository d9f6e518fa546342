"""Each training example as a reader runs it: uninterrupted; killed in mid-epoch; and resumed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from rank_jobs import free_port
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVE_EVERY, KILL_AFTER = 6, 2, 3
LOSS = re.compile(r"\bloss\b\W+([\d.]+)")
PRETRAIN, SFT, VLM, SEQ2SEQ = (
    f"recipes/{name}/train" for name in ("pretrain_parquet", "sft_chat", "vlm_folders", "seq2seq")
)
RANKS = (PRETRAIN, "train_fsdp")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

LAST_CHECKPOINT = {
    "train_packed": "checkpoints/*-step-6-*/rank00000-of-00001.pt",
    VLM: "checkpoints/*-step-6-*/rank00000-of-00001.pt",
    "train_tasks": "checkpoints/*-step-6-*/rank00000-of-00001.pt",
    "mix_sources": "checkpoints/*-step-6-*/rank00000-of-00001.pt",
    SFT: "checkpoint-6/adapter_model.safetensors",
    SEQ2SEQ: "checkpoint-6/model.safetensors",
    "train_accelerate": "step-6/model.safetensors",
    "train_lightning": "checkpoints/last.ckpt",
    PRETRAIN: "checkpoints/*-step-6-*/rank00000-of-00002.pt",
    "train_fsdp": "step-6",
}


def start(script, folder, *options, launcher=None):
    """Start an example in a new process, or in a process for each rank."""
    launcher = launcher or (TORCHRUN if script in RANKS else ())
    flags = ["--steps", STEPS, "--save-every", SAVE_EVERY, "--output", folder, *options]
    return subprocess.Popen(
        [*map(str, (sys.executable, *launcher, EXAMPLES / f"{script}.py", *flags))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )


def run(script, folder, *options):
    """Run an example to its end, and return the losses it prints, and what it prints after them."""
    process = start(script, folder, *options)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return LOSS.findall(output), LOSS.split(output)[-1]


def kill_in_mid_epoch(script, folder, *options, after=KILL_AFTER):
    """Kill the process of an example, or of all its ranks, some steps after a checkpoint."""
    process = start(script, folder, *options)
    steps = (line for line in process.stdout if LOSS.search(line))
    assert sum(1 for _ in zip(range(after), steps, strict=False)) == after
    launched = psutil.Process(process.pid)
    ranks = launched.children() if script in RANKS else [launched]
    workers = [worker for rank in ranks for worker in rank.children(recursive=True)]
    for rank in ranks:
        rank.kill()
    process.communicate()
    assert process.returncode != 0
    _, outlived = psutil.wait_procs(workers, timeout=30)
    assert (workers or script == SFT) and not outlived  # TRL has tokenized before


def weights(path):
    """Return the model's tensors in a checkpoint, by name."""
    if path.is_dir():
        dcp_to_torch_save(path, path / "whole.pt")
        path = path / "whole.pt"
    if path.suffix == ".safetensors":
        return load_file(path)
    state = torch.load(path, weights_only=False)
    if path.suffix == ".ckpt":
        return state["state_dict"]
    return state.get("parts", state)["model"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a machine that is shared takes its time
@pytest.mark.parametrize("script", LAST_CHECKPOINT)
def test_a_killed_run_goes_on_as_if_it_had_not_been(script, tmp_path):
    losses, end = run(script, tmp_path / "whole")
    kill_in_mid_epoch(script, tmp_path / "killed")
    flags = () if script.startswith("recipes/") else ("--resume",)  # recipes always resume
    resumed_losses, resumed_end = run(script, tmp_path / "killed", *flags)

    assert len(losses) == STEPS
    assert 0 < len(resumed_losses) <= STEPS - SAVE_EVERY
    assert resumed_losses == losses[-len(resumed_losses) :]
    if script in (VLM, "mix_sources"):  # skipped samples, and the counts by source
        assert resumed_end == end
    expected, actual = (
        weights(*(tmp_path / folder).glob(LAST_CHECKPOINT[script]))
        for folder in ("whole", "killed")
    )
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def start_nodes(folder):
    """Start torchrun of two nodes with two ranks each."""
    whole = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2")
    address = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    return [
        start(PRETRAIN, folder, launcher=(*whole, "--node-rank", rank, *address))
        for rank in range(2)
    ]


def finish_nodes(folder):
    """Run two nodes to the end of the run."""
    nodes = start_nodes(folder)
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return LOSS.findall(outputs[0])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_lost_node_ends_the_job_which_two_nodes_or_one_continue(tmp_path, exhaustive):
    nodes = start_nodes(tmp_path / "killed")
    steps = (line for line in nodes[0].stdout if LOSS.search(line))
    losses = [LOSS.search(line)[1] for _, line in zip(range(KILL_AFTER), steps, strict=False)]
    assert len(losses) == KILL_AFTER
    lost = [*psutil.Process(nodes[1].pid).children(recursive=True), nodes[1]]
    for process in lost:
        process.kill()
    output, _ = nodes[0].communicate(timeout=120)
    losses += LOSS.findall(output)
    assert nodes[0].returncode != 0 and len(losses) < STEPS
    nodes[1].communicate()

    shutil.copytree(tmp_path / "killed", tmp_path / "one")
    resumed = finish_nodes(tmp_path / "killed")
    first_step = STEPS - len(resumed)
    assert SAVE_EVERY <= first_step < STEPS
    assert losses[first_step:] == resumed[: len(losses) - first_step]
    if exhaustive:
        with_one, _ = run(PRETRAIN, tmp_path / "one")
        assert len(with_one) == len(resumed)
