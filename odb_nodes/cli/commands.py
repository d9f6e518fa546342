"""The commands of `odb-nodes`: each calls a function of `tools` or `training`, and prints.

Modules that import torch are imported when a command runs.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import product
from typing import TYPE_CHECKING

from odb_nodes._support.text import counted
from odb_nodes.cli.data import (
    BUDGET_TOKENS,
    Data,
    UsageError,
    check_outputs,
    files_read,
    load_function,
)
from odb_nodes.core.planning import SimulationOptions
from odb_nodes.core.planning.auto_window import shown

if TYPE_CHECKING:
    from odb_nodes.core.planning import TokenBudget
    from odb_nodes.tools.lengths import LengthTable

__all__ = ["BUDGET_TOKENS", "UsageError"]

_AUDIT_CODES = {"damaged": 1, "open": 3}


def audit(args: Namespace) -> int:
    """Audit a ledger: list samples without a fate, or with several.

    Exits with 1 if there is a problem, and with 3 if an epoch is partial and the run has no
    recorded end.
    """
    sizes: dict[str, int] = {}
    for text in args.size or ():
        name, _, number = text.rpartition("=")
        if not number.isdecimal():
            raise UsageError(f"--size must be a number, or source=number, but is {text!r}")
        sizes[name] = int(number)
    from odb_nodes.training.ledger import audit as audit_ledger

    result = audit_ledger(args.folder, sizes[""] if [*sizes] == [""] else sizes or None)
    print(result)
    for epoch in result.epochs if args.steps is not None else ():
        which = f"first {counted(args.steps, 'step')}"
        if args.steps > epoch.steps:
            which = f"all {counted(epoch.steps, 'step')}, of {args.steps:,} asked for"
        digest = epoch.digest_of_first(args.steps)
        print(f"epoch {epoch.epoch}, {which}: digest {digest}")
    return 0 if result.ok else _AUDIT_CODES[result.state]


def inspect(args: Namespace) -> int:
    """Show a saved state, or remake a step of a run for all ranks.

    With --step and --loader: the samples of a step, from a ledger or a checkpoint before it. Exits
    with 1 if ranks do not fit together, or states differ.
    """
    if (args.step is None) != (args.loader is None) or (args.out and args.step is None):
        raise UsageError("pass --step and --loader, and --out with both")
    if args.step is not None:
        return _inspect_step(args)
    from odb_nodes.tools.inspection import differences, misfits, read_inspections

    name, ranks = read_inspections(args.state)
    if args.diff is not None:
        other_name, other_ranks = read_inspections(args.diff)
        if len(other_ranks) != len(ranks):
            raise ValueError(
                f"`{name}` has {len(ranks)} ranks, but `{other_name}` has {len(other_ranks)}."
            )
        lines = [
            f"rank {number}: {line}" if len(ranks) > 1 else line
            for number, (state, other_state) in enumerate(zip(ranks, other_ranks, strict=True))
            for line in differences(state, other_state)
        ]
        print(*(lines or [f"`{name}` and `{other_name}` are the same."]), sep="\n")
        return int(bool(lines))
    if args.rank >= len(ranks):
        raise ValueError(f"--rank must be below {len(ranks)}, the ranks of `{name}`.")
    problems = misfits(ranks)
    many = "" if len(ranks) == 1 else f", rank {args.rank} of {len(ranks)}"
    print(f"{name}{many}\n{ranks[args.rank]}")
    if len(ranks) > 1:
        print(*(problems or [f"the states of all {len(ranks)} ranks fit together."]), sep="\n")
    return int(bool(problems))


def _inspect_step(args: Namespace) -> int:
    make_loader = load_function(args.loader)
    check_outputs(args, ["out"], files_read=files_read(args.loader))
    from odb_nodes.tools.steps import remake_from_folder

    remade = remake_from_folder(make_loader, args.state, epoch=args.epoch, step=args.step)
    if args.out:  # before printing, which may end at a closed pipe
        import torch

        torch.save([step.as_dict() for step in remade], args.out)
    print(*remade, sep="\n")
    return 0


def _print_oversize(table: LengthTable, budget: TokenBudget) -> None:
    """Print how many samples exceed a budget, which the figures may not show."""
    if count := int(table.costs.are_oversize(budget).sum()):
        becomes = {"alone": "have a batch each", "drop": "are dropped", "error": "are errors"}
        subject = f"{count:,} of {len(table):,} samples exceed the budget alone"
        print(f"\n{subject}: they {becomes[budget.oversize]}.")


def profile(args: Namespace) -> None:
    """Show the lengths of a dataset, and compare ways to make batches of it."""
    data = Data(args, ["json", "html"])
    if args.html is not None:  # missing plotly is an error now, not after the comparison
        from odb_nodes.training.monitor.figures import require_plotly

        require_plotly()
    budget = data.budget(args.budget)
    job = data.job()
    window = job.pop("window")
    from odb_nodes.tools.profile import profile as make_profile

    table = data.table()
    result = make_profile(
        table,
        budget=budget,
        world_sizes=args.ranks or [data.options.virtual_ranks or 1],
        windows=args.window or [window],
        batch_size=args.batch_size,
        weights=data.weights(),
        lengths_known=data.lengths_known,
        **job,
    )
    print(result)
    _print_oversize(table, budget)
    for path, text in ((args.json, result.to_json), (args.html, result.to_html)):
        if path is not None:
            path.write_text(text())


def report(args: Namespace) -> None:
    """Report on training runs, finished or running: a table, a page, CSV, JSON."""
    from odb_nodes.training.monitor import report as make_report
    from odb_nodes.training.monitor.reports import MARKS

    check_outputs(args, [*MARKS], MARKS)
    print(make_report(args.folders, html=args.html, csv=args.csv, json=args.json))


def reshard(args: Namespace) -> None:
    """Convert the states of a checkpoint to another number of ranks."""
    from odb_nodes.tools.reshard import reshard_folder

    files = reshard_folder(args.folder, args.ranks, args.out)
    print(f"{len(files)} states are in {args.out}: {files[0].name} and so on.")


def simulate(args: Namespace) -> None:
    """Plan the first epoch on any number of ranks, without a model or a GPU."""
    data = Data(args)
    budget = data.budget(args.budget)
    options = data.job() | {"budget": budget}
    plans = [(window, False) for window in args.window or [options["window"]]]
    plans += [(options["window"], True)] * args.lengths_known
    jobs = [
        SimulationOptions(
            **options | {"world_size": world_size, "window": window, "lengths_known": is_known}
        )
        for world_size, (window, is_known) in product(
            args.ranks or [data.options.virtual_ranks or 1], plans
        )
    ]
    from odb_nodes._support.text import markdown_table
    from odb_nodes.tools.simulate import TableEpoch, budget_code

    table = data.table()
    print(table, f"token_budget={budget_code(budget)}", sep="\n")
    shuffle = data.shuffles if args.shuffle is None else args.shuffle
    shares = data.options.state == "replay"
    epoch = TableEpoch(table=table, shuffle=shuffle, weights=data.weights(), shares_rest=shares)
    rows: list[dict[str, str]] = []
    for job in jobs:
        run = {"ranks": str(job.world_size), "window": shown(job.window, epoch.window(job))}
        if args.lengths_known:
            run["lengths"] = "known" if job.lengths_known else "as they come"
        rows.append(run | epoch.report(job).as_row())
    print(markdown_table(rows))
    _print_oversize(table, budget)


def tune(args: Namespace) -> None:
    """Propose budget, window, accumulation and rounds for a dataset, with code to paste.

    Times are estimates that do not count image patches.
    """
    data = Data(args)
    job = data.job()
    limit = data.loader_budget
    world_size = args.ranks or data.options.virtual_ranks or 1
    accumulate = job.pop("accumulate")
    tokens_per_step = args.tokens_per_step
    if tokens_per_step is None and limit is not None and args.limit is None:
        tokens_per_step = limit.tokens * accumulate * world_size
    if args.limit is not None:
        limit = data.budget(args.limit)
    from odb_nodes.tools.tune import tune as choose

    tuned = choose(
        data.table(),
        world_size=world_size,
        tokens_per_step=tokens_per_step,
        limit=limit,
        log=args.log,
        weights=data.weights(),
        **job,
    )
    print(tuned, end="")
