#!/usr/bin/env python
"""Put random faults into the package, one at a time, and see which the tests find.

    .ci/mutate.py --rooms core/planning core/nodes --count 10 --log /tmp/faults.jsonl

changes ten places of each room: a comparison, an operator, a number, a condition, a call, a
`return`. For each it runs the tests of the room, then the fast loop, with `--slow` the slow tests
of the room, too, until one fails, and adds a line of JSON to the log. With a log that exists it
continues. The same `--seed` gives the same faults of the same code. It changes the checkout that it
lies in, which must be clean, such as a worktree of its own, and puts everything back.
"""

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ["core/planning", "core/nodes", "core/alignment", "core/processing", "core/loader"]
ROOMS += ["training/checkpoints"]
RESUME = "tests/test_resume_machine.py"
LIMIT_S = 900

SWAPS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
SWAPS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
SWAPS |= {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//"}
SWAPS |= {ast.And: "or", ast.Or: "and"}
MESSAGES = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)


def places(node, within=False):
    """Yield (node, parts of its replacement) for what can be changed in functions."""
    if isinstance(node, MESSAGES):
        return
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("warn_user", "isinstance"):
        return
    is_function = isinstance(node, ast.FunctionDef)
    if is_function and node.name in ("__repr__", "__str__"):
        return
    if within:
        yield from changes(node)
    if isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    else:
        children = node.body if is_function else ast.iter_child_nodes(node)
    for child in children:
        yield from places(child, within or is_function)


def changes(node):
    """Yield (node, parts of its replacement); a part is text, or a node with its text."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in SWAPS:
            yield node, ("(", left, SWAPS[type(op)], right, ")")
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield node, ("(", left, SWAPS[type(op)], right, ")")
        case ast.BoolOp(op, [left, right]):
            yield node, ("(", left, SWAPS[type(op)], right, ")")
        case ast.UnaryOp(ast.Not(), operand):
            yield node, (operand,)
        case ast.Constant(value) if type(value) in (int, bool):
            yield node, (str(not value if type(value) is bool else value + 1),)
        case ast.If(test) | ast.IfExp(test) | ast.While(test):
            yield test, ("(not (", test, "))")
        case ast.Expr(ast.Call()):
            yield node, ("pass",)
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield node, ("return None",)
        case ast.AugAssign(target, op, value):
            yield node, (target, "-=" if isinstance(op, ast.Add) else "+=", value)


def text_of(node, source):
    """Where a node's text begins and ends in the bytes of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return slice(
        starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    )


def with_fault(source, node, parts):
    """Return the changed source, and a line that describes the change."""
    texts = [
        part if isinstance(part, str) else source[text_of(part, source)].decode() for part in parts
    ]
    new, at = " ".join(texts), text_of(node, source)
    return source[: at.start] + new.encode() + source[at.stop :], f"{source[at].decode()} -> {new}"


def faults(room, count, seed):
    """Yield (path, its bytes, the changed bytes, (place, description)) of each fault of a room."""
    found = []
    for path in sorted((ROOT / "odb_nodes" / room).rglob("*.py")):
        source = path.read_bytes()
        found += [(path, source, *place) for place in places(ast.parse(source))]
    for path, source, node, parts in random.Random(f"{room}{seed}").sample(found, count):
        changed, about = with_fault(source, node, parts)
        yield path, source, changed, (f"{path.relative_to(ROOT)}:{node.lineno}", about)


def found_by(arguments):
    """The first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--timeout=120", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"the limit of {LIMIT_S} s"
    if process.returncode in (0, 5):  # 5: no tests
        return None
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or output.splitlines()[-1:])[0]


def stages(room, slow):
    """Yield the tests that are run one after another, by name and arguments of pytest."""
    tests = [f"tests/{room}", RESUME]
    yield "room", [*tests, "-m", "not slow"]
    yield "fast", []
    if slow:
        yield "slow", [*tests, "--runslow", "-m", "slow"]


def try_fault(tests, path, source, changed):
    """Return in which stage the fault is found, and by which test."""
    try:
        path.write_bytes(changed)
        for stage, arguments in tests:
            if (test := found_by(arguments)) is not None:
                return stage, test
        return "", ""
    finally:
        path.write_bytes(source)


def main():
    """Try the faults that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="+", default=ROOMS)
    parser.add_argument("--count", type=int, default=12, help="faults of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True, help="JSON lines")
    parser.add_argument("--slow", action="store_true", help="run slow tests of the room, too")
    given = parser.parse_args()
    if subprocess.check_output(["git", "status", "--porcelain", "odb_nodes"], cwd=ROOT):
        parser.error("`odb_nodes` has changes that are not committed: use a clean worktree")
    lines = given.log.read_text().splitlines() if given.log.exists() else []
    done = {tuple(record["fault"]): record for record in map(json.loads, lines)}
    for room in given.rooms:
        for path, source, changed, fault in faults(room, given.count, given.seed):
            if fault in done:
                continue
            start = time.monotonic()
            stage, test = try_fault(stages(room, given.slow), path, source, changed)
            done[fault] = {"fault": fault, "room": room, "stage": stage, "test": test}
            with given.log.open("a") as log:
                log.write(json.dumps(done[fault]) + "\n")
            took_s = time.monotonic() - start
            print(f"{fault}: {stage or 'SURVIVES'} {test} ({took_s:.0f} s)", flush=True)
    found = sum(bool(record["stage"]) for record in done.values())
    print(f"the tests found {found} of {len(done)} faults")


if __name__ == "__main__":
    main()
