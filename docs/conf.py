"""How Sphinx makes the site: `sphinx-build -W docs docs/_build/site`.

`python docs/conf.py` writes the index of public names, `api.md`, from their docstrings.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odb_nodes import __version__

project = "odb-nodes"
version = release = __version__
author = copyright = "the maintainers of odb-nodes"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
default_role = "code"  # for the single backticks of docstrings
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"odb-nodes {__version__}"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields of dataclasses are described once

napoleon_custom_sections = [("Class attributes", "params_style")]

PUBLIC = {
    "odb_nodes": "",
    "odb_nodes.collate": "See [Packing](packing.md).",
    "odb_nodes.contract": "For [a node of your own](own-nodes.md).",
    "odb_nodes.planning": "",
    "odb_nodes.memory": "See [Memory](memory.md).",
    "odb_nodes.monitor": "See [Monitoring](monitoring.md).",
    "odb_nodes.tasks": "See [Several tasks](tasks.md).",
    "odb_nodes.vision": "See [Images and text](vision.md). Extra: `vision`.",
    "odb_nodes.testing": "",
    "odb_nodes.tools.lengths": "",
    "odb_nodes.tools.simulate": "",
    "odb_nodes.tools.profile": "",
    "odb_nodes.tools.baselines": "",
    "odb_nodes.tools.tune": "",
    "odb_nodes.tools.estimate": "",
    "odb_nodes.tools.inspection": "",
    "odb_nodes.tools.reshard": "",
    "odb_nodes.tools.steps": "",
    "odb_nodes.tools.source_report": "",
    "odb_nodes.integrations.huggingface": "See [the Trainer](huggingface.md). Extra: `hf`.",
    "odb_nodes.integrations.accelerate": "See [Accelerate](accelerate.md).",
    "odb_nodes.integrations.lightning": "See [Lightning](lightning.md).",
    "odb_nodes.integrations.llama_factory": "See [LLaMA-Factory](llama_factory.md).",
    "odb_nodes.integrations.learning_rate": "",
}
"""Modules whose `__all__` is public, and what their section of `api.md` begins with."""

ALIASES = {
    "ESTIMATE_SAMPLES": "How many samples `estimate_steps` looks at.",
    "Strategy": "The type of a name in `STRATEGIES`.",
    "Record": "One record of a run: a dict of plain values.",
    "SourceState": "The type of a state's field that holds the state of a source.",
    "SourceStates": "The type of a state's field that holds the states of several sources by name.",
    "STRATEGIES": "The names of the ways to make batches that `Baselines` compares.",
}
"""Public names that have no docstring of their own."""

_SECTION = re.compile(r"[A-Z][a-z ]+:$")


def with_code_blocks(lines: list[str]) -> Iterator[str]:
    """Yield a docstring with its indented code, which is Markdown, as blocks of code."""
    in_section = in_code = False
    for number, line in enumerate(lines):
        is_indented = line.startswith("    ")
        if line and not is_indented:
            in_section, in_code = bool(_SECTION.match(line)), False
        if is_indented and not in_section and not in_code and not lines[number - 1]:
            in_code = True
            yield from (".. code-block:: python", "")
        yield line


def public_names(module: str) -> list[str]:
    """Return the public names of a module, in the order of the alphabet."""
    names = importlib.import_module(module).__all__
    return [name for name in sorted(names, key=str.lower) if not name.startswith("_")]


def parameters_of(value: Any) -> str:
    """Return the parameters of a function with their plain defaults; "" for others."""
    if inspect.isclass(value) or not inspect.isroutine(value):
        return ""
    shown = []
    signature = inspect.signature(value)
    for parameter in signature.parameters.values():
        default = parameter.default
        if default is not parameter.empty and not isinstance(default, int | float | str | None):
            default = ...
        shown.append(parameter.replace(annotation=parameter.empty, default=default))
    text = str(signature.replace(parameters=shown, return_annotation=signature.empty))
    return text.replace("Ellipsis", "...")


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring on one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.:;])\s(?=[A-Z])|;\s", paragraph)[0].rstrip(".:;") + "."


def api_page() -> str:
    """Return `api.md`: each public name with the first sentence of its docstring."""
    lines = [
        "# API reference",
        "",
        "The public names; other names may change without notice. Their",
        "docstrings, with types, units, shapes and errors, are in the [reference](reference.md) of",
        "the site; `python -m pydoc odb_nodes.ODBDataLoader` shows one of them in a terminal.",
        "`python docs/conf.py` writes this page.",
    ]
    known: set[str] = set()
    for module, text in PUBLIC.items():
        if ".tools." in module and not any(".tools." in line for line in lines):
            lines += [
                "",
                "## `odb_nodes.tools`",
                "",
                "See [Before training](before-training.md).",
                "",
            ]
        names = public_names(module)
        new_names = [name for name in names if name not in known]
        known.update(names)
        if ".tools." in module:  # the guide says what they do
            lines.append(f"- `{module}`: {', '.join(f'`{name}`' for name in new_names)}")
            continue
        lines += ["", f"## `{module}`", "", *([text, ""] if text else [])]
        for name in new_names:
            value = getattr(importlib.import_module(module), name)
            summary = first_sentence(ALIASES.get(name) or value.__doc__ or "")
            lines.append(f"- `{name}{parameters_of(value)}`: {summary}")
        if again := [f"`{name}`" for name in names if name not in new_names]:
            lines.append(f"- from above: {', '.join(again)}")
    lines.append("")
    return "\n".join(lines)


def reference_page() -> str:
    """Return the page that has the docstrings of all public names."""
    lines, seen = ["# Reference", ""], set()
    for module in PUBLIC:
        values = {
            one: getattr(importlib.import_module(module), one) for one in public_names(module)
        }
        members = ", ".join(name for name, value in values.items() if id(value) not in seen)
        seen |= {id(value) for value in values.values()}
        lines += [f"## `{module}`", "", "```{eval-rst}", f".. automodule:: {module}"]
        lines += [f"   :members: {members}", "   :show-inheritance:", "```", ""]
    return "\n".join(lines)


def tutorial_page() -> str:
    """Return the notebook of first steps as a page: the cells of its script."""
    script = Path(__file__).parents[1] / "examples/notebooks/first_steps.py"
    page = []
    for cell in script.read_text().split("\n# %%")[1:]:
        kind, _, text = cell.partition("\n")
        if "[markdown]" in kind:
            page.append("\n".join(line[2:] for line in text.splitlines()))
        else:
            page.append(f"```python\n{text.strip()}\n```")
    return "\n\n".join(page)


def setup(app: Any) -> None:
    """Read docstrings as they are written."""

    def of_docstring(_app: Any, _kind: str, _name: str, _object: Any, _options: Any, lines: Any):
        lines[:] = with_code_blocks(lines)

    def of_page(_app: Any, name: str, text: list[str]) -> None:
        text[0] = text[0].replace("../CHANGELOG.md)", "changelog.md)")
        if name == "reference":
            text[0] = reference_page()
        if name == "tutorial":
            text[0] = tutorial_page()

    app.connect("autodoc-process-docstring", of_docstring, priority=400)  # before napoleon
    app.connect("source-read", of_page)


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(api_page())
