"""Train on answers that other processes sample from the policy: rollouts, as GRPO groups them.

    python examples/rollouts.py                # one epoch of prompts, half a minute on 2 cores
    python examples/rollouts.py --resume       # go on from the last checkpoint
    python examples/rollouts.py --kills 20     # kill trainer and samplers at random moments

Two processes take prompts from a `FeedSource`, sample four answers to each, and put them. Each
prompt asks for answers of some length, and takes time for each token: most prompts a twentieth of
a second, the longest half a second. The four answers share a step, since their advantages are
relative to one another. With `--kills`, trainer and samplers are killed with SIGKILL and started
again. The last lines show that each prompt was trained once, and long ones as often as short ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

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

ANSWERS, VOCABULARY, MOST_TOKENS = 4, 32, 250
ADDRESS, AUTHKEY = ("127.0.0.1", 29417), b"rollouts of one machine"
SAVE_EVERY, LIMIT_S = 5, 120
SECONDS_PER_TOKEN = 0.0005
PROCESSES = multiprocessing.get_context("forkserver")


def answer_tokens(prompt: int) -> int:
    """Return the length of each answer to a prompt: 20 tokens in the median, with a long tail."""
    return int(min(max(np.random.default_rng(prompt).lognormal(3, 1), 2), MOST_TOKENS))


def build_policy() -> torch.nn.Module:
    """Return a policy that sees only the last token."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY))


def sample_answers(policy: torch.nn.Module, prompt: int) -> list[dict[str, np.ndarray]]:
    """Return the answers to a prompt, each with its advantage: even tokens are better."""
    with torch.inference_mode():
        table = policy(torch.arange(VOCABULARY)).softmax(-1).numpy().astype(np.float64)
    table /= table.sum(-1, keepdims=True)
    answers = np.full((ANSWERS, answer_tokens(prompt)), prompt % VOCABULARY)
    for answer in answers:
        for position in range(1, len(answer)):
            answer[position] = np.random.choice(VOCABULARY, p=table[answer[position - 1]])
    time.sleep(SECONDS_PER_TOKEN * answers.size)
    rewards = (answers % 2 == 0).mean(1).astype(np.float32)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return [
        {
            "input_ids": answer,
            "labels": answer,
            "advantages": np.full(len(answer), advantage, np.float32),
        }
        for answer, advantage in zip(answers, advantages, strict=True)
    ]


def generate(folder: Path) -> None:
    """Put answers of the newest policy, also to a trainer that is started again."""
    client = FeedClient(ADDRESS, AUTHKEY)
    policy, version, newest = build_policy(), 0, folder / "policy.pt"
    driver = multiprocessing.parent_process()
    while driver is not None and driver.is_alive():
        with suppress(WorkerError):
            for request in client.requests():
                with suppress(FileNotFoundError, EOFError):
                    saved = torch.load(newest)
                    policy.load_state_dict(saved["policy"])
                    version = saved["step"]
                client.put(request.key, sample_answers(policy, request.item), version)
        time.sleep(0.2)  # The trainer is starting, or has closed the feed.


def train(options: argparse.Namespace, has_trained: Event | None = None) -> None:
    """Train on each prompt once, and save a checkpoint every few steps."""
    folder = options.output
    prompts = ShardedSampler(options.prompts, shuffle=False, rank=0, world_size=1)
    feed = FeedSource(prompts, max_ahead=16, timeout_s=LIMIT_S)
    budget = TokenBudget(ANSWERS * MOST_TOKENS, layout="packed")
    keys = ("input_ids", "labels", "advantages")
    collate = PackedCollate.of(budget, token_keys=keys)
    loader = ODBDataLoader(feed, token_budget=budget, collate_fn=collate, window=4)
    policy = build_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    totals: dict[str, Any] = {"prompts": 0, "tokens": 0, "stale": [], "places": 0}
    parts = {"policy": policy, "optimizer": optimizer, "loader": loader, "totals": totals}
    checkpoints = Checkpoints(folder / "checkpoints", parts)
    step = checkpoints.load()
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
            if has_trained is not None:
                has_trained.set()
            step += 1
            feed.oldest_version = max(0, step - options.stale_after)
            totals["stale"] += [sample.key for sample in info.left_out]
            first = min(key for key in info.keys if key is not None)
            place = totals["prompts"] + len(totals["stale"])  # Prompts are asked for in order.
            totals["places"] = max(totals["places"], place - first)
            totals["prompts"] += info.local_samples
            totals["tokens"] += info.local_tokens
            if step % SAVE_EVERY == 0:
                checkpoints.save(step)
                torch.save({"policy": policy.state_dict(), "step": step}, folder / "policy.new")
                (folder / "policy.new").replace(folder / "policy.pt")
                even = (ids % 2 == 0).double().mean()
                print(f"step {step}: loss {loss:.6f}, {even:.0%} even tokens", flush=True)
            if step == options.steps:
                break
    (folder / "totals.json").write_text(json.dumps(totals))


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a process that ends with this one."""
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def kill_until_done(options: argparse.Namespace, generators: list[BaseProcess]) -> Counter[str]:
    """Kill generators and the trainer at random moments, and start them again."""
    random.seed(options.kills)
    killed: Counter[str] = Counter()
    while True:
        has_trained = PROCESSES.Event()
        trainer = start(train, options, has_trained)
        if killed["trainers"] < options.kills:
            has_trained.wait(LIMIT_S)
            trainer.join(random.uniform(0, 2))
            generators.pop(0).kill()
            generators.append(start(generate, options.output))
            killed["generators"] += 1
            trainer.join(random.uniform(0, 2))
            trainer.kill()
        trainer.join()
        if trainer.exitcode == 0:
            return killed
        if trainer.exitcode != -signal.SIGKILL:
            raise SystemExit("the trainer failed")
        killed["trainers"] += 1


def report(options: argparse.Namespace, killed: Counter[str]) -> None:
    """Compare what was trained with what was asked for."""
    totals = json.loads((options.output / "totals.json").read_text())
    asked = ANSWERS * sum(map(answer_tokens, range(options.prompts)))
    stale = ANSWERS * sum(map(answer_tokens, totals["stale"]))
    print(f"killed {killed['trainers']} trainers and {killed['generators']} generators;", end=" ")
    print(f"asked for {described(asked, options.prompts)};", end=" ")
    print(f"trained {described(totals['tokens'], totals['prompts'])};", end=" ")
    print(f"left out as stale {described(stale, len(totals['stale']))};", end=" ")
    print(f"none was trained more than {totals['places']} places after its turn")
    print(audit(options.output / "ledger", size=options.prompts))
    if options.steps is None and totals["tokens"] + stale != asked:
        raise SystemExit("the lengths differ")


def described(tokens: int, prompts: int) -> str:
    """Return the number of prompts and the mean length of their answers."""
    return f"{prompts} prompts of {tokens / ANSWERS / max(prompts, 1):.4f} tokens"


def main() -> None:
    """Start the processes that sample, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=400, help="of an epoch (%(default)s)")
    parser.add_argument("--steps", type=int, help="most steps of the run (default: one epoch)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--kills", type=int, default=0, help="kill the trainer so many times")
    parser.add_argument(
        "--stale-after", type=int, default=20, help="steps of age of a policy (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/rollouts"), help="folder")
    options = parser.parse_args()
    if not options.resume:
        shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True, exist_ok=True)
    # Imported once for all processes; Adam imports dynamo.
    PROCESSES.set_forkserver_preload(["torch._dynamo", "odb_nodes.core.loader"])
    generators = [start(generate, options.output) for _ in range(2)]
    killed: Counter[str] = Counter()
    if options.kills:
        killed = kill_until_done(options, generators)
    else:
        train(options)
    report(options, killed)


if __name__ == "__main__":
    main()
