"""The pages of the internals link to files that define what they name."""

import re
from pathlib import Path

import pytest

INTERNALS = Path(__file__).parents[1] / "docs" / "internals"
LINK = re.compile(r"\[`([^`\]]+)`\]\((\.\./\.\./[^)#]+)\)")


@pytest.mark.parametrize("page", sorted(path.name for path in INTERNALS.glob("*.md")))
def test_links_of_a_name_lead_to_the_file_that_defines_it(page):
    for name, path in LINK.findall((INTERNALS / page).read_text()):
        file = INTERNALS / path
        assert file.exists(), f"{name}: {path}"
        if file.suffix == ".py" and "/" not in name and name not in (file.stem, file.name):
            definition = rf"^\s*(def |class )?{re.escape(name)}\b"
            assert re.search(definition, file.read_text(), re.MULTILINE), f"{name}: {path}"
