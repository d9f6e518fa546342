"""Each notebook is the script of its name, which is what people read and change."""

from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")

FOLDER = Path(__file__).parents[2] / "examples/notebooks"


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_script(script):
    notebook, expected = jupytext.read(script.with_suffix(".ipynb")), jupytext.read(script)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in expected.cells
    ], f"run `jupytext --to ipynb {script.name}`"
    assert not any(cell.get("outputs") for cell in notebook.cells)
