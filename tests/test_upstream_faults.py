"""docs/upstream_faults.md names tests and files that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "upstream_faults.md").read_text()
# Of the table of the trainers: library, functions of ours, canary.
TRAINERS = re.findall(
    r"^\| (accelerate|transformers|lightning)\b.* \| ([^|]+) \| `([\w/.:]+)` \|$", PAGE, re.M
)


def functions_of(path):
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_and_file_that_is_named_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    assert not [one for one in named if one[1] not in functions_of(f"tests/{one[0]}")]
    files = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(files) > 20
    rooms = [ROOT / room for room in ("odb_nodes", "tests")]
    assert not [file for file in files if not any((room / file).exists() for room in rooms)]


def test_the_canaries_of_the_trainers_are_those_of_the_table():
    canaries = {
        (library, test)
        for library, _, _ in TRAINERS
        for test in functions_of(f"tests/_compat/test_{library}.py")
        if test.startswith("test_")
    }
    named = {(library, test) for library, _, test in TRAINERS}
    assert {one for one in named if "::" not in one[1]} == canaries


def test_every_function_that_a_canary_guards_exists():
    guarded = [
        (library, name) for library, cell, _ in TRAINERS for name in re.findall(r"`(\w+)`", cell)
    ]
    assert len(guarded) > 30
    assert not [
        one for one in guarded if one[1] not in functions_of(f"odb_nodes/_compat/{one[0]}.py")
    ]
