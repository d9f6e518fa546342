"""Train on answers that other processes sample from the policy: rollouts, as GRPO groups them.

    python examples/rollouts.py                # one epoch of prompts, half a minute on 2 cores
    python examples/rollouts.py --resume       # go on from the last checkpoint
    python examples/rollouts.py --kills 20     # kill the trainer at random moments, then audit

Two processes take prompts from a `FeedSource`, sample four answers to each, and put them. Long
answers take long. The four answers share a step, since their advantages are relative to one
another. With `--kills`, the trainer is killed with SIGKILL and started again, while the processes
that sample go on; then the ledger shows that each prompt was trained once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch

from odb_nodes import (
    Checkpoints,
    FeedClient,
    FeedSource,
    Ledger,
    ODBDataLoader,
    PackedCollate,
    ShardedSampler,
    TokenBudget,
    WorkerError,
    audit,
    pop_step_info,
)

ANSWERS, END, VOCABULARY = 4, 0, 32
MOST_TOKENS = 120
ADDRESS, AUTHKEY = ("127.0.0.1", 29417), b"rollouts of one machine"
SAVE_EVERY = 5
SECONDS_PER_TOKEN = 0.0005


def build_policy() -> torch.nn.Module:
    """Return a policy that sees only the last token."""
    torch.manual_seed(0)
    head = torch.nn.Linear(32, VOCABULARY)
    with torch.no_grad():
        head.bias[END] -= 1.0  # Answers are long at first.
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), head)


def sample_answers(policy: torch.nn.Module, prompt: int) -> list[dict[str, np.ndarray]]:
    """Return the answers to a prompt, each with its advantage: short answers are better."""
    with torch.inference_mode():
        table = policy(torch.arange(VOCABULARY)).softmax(-1).numpy().astype(np.float64)
    table /= table.sum(-1, keepdims=True)
    answers = []
    for _ in range(ANSWERS):
        tokens = [1 + prompt % (VOCABULARY - 1)]
        while tokens[-1] != END and len(tokens) < MOST_TOKENS:
            tokens.append(int(np.random.choice(VOCABULARY, p=table[tokens[-1]])))
        answers.append(np.array(tokens))
    time.sleep(SECONDS_PER_TOKEN * sum(map(len, answers)))
    rewards = np.array([-len(answer) for answer in answers], dtype=np.float32)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return [
        {
            "input_ids": answer,
            "labels": answer,
            "advantages": np.full(len(answer), advantage, np.float32),
        }
        for answer, advantage in zip(answers, advantages, strict=True)
    ]


def generate(client: FeedClient, folder: Path) -> None:
    """Put answers of the newest policy, also to a trainer that is started again."""
    policy, version, newest = build_policy(), 0, folder / "policy.pt"
    while True:
        try:
            for request in client.requests():
                with suppress(FileNotFoundError, EOFError):
                    saved = torch.load(newest)
                    policy.load_state_dict(saved["policy"])
                    version = saved["step"]
                client.put(request.key, sample_answers(policy, request.item), version)
        except WorkerError:
            time.sleep(0.2)  # The trainer is starting.


def train(folder: Path, prompts: int, steps: int | None = None, *, resume: bool) -> None:
    """Train on each prompt once, and save a checkpoint every few steps."""
    feed = FeedSource(ShardedSampler(prompts, rank=0, world_size=1), max_ahead=16, timeout_s=120)
    budget = TokenBudget(1024, layout="packed")
    keys = ("input_ids", "labels", "advantages")
    collate = PackedCollate.of(budget, token_keys=keys)
    loader = ODBDataLoader(feed, token_budget=budget, collate_fn=collate, window=4)
    policy = build_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    parts = {"policy": policy, "optimizer": optimizer, "loader": loader}
    checkpoints = Checkpoints(folder / "checkpoints", parts)
    step = checkpoints.load() if resume else 0
    feed.serve(ADDRESS, AUTHKEY)
    with loader, Ledger(folder / "ledger") as ledger:
        for batch in loader:
            info = pop_step_info(batch)
            ids, advantages = batch["input_ids"][0], batch["advantages"][0]
            logp = policy(ids[:-1]).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            is_target = batch["labels"][0, 1:] != -100  # not the first token of an answer
            loss = -(advantages[1:] * logp)[is_target].mean() * info.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.record(info)
            step += 1
            feed.oldest_version = max(0, step - 20)
            mean = info.local_tokens / info.local_samples / ANSWERS
            print(f"step {step}: loss {loss:.6f}, answers of {mean:.1f} tokens", flush=True)
            if step % SAVE_EVERY == 0:
                checkpoints.save(step)
                torch.save({"policy": policy.state_dict(), "step": step}, folder / "policy.new")
                (folder / "policy.new").replace(folder / "policy.pt")
            if step == steps:
                break


def kill_and_audit(folder: Path, prompts: int, kills: int) -> None:
    """Kill the trainer at random moments, let it end, and audit its ledger."""
    command = [sys.executable, __file__, "--trainer", "--resume", "--prompts", str(prompts)]
    command += ["--output", str(folder)]
    random.seed(kills)
    killed = 0
    while True:
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        output = cast("IO[str]", trainer.stdout)
        output.readline()  # The first step is done.
        if killed < kills:
            time.sleep(random.uniform(0, 3))
            trainer.kill()
        output.read()
        code = trainer.wait()
        if code == 0:
            break
        if code != -signal.SIGKILL:
            raise SystemExit("the trainer failed")
        killed += 1
    print(f"killed {killed} times")
    print(audit(folder / "ledger", size=prompts))


def main() -> None:
    """Start the processes that sample, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=400, help="of an epoch (%(default)s)")
    parser.add_argument("--steps", type=int, help="most steps of the run (default: one epoch)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--kills", type=int, default=0, help="kill the trainer so many times")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("runs/rollouts"), help="folder")
    options = parser.parse_args()
    if not options.resume:
        shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.trainer:
        train(options.output, options.prompts, resume=True)
        return
    spawn = multiprocessing.get_context("spawn")
    client = FeedClient(ADDRESS, AUTHKEY)
    for _ in range(2):
        spawn.Process(target=generate, args=(client, options.output), daemon=True).start()
    if options.kills:
        kill_and_audit(options.output, options.prompts, options.kills)
    else:
        train(options.output, options.prompts, options.steps, resume=options.resume)
        print(audit(options.output / "ledger", size=options.prompts))


if __name__ == "__main__":
    main()
