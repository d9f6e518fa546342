"""What `OomGuard` costs where memory does not run out, and what is left of a run where it does.

    python examples/benchmarks/benchmark_guard.py
    python examples/benchmarks/benchmark_guard.py --samples 400 --rounds 2

A small transformer is trained on texts of lognormal lengths, in turns: by a plain loop, by the same
loop with a guard, and with a guard where half of the budget fits: every step then runs out of
memory first, unless it is told so (`limit=`). The ratios of the times are the result. Most of what
a lack of memory costs is one collection of garbage of the whole process.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.memory import OomGuard

BUDGET_TOKENS = 2048
VOCABULARY, HIDDEN = 512, 64

Batch = dict[str, torch.Tensor]


class Model(nn.Module):
    """A transformer of two layers; batches above `most_tokens` run out of memory.

    Args:
        most_tokens: rows times width of the largest batch that fits.
    """

    def __init__(self, most_tokens: float = math.inf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.most_tokens = most_tokens
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 2 * HIDDEN, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the supervised tokens of a batch."""
        ids, labels = batch["input_ids"], batch["labels"]
        if ids.numel() > self.most_tokens:
            raise torch.OutOfMemoryError("out of memory, as this benchmark wants it")
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.layers(self.embedding(ids), causal, is_causal=True)
        logits = self.head(hidden)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def make_samples(count: int) -> list[dict[str, np.ndarray]]:
    """Return samples of lognormal lengths, mean 100 tokens and CV 1."""
    rng = np.random.default_rng(0)
    sigma = math.sqrt(math.log(2))
    lengths = rng.lognormal(math.log(100) - sigma**2 / 2, sigma, count).clip(8, 1024).astype(int)
    rows = [rng.integers(VOCABULARY, size=length) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def plain_steps(loader: ODBDataLoader, model: Model) -> Iterator[None]:
    """Compute the gradients of each step of an epoch."""
    for batch in loader:
        info = pop_step_info(batch)
        (model.loss(batch) * info.loss_scale).backward()
        yield


def guarded_steps(loader: ODBDataLoader, model: Model) -> Iterator[None]:
    """Compute the gradients of each step of an epoch, in parts where memory runs out."""
    for step in OomGuard(loader):
        step.backward(model, model.loss)
        yield


def known_steps(loader: ODBDataLoader, model: Model) -> Iterator[None]:
    """Compute the gradients of each step of an epoch, in parts where it is known not to fit."""
    for step in OomGuard(loader, limit=BUDGET_TOKENS // 2):
        step.backward(model, model.loss)
        yield


def seconds_of(
    steps: Callable[[ODBDataLoader, Model], Iterator[None]],
    samples: list[dict[str, np.ndarray]],
    model: Model,
) -> tuple[float, int]:
    """Return the seconds of an epoch, and its steps."""
    loader = ODBDataLoader(samples, token_budget=BUDGET_TOKENS, window=256)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    count, start_s = 0, time.perf_counter()
    for _ in steps(loader, model):
        optimizer.step()
        optimizer.zero_grad()
        count += 1
    return time.perf_counter() - start_s, count


def main() -> None:
    """Print a table: milliseconds of a step, and the time relative to the plain loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = make_samples(arguments.samples)
    ways = {
        "plain loop": (plain_steps, Model()),
        "guard": (guarded_steps, Model()),
        "half of the budget fits": (guarded_steps, Model(BUDGET_TOKENS // 2)),
        "the same, with limit=": (known_steps, Model(BUDGET_TOKENS // 2)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, (steps, model) in ways.items():
            taken, count = seconds_of(steps, samples, model)
            if number:  # the first round warms up
                seconds[name].append(taken / count)
    plain = seconds["plain loop"]
    print(f"{'':<26}{'ms a step':>12}{'ratio':>9}")
    for name, found in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(found, plain, strict=True))
        print(f"{name:<26}{1000 * statistics.median(found):>12.2f}{ratio:>9.3f}")


if __name__ == "__main__":
    main()
