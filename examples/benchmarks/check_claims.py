"""Check pages against runs of `compare.py`: their figures, and each claim in words.

    python examples/benchmarks/check_claims.py             # the runs in results/
    python examples/benchmarks/check_claims.py run1.json run2.json --write

It exits with 1 if a claim does not hold in a run, or its page lacks its text or has other figures
than the runs. `--write` puts the figures of the runs on the pages; claims that do not hold are
still errors. What one run has or none is listed; with `--strict` it is an error, but for training,
whose epochs of several seeds are one run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from comparing.claims import check, read_run
from comparing.page import IN_ONE_RUN, PAGES

REPOSITORY = Path(__file__).parents[2]
RUNS = sorted(Path(__file__).with_name("results").glob("*.json"))


def main() -> None:
    """Check the pages, or write their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, default=RUNS, help="files of compare.py --json")
    add("--write", action="store_true", help="put the figures of the runs on the pages")
    add("--strict", action="store_true", help="a table that not two runs have is an error")
    args = parser.parse_args()
    runs = {str(path): read_run(path) for path in args.runs}
    failed = False
    for name, (claims, tables) in PAGES.items():
        page = REPOSITORY / name
        report = check(page.read_text(), runs, claims, tables)
        if args.write:
            page.write_text(report.page)
            report = check(report.page, runs, claims, tables)
        once = [part for part in report.in_one_run if not part.startswith(IN_ONE_RUN)]
        for part in once:
            print(f"{name}: in one run: {part}")
        for part in report.in_no_run:
            print(f"{name}: in no run: {part}")
        for error in report.errors:
            print(f"{name}: error: {error}")
        failed |= bool(report.errors or (args.strict and (once or report.in_no_run)))
    sys.exit(failed)


if __name__ == "__main__":
    main()
