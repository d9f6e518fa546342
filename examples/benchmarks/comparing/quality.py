"""Quality: the held-out loss after as many samples, tokens and optimizer steps."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

from comparing.batching import PACKED, PACKED_PLANS, PADDED, PADDED_PLANS, Plan
from comparing.common import Options, Row, Table, Tables, attempts
from comparing.training import (
    LEARNING_RATE,
    Trained,
    Way,
    encoded,
    lengths_of,
    make_llama,
    run,
    text_task,
)
from tiny_lm import load_corpus

BATCH_SAMPLES = 8
SEEDS = (0, 1, 2)


def budget_for(steps: int, lengths: list[int], contender: str, window: int) -> int:
    """Return the budget under which a contender makes about so many batches."""
    planner = {**PADDED_PLANS, **PACKED_PLANS}[contender]
    low, high = 64, sum(lengths)  # a sample longer than the budget is alone
    while low < high - low // 50:
        middle = (low + high) // 2
        made = sum(1 for _ in planner(Plan(lengths=lengths, budget=middle, window=window)))
        low, high = (middle, high) if made > steps else (low, middle)
    return high


def ways(lengths: list[int], options: Options) -> dict[str, Way]:
    """Return all ways, each of which makes as many optimizer steps."""
    steps = -(-len(lengths) // BATCH_SAMPLES)
    window = 256
    padded, quarter, packed = (
        budget_for(number, lengths, contender, window)
        for number, contender in ((steps, PADDED), (4 * steps, PADDED), (steps, PACKED))
    )

    def way(contender: str, budget: int, accumulate: int = 1, times: float = 1.0) -> Way:
        return Way(
            contender=contender,
            budget=budget,
            batch_size=BATCH_SAMPLES,
            accumulate=accumulate,
            learning_rate=times * LEARNING_RATE,
            window=window,
            device=options.device,
        )

    return {
        "fixed batches": way("fixed batches", padded),
        "`group_by_length`": way("`group_by_length` of transformers", padded),
        "lhotse": way("lhotse, buffer as our window", padded),
        "odb_nodes, padded": way(PADDED, padded),
        "odb_nodes, padded, 4 batches a step": way(PADDED, quarter, 4),
        "odb_nodes, padded, learning rate x 1.4": way(PADDED, padded, times=1.4),
        "odb_nodes, packed": way(PACKED, packed),
    }


def tables(options: Options) -> Tables:
    """Yield the table."""
    samples = 32 if options.quick else 320
    seeds = SEEDS[:1] if options.quick else SEEDS
    texts = encoded(load_corpus(every=8 if options.quick else 1))
    task = replace(text_task(1.0, texts, samples), make_model=partial(make_llama, hidden_size=32))
    given = ways(lengths_of(task.train), options)
    found: dict[str, list[Trained]] = {}
    for seed in seeds:
        turn = attempts(
            {name: partial(run, task, replace(way, seed=seed), 1) for name, way in given.items()}
        )
        for name, trained in turn.items():
            found.setdefault(name, []).append(trained)
    yield Table(
        "Quality",
        f"{samples:,} pieces of text of lognormal lengths (CV 1), one epoch, one rank; budgets "
        f"chosen so that all make about as many steps as fixed batches of {BATCH_SAMPLES}; "
        f"{len(seeds)} seeds of model and order; held-out loss in nats per token.",
        [row_of(name, runs, found["fixed batches"]) for name, runs in found.items()],
    )


def row_of(name: str, runs: list[Trained], base: list[Trained]) -> Row:
    """Return the row of a way."""
    losses = [one.loss for one in runs]
    gaps = [one.loss - other.loss for one, other in zip(runs, base, strict=True)]
    return {
        "": name,
        "optimizer steps": f"{runs[0].steps}",
        "samples": f"{runs[0].samples:,}",
        "real tokens": f"{runs[0].real_tokens:,}",
        "largest batch, tokens": f"{max(one.largest_tokens for one in runs):,}",
        "held-out loss": f"{statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
        "more than fixed batches": (
            f"{statistics.fmean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})"
        ),
    }
