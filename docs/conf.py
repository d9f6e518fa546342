"""How Sphinx makes the site: `sphinx-build -W docs docs/_build/site`."""

import re
from collections.abc import Iterator
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


def setup(app: Any) -> None:
    """Read docstrings as they are written."""

    def of_docstring(_app: Any, _kind: str, _name: str, _object: Any, _options: Any, lines: Any):
        lines[:] = with_code_blocks(lines)

    def of_page(_app: Any, _name: str, text: list[str]) -> None:
        text[0] = text[0].replace("(../CHANGELOG.md)", "(changelog.md)")

    app.connect("autodoc-process-docstring", of_docstring, priority=400)  # before napoleon
    app.connect("source-read", of_page)
