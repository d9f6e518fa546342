"""docs/internals/upstream_faults.md names tests and files that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/internals/upstream_faults.md").read_text()
TRAINERS = ("accelerate", "transformers", "lightning")


def functions_of(path):
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_and_file_that_is_named_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    assert not [(file, test) for file, test in named if test not in functions_of(f"tests/{file}")]
    files = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(files) > 20
    rooms = [ROOT / room for room in ("odb_nodes", "tests")]
    assert not [file for file in files if not any((room / file).exists() for room in rooms)]


def test_every_function_that_a_canary_guards_exists():
    guarded = re.findall(rf"`({'|'.join(TRAINERS)})\.(\w+)`", PAGE)
    assert len(guarded) > 15
    functions = {name: functions_of(f"odb_nodes/_compat/{name}.py") for name in TRAINERS}
    assert not [(name, function) for name, function in guarded if function not in functions[name]]
