r"""Compare this library with every rival, on the same data, in one command.

    python examples/benchmarks/compare.py                       # all tables
    python examples/benchmarks/compare.py --quick               # runs, but shows nothing

The page has two runs of all but training, and one of training, in `results/`:

    compare.py --only padding waits resume rates store memory generation --json run1.json
    compare.py --only training quality --epochs epochs.json --json training.json
    check_claims.py --write --strict

The rivals are in no extra of this library. Install them into an environment of its own:

    python3 -m venv rivals
    rivals/bin/pip install -c constraints.txt -e '.[examples,parquet,s3]' trl peft 'moto[server]'
    rivals/bin/pip install -c constraints.txt torch==2.13.0 lhotse==2.0.0a7 grain==0.2.18 \
        spdl==0.8.0 webdataset==1.0.2 dynabatch==0.2.23 litdata==0.2.76 megatron-energon==7.4.1
    rivals/bin/pip uninstall -y torchvision  # of LitData; does not fit torch for CPUs

mosaicml-streaming needs numpy < 2.2, and is skipped in this environment.

A rival that is not installed is named in a line that begins with "skipped". All contenders of a
table have the same data, take turns, and are set up as their own documentation says. Times are
those of one machine: compare ratios. `docs/comparison.md` shows the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # tiny_lm.py is among the examples

from comparing.common import Options, Tables

TABLES = (
    "padding",
    "waits",
    "resume",
    "rates",
    "store",
    "training",
    "quality",
    "memory",
    "generation",
)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=TABLES, default=TABLES, help="tables (default: all)")
    add("--quick", action="store_true", help="all of it, but too short to judge by")
    add(
        "--rounds",
        type=int,
        help="turns of what is timed (default: 3; with --quick, 1; 0: only what --epochs has)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the models (%(default)s)")
    add("--epochs", type=Path, help="file of trained epochs: a later run trains those it lacks")
    add("--json", type=Path, help="file for the tables; keeps its other tables")
    args = parser.parse_args()
    rounds = (1 if args.quick else 3) if args.rounds is None else args.rounds
    options = Options(quick=args.quick, device=args.device, rounds=rounds, epochs=args.epochs)
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    for name in args.only:
        found = [table for table in found if table["name"] != name]
        tables: Callable[[Options], Tables] = import_module(f"comparing.{name}").tables
        began_s = time.monotonic()
        for table in tables(options):
            print(f"\n{table}", flush=True)
            found.append({"name": name, "quick": args.quick, **table._asdict()})
            if args.json:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
