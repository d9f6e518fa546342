"""What the logs of all ranks say: whether a resume was exact, and what each rank did.

    print(check_ranks(folder, world_size, plan, exact=True))
    print(table(folder, world_size))

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from processes import KillPlan
from run_log import MEAN_OF_STEPS, Step, compare, read_log


def log_name(phase: str, rank: int) -> str:
    """Return the name of the log of a rank in a phase."""
    return f"{phase}-rank{rank}"


def check_ranks(folder: Path, world_size: int, plan: KillPlan, *, exact: bool) -> str:
    """Return what the resume kept on all ranks.

    Raises:
        SystemExit: if it kept less than it must; see `compare`.
    """
    replayed = 0
    verdicts = set()
    for rank in range(world_size):
        whole, _ = read_log(folder, log_name("uninterrupted", rank))
        killed, _ = read_log(folder, log_name("killed", rank))
        resumed, facts = read_log(folder, log_name("resumed", rank))
        expected = whole[: plan.kill_at] + whole[plan.saved :]
        verdicts.add(compare(expected, killed + resumed, exact=exact, name=f"rank {rank}"))
        replayed += facts["replayed_samples"]
    return (
        f"Killed on all {world_size} ranks after step {plan.kill_at}, {plan.lost} steps after the "
        f"last checkpoint.\n"
        f"Resumed at step {plan.saved}, with {replayed} samples processed again. On every rank, up "
        f"to step {len(whole)}: {'; '.join(sorted(verdicts))}."
    )


def table(folder: Path, world_size: int) -> str:
    """Return the uninterrupted run as text: a line per rank, and one of all."""
    ranks = [read_log(folder, log_name("uninterrupted", rank)) for rank in range(world_size)]
    header = ("", "steps", "samples", "padding", "fillers", "real tokens/s", "waiting")
    rows = [
        (f"rank {rank}", *_figures([steps], facts["wait_s"]))
        for rank, (steps, facts) in enumerate(ranks)
    ]
    mean_wait_s = float(np.mean([facts["wait_s"] for _, facts in ranks]))
    rows.append(("all", *_figures([steps for steps, _ in ranks], mean_wait_s)))
    text = "\n".join("".join(f"{cell:>14}" for cell in row) for row in [header, *rows])
    losses = np.mean([[step.loss for step in steps] for steps, _ in ranks], axis=0)
    few = min(MEAN_OF_STEPS, len(losses) // 2)
    return (
        f"{text}\n\nLoss, nats per token: {losses[:few].mean():.3f} in the first {few} steps, "
        f"{losses[-few:].mean():.3f} in the last {few}."
    )


def _figures(ranks: list[list[Step]], wait_s: float) -> tuple[str, ...]:
    """Return the cells of a line: of one rank, or of several together."""
    batches = [batch for steps in ranks for step in steps for batch in step.batches]
    samples, widths, tokens = np.array(batches).T
    seconds = max(steps[-1].seconds for steps in ranks)
    is_filler = tokens == 0
    return (
        f"{len(ranks[0]):,}",
        f"{samples[~is_filler].sum():,}",
        f"{1 - tokens.sum() / (samples * widths).sum():.1%}",
        f"{is_filler.sum():,}",
        f"{tokens.sum() / seconds:,.0f}",
        f"{wait_s / seconds:.1%}",
    )
