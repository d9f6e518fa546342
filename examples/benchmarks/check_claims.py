"""Check docs/comparison.md against two runs of `compare.py`: its figures, and each claim in words.

    python examples/benchmarks/check_claims.py             # the runs in results/
    python examples/benchmarks/check_claims.py run1.json run2.json --write

It exits with 1 if a claim does not hold in a run, or the page lacks a claim's text or has other
figures. `--write` puts the figures of the runs on the page; claims that do not hold are errors
still. Claims about tables that a run lacks are listed, and are errors with `--strict`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from comparing.claims import check, read_run
from comparing.page import CLAIMS, TABLES

PAGE = Path(__file__).parents[2] / "docs" / "comparison.md"
RUNS = sorted(Path(__file__).with_name("results").glob("*.json"))


def main() -> None:
    """Check the page, or write its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, default=RUNS, help="files of compare.py --json")
    add("--write", action="store_true", help="put the figures of the runs on the page")
    add("--strict", action="store_true", help="a table that a run lacks is an error")
    args = parser.parse_args()
    runs = {path.name: read_run(path) for path in args.runs}
    report = check(PAGE.read_text(), runs, CLAIMS, TABLES)
    if args.write:
        PAGE.write_text(report.page)
        report = check(report.page, runs, CLAIMS, TABLES)
    for absent in report.not_in_the_runs:
        print(f"not in the runs: {absent}")
    for error in report.errors:
        print(f"error: {error}")
    sys.exit(bool(report.errors or (args.strict and report.not_in_the_runs)))


if __name__ == "__main__":
    main()
