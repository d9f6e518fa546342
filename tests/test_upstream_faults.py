"""docs/upstream_faults.md names tests and files that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "upstream_faults.md").read_text()


def functions_of(path):
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    missing = [
        (file, test) for file, test in named if test not in functions_of(ROOT / "tests" / file)
    ]
    assert not missing


def test_every_file_that_is_named_exists():
    files = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(files) > 20
    assert not [
        file
        for file in files
        if not any((ROOT / room / file).exists() for room in ("odb_nodes", "tests"))
    ]
