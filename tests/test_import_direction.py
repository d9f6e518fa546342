"""Imports go one way through the rooms of the package, in no circle, and private rooms stay so.

Every import is read from the source with `ast`, those within functions and under `TYPE_CHECKING`
too, and modules that are imported by name (`import_module("x")`, `import_extra("x", ...)`).
"""

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "odb_nodes"

ROOMS = (
    "errors",
    "_compat",  # what we rely on inside of other libraries
    "_support",
    "core.sample",
    "core.token_values",
    "core.sample_block",
    "core.planning",
    "core.step_info",
    "core.contract",
    "core.sources",
    "core.processing",
    "core.collate",
    "core.nodes",
    "core.alignment.exchange",
    "core.alignment",
    "core.loader",
    "core",
    "training.ledger",
    "training.memory",
    "training.tasks",
    "testing",
    "training.monitor",
    "training.checkpoints",
    "training.vision",
    "training",
    "collate",  # from here on: public paths
    "contract",
    "memory",
    "monitor",
    "planning",
    "tasks",
    "vision",
    "tools",
    "integrations",
    "cli",
    "_public",
    "",  # odb_nodes/__init__.py
    "__main__",
)
"""The rooms: each imports from those before it, and from itself."""

FRAMEWORKS = {
    "PIL": ("_compat", "integrations", "training.vision"),
    "accelerate": ("_compat", "integrations"),
    "datasets": ("_compat", "cli", "integrations"),
    "lightning": ("_compat", "integrations"),
    "llamafactory": ("_compat", "integrations"),
    "mlflow": ("training.monitor",),
    "plotly": ("training.monitor",),
    "ray": ("core.processing",),
    "tokenizers": ("cli",),
    "transformers": ("_compat", "cli", "integrations", "training.vision"),
    "wandb": ("training.monitor",),
}
"""Optional package -> the rooms that may import it."""

PURE = "core.planning"
PURE_NEEDS = {"numpy", "typing_extensions", *sys.stdlib_module_names}  # the second for types alone
PRIVATE = re.compile(
    rf"{PACKAGE}\.(_support|_compat)\b|from {PACKAGE} import .*\b(_support|_compat)\b"
)


class Import(NamedTuple):
    line: int
    name: str
    late: bool  # within a function: not needed to import the module


def sources_of(root):
    """Return the source of each module of the package by its dotted name."""
    imports = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        imports[name] = path.read_text()
    return imports


def imports_of(module, modules):
    """Yield what a module imports: modules of ours by their full name, others as they are named."""
    is_package = any(other.startswith(f"{module}.") for other in modules)
    parent = module if is_package else module.rpartition(".")[0]
    tree = ast.parse(modules[module])
    in_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), parent)
            members = [f"{base}.{alias.name}" for alias in node.names]
            names = [name for name in members if name in modules]
            names += [base] * (len(names) < len(members))
        elif isinstance(node, ast.Call) and node.args:
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if function in ("import_module", "import_extra") and isinstance(first, ast.Constant):
                names = [first.value]
        yield from (Import(node.lineno, name, id(node) in in_functions) for name in names)


def room_of(module):
    """Return the innermost room that a module of ours is in."""
    inside = module.removeprefix(PACKAGE).removeprefix(".")
    rooms = [room for room in ROOMS if inside == room or (room and inside.startswith(f"{room}."))]
    if not rooms:
        raise ValueError(f"`{module}` is in no room: add its folder to `ROOMS`, in its place.")
    return max(rooms, key=len)


def upward_imports(modules):
    """Return the imports of a later room, and of a framework where it does not belong."""
    upward = []
    for module in modules:
        room = room_of(module)
        for line, name, _ in imports_of(module, modules):
            package = name.partition(".")[0]
            where = f"{module}, line {line}: {room or PACKAGE!r} imports"
            if package == PACKAGE:
                other = room_of(name)
                if ROOMS.index(other) > ROOMS.index(room):
                    upward.append(f"{where} `{name}` of the later room {other or PACKAGE!r}")
            elif room not in FRAMEWORKS.get(package, (room,)):
                upward.append(f"{where} `{name}`, which only {FRAMEWORKS[package]} may")
            elif room == PURE and package not in PURE_NEEDS:
                upward.append(f"{where} `{name}`, but may import numpy alone")
    return upward


def circle(modules):
    """Return modules each of which is imported by the next one, and the first one again."""
    needs = {
        module: {
            imported.name for imported in imports_of(module, modules) if imported.name in modules
        }
        for module in modules
    }
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def needed_by_room(room, modules):
    """Return the packages that importing a room's modules imports, each with a module that does."""
    packages = {}
    waiting = [module for module in modules if room_of(module) == room]
    seen = set(waiting)
    while waiting:
        module = waiting.pop()
        for _, name, late in imports_of(module, modules):
            if name in modules and not late and name not in seen:
                seen.add(name)
                waiting.append(name)
            elif name not in modules and not late:
                packages.setdefault(name.partition(".")[0], module)
    return packages


def private_uses(text):
    """Return the lines that import from a private room."""
    return [line.strip() for line in text.splitlines() if PRIVATE.search(line)]


@pytest.fixture(scope="module")
def modules():
    return sources_of(ROOT)


@pytest.mark.fast
def test_every_import_goes_to_the_same_or_an_earlier_room_and_in_no_circle(modules):
    upward = upward_imports(modules)
    assert not upward, "\n".join(upward)
    assert not circle(modules)


def test_planning_needs_numpy_alone_whatever_it_imports(modules):
    packages = needed_by_room(PURE, modules)
    assert set(packages) <= PURE_NEEDS, packages


def test_examples_use_no_private_room():
    for path in (ROOT / "examples").rglob("*.py"):
        assert not private_uses(path.read_text()), path


def test_code_blocks_of_the_documents_use_no_private_room():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages.remove(ROOT / "docs/internals/contributing.md")  # whose recipes are code of the package
    blocks = [
        (page, block)
        for page in pages
        for block in re.findall(r"```\w+[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert len(blocks) > 20  # or the pattern has lost them
    for page, block in blocks:
        assert not private_uses(block), page


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"core.nodes.batcher": "from odb_nodes.core.loader import Loader"},
            "later room 'core.loader'",
        ),
        ({"core.nodes.batcher": "def f():\n    import odb_nodes.core.loader"}, "batcher, line 2"),
        ({"core.nodes.batcher": "from .. import loader"}, "later room 'core.loader'"),
        (
            {"core.alignment.exchange": "import odb_nodes.core.alignment"},
            "later room 'core.alignment'",
        ),
        ({"core.planning": "import torch"}, "may import numpy alone"),
        ({"core.loader": 'importlib.import_module("datasets.x")'}, "which only ('_compat', 'cli',"),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_named(changed, expected):
    (violation,) = upward_imports(package_with(changed))
    assert expected in violation


def test_circles_ways_round_and_strangers_are_found():
    changed = {
        "core.nodes.a": "import odb_nodes.core.nodes.b",
        "core.nodes.b": "from odb_nodes.core.nodes import a",
    }
    assert {*circle(package_with(changed))} == {"odb_nodes.core.nodes.a", "odb_nodes.core.nodes.b"}
    changed = {"core.planning": "import odb_nodes._support", "_support": "import torch"}
    assert needed_by_room("core.planning", package_with(changed)) == {"torch": "odb_nodes._support"}
    with pytest.raises(ValueError, match="`odb_nodes.attic` is in no room"):
        upward_imports(package_with({"attic": ""}))
    for line in ("from odb_nodes._support.checks import x", "from odb_nodes import _compat"):
        assert private_uses(f"import torch\n{line}\n") == [line]


def package_with(changed):
    """Return a small package of these modules, and of an empty one for each room."""
    empty = {f"{PACKAGE}.{room}".rstrip("."): "" for room in ROOMS}
    return empty | {f"{PACKAGE}.{name}": source for name, source in changed.items()}
