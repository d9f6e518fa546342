"""Padding, and balance over ranks: what each contender makes of the same lengths."""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

import numpy as np

from comparing.batching import (
    PACKED_PLANS,
    PADDED,
    PADDED_PLANS,
    Plan,
    Planner,
    lhotse,
    ours,
)
from comparing.common import Options, Row, Table, Tables, attempts
from odb_nodes import TokenBudget
from odb_nodes.core.planning.group_costs import samples_of
from odb_nodes.planning import StepTime
from odb_nodes.tools.simulate import SimulationReport, lognormal_lengths

CVS = (0.3, 0.5, 1.0, 2.0)
BUDGET, WINDOW, RANKS = 16_384, 1024, (1, 4, 8, 64)
ATTENTION_TOKENS = 12_288  # length of a sample that attention takes half of the time for
STEP_TIME = StepTime(squares=1 / ATTENTION_TOKENS)

AWARE_PLANS: dict[str, dict[str, Planner]] = {
    "padded": {
        "lhotse, `quadratic_duration`": partial(lhotse, quadratic=ATTENTION_TOKENS),
        f"{PADDED}, `step_time`": partial(ours, "padded", step_time=STEP_TIME),
    },
    "packed": {},  # Ours are level in time without being asked to.
}


class Result(NamedTuple):
    """What the batches of one contender come to."""

    report: SimulationReport
    lost: int
    repeated: int
    seconds: float


def measure(planner: Planner, layout: str, plan: Plan) -> Result:
    """Return what a contender's batches come to, and how long it took to plan them."""
    start_s = time.perf_counter()
    steps = [[list(batch) for batch in step] for step in planner(plan)]
    seconds = time.perf_counter() - start_s
    seen = {index for step in steps for batch in step for index in batch}
    lengths = np.array(plan.lengths)
    groups = (
        [samples_of(np.array(batch, int), lengths[batch]) for batch in step] for step in steps
    )
    budget = TokenBudget(BUDGET, layout=layout)  # type: ignore[arg-type]
    report = SimulationReport.of(groups, budget)
    repeated = sum(len(batch) for step in steps for batch in step) - len(seen)
    return Result(report, len(plan.lengths) - len(seen), repeated, seconds)


def tables(options: Options) -> Tables:
    """Yield a table of one rank, and of several."""
    samples = 2_000 if options.quick else 20_000
    for ranks in RANKS[:2] if options.quick else RANKS:
        plans = {"padded": PADDED_PLANS, "packed": PACKED_PLANS}
        if ranks > 1:  # attention counts where ranks wait for one another
            plans = {layout: plans[layout] | AWARE_PLANS[layout] for layout in plans}
        rows: dict[tuple[str, str], Row] = {}
        for cv in CVS:
            lengths = lognormal_lengths(samples, cv=cv).tolist()
            plan = Plan(lengths=lengths, budget=BUDGET, window=WINDOW, ranks=ranks)
            for layout, planners in plans.items():
                found = attempts(
                    {name: partial(measure, one, layout, plan) for name, one in planners.items()}
                )
                for name, result in found.items():
                    row = rows.setdefault((layout, name), {"": name, "layout": layout})
                    row |= one_rank(cv, result) if ranks == 1 else many_ranks(cv, result)
        yield Table(
            "Padding" if ranks == 1 else f"Balance over {ranks} ranks",
            f"{samples:,} lognormal lengths (mean 800, 16 to 8,192 tokens) for each coefficient of "
            f"variation; budget {BUDGET:,} tokens, padding included; window {WINDOW:,} samples. "
            + (
                "Fill is real tokens / (batches x budget)."
                if ranks == 1
                else "Of each two figures, the first is the balance in time: sum over steps of the "
                "ranks' mean time / sum of that of the slowest, where attention takes half of the "
                f"time of a sample of {ATTENTION_TOKENS:,} tokens. The second is real tokens / "
                "(ranks x sum over steps of the padded tokens of the rank that has most)."
            ),
            [*rows.values()],
        )


def one_rank(cv: float, result: Result) -> Row:
    """Return a contender's columns for one rank."""
    report = result.report
    fill = report.real_tokens / (report.steps * BUDGET)
    row = {f"CV {cv}: padding, fill": f"{report.padding_share:.3f}, {fill:.3f}"}
    if cv == CVS[-1]:
        largest = report.largest_tokens / BUDGET
        row |= {
            "largest batch / budget": f"{largest:.2f}",
            "lost, repeated": f"{result.lost}, {result.repeated}",
        }
        row |= {"planning, s": f"{result.seconds:.1f}"}
    return row


def many_ranks(cv: float, result: Result) -> Row:
    """Return a contender's columns for several ranks."""
    report = result.report
    row = {f"CV {cv}": f"{report.time_balance:.3f}, {report.efficiency:.3f}"}
    if cv == CVS[-1]:
        row |= {"largest batch / budget": f"{report.largest_tokens / BUDGET:.2f}"}
        row |= {"lost, repeated": f"{result.lost}, {result.repeated}"}
    return row
