"""The table of slow tests names tests that there are: one that is renamed would become fast."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_name_of_the_table_is_a_test_or_a_file():
    for entry in TESTS.joinpath("slow.txt").read_text().splitlines():
        path, _, name = entry.partition("::")
        source = TESTS.parent.joinpath(path).read_text()
        assert not name or re.search(rf"^(def )?{name}( =|\()", source, re.MULTILINE), entry
