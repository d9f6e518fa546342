"""Whether what `tune` picks is best: its time per token in real epochs, against all that it tried.

python examples/benchmarks/benchmark_tune.py

Trains the tiny language model for an epoch with each choice. The times are those of the processor
in forward, backward and the optimizer's step, without waiting for data, as those that `tune`
estimates, once they are fitted to steps of the largest budget and of the smallest one. All choices
take turns, since the machine may be slower at times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.tools.lengths import observe_lengths
from odb_nodes.tools.tune import Choice, tune

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_lm import build_model, load_corpus

TURN_TOKENS = 30_000
LOGGED_STEPS = 60
clock = partial(time.clock_gettime, time.CLOCK_THREAD_CPUTIME_ID)


def main() -> None:
    """Print estimated and measured times of each choice, and how near the pick is to the best."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--limit", type=int, default=8192, help="tokens of the largest batch")
    parser.add_argument("--every", type=int, default=1, help="of so many texts one is trained on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus(options.every)
    samples = [corpus.encode(text) for text in corpus.train]
    table = observe_lengths(samples)
    tokens = int(table.tokens.sum())

    grid = [one.choice for one in tune(table, world_size=1, limit=options.limit).tried]
    found = measure(samples, grid)
    fitted = [found[grid[0]][:LOGGED_STEPS], found[grid[-1]][:LOGGED_STEPS]]  # by budget

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "steps.jsonl")
        log.write_text("".join(json.dumps(one) + "\n" for steps in fitted for one in steps))
        tuned = tune(table, world_size=1, limit=options.limit, log=log)
    print(tuned.step_time)
    measured = {choice: sum(one["step_s"] for one in steps) for choice, steps in found.items()}
    for outcome in tuned.tried:
        choice, seconds = outcome.choice, measured[outcome.choice]
        print(
            f"budget {choice.budget.tokens:6} window {choice.window:5}: "
            f"measured {1e6 * seconds / tokens:6.2f} us a token, estimated "
            f"{1e6 * outcome.epoch_s / tokens:6.2f}, ratio {outcome.epoch_s / seconds:.3f}"
            f"{'  <- picked' if outcome is tuned.best else ''}"
        )
    errors = [abs(one.epoch_s / measured[one.choice] - 1) for one in tuned.tried]
    print(
        f"picked / best: {measured[tuned.best.choice] / min(measured.values()):.3f}; error of "
        f"the estimate for it: {abs(tuned.best.epoch_s / measured[tuned.best.choice] - 1):.1%}; "
        f"largest: {max(errors):.1%}"
    )


def measure(
    samples: Sequence[dict[str, Any]], grid: Sequence[Choice]
) -> dict[Choice, list[dict[str, float]]]:
    """Return the steps of an epoch with each choice, taken in turns of some tokens."""
    epochs = {choice: steps_of(samples, choice) for choice in grid}
    found: dict[Choice, list[dict[str, float]]] = {choice: [] for choice in grid}
    while epochs:
        for choice, epoch in [*epochs.items()]:
            tokens = 0.0
            while tokens < TURN_TOKENS:
                step = next(epoch, None)
                if step is None:
                    del epochs[choice]
                    break
                found[choice].append(step)
                tokens += step["rows"] * step["width"]
    return found


def steps_of(samples: Sequence[dict[str, Any]], choice: Choice) -> Iterator[dict[str, float]]:
    """Train for an epoch, and yield rows, width and seconds of each micro-step."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = ODBDataLoader(
        samples,
        token_budget=choice.budget,
        window=choice.window,
        accumulate=choice.accumulate,
        round_size=choice.round_size,
    )
    for batch in loader:
        info = pop_step_info(batch)
        start_s = clock()
        (model(**batch).loss * info.loss_scale).backward()
        if info.ends_optimizer_step:
            optimizer.step()
            optimizer.zero_grad()
        rows, width = batch["input_ids"].shape
        yield {"rows": rows, "width": width, "step_s": clock() - start_s}


if __name__ == "__main__":
    main()
