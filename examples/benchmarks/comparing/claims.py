"""Claims and tables of pages, each checked against every run that has their tables.

A claim is a text of the page, in which a name in braces stands for cells of a run, and a condition
that these must meet in each run. Where runs differ, the page has the least and the greatest figure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
FIGURE = rf"({NUMBER.pattern}(?:\s+to\s+{NUMBER.pattern})?)"
NAME = re.compile(r"\{(\w+)\}")

Run = Mapping[str, Sequence[Mapping[str, str]]]
"""Title of a table -> its rows."""


class Cell(NamedTuple):
    """A number of a run's table; of "yes" and "no", 1 and 0.

    Attributes:
        table: title of the table.
        row: the first column of its row.
        column: name of its column.
        place: of the number within the cell.
        per: the number that it is divided by.
    """

    table: str
    row: str
    column: str
    place: int = 0
    per: Cell | None = None

    def text(self, run: Run) -> str:
        """Return the number as it stands in a run.

        Raises:
            LookupError: the run does not have the number.
        """
        if self.per is not None:
            return f"{self.value(run):.2f}"
        text = text_of(run, self.table, self.row, self.column)
        numbers = NUMBER.findall({"yes": "1", "no": "0"}.get(text, text))
        if len(numbers) <= self.place:
            raise LookupError(f"no number {self.place} in {self.table}: {self.row}: {self.column}")
        return str(numbers[self.place])

    def value(self, run: Run) -> float:
        """Return the number."""
        if self.per is not None:
            return self._replace(per=None).value(run) / self.per.value(run)
        return value_of(self.text(run))


def text_of(run: Run, table: str, row: str, column: str) -> str:
    """Return a cell of a run."""
    for cells in run[table]:
        if cells[""] == row:
            if column in cells:
                return cells[column]
            raise LookupError(f"no column {column!r} in the table {table!r}")
    raise LookupError(f"no row {row!r} in the table {table!r}")


def value_of(number: str) -> float:
    """Return the value of a number with commas."""
    return float(number.replace(",", ""))


def spread_of(numbers: Sequence[str]) -> str:
    """Return the least and the greatest number, or the only one."""
    least, most = min(numbers, key=value_of), max(numbers, key=value_of)
    return least if value_of(least) == value_of(most) else f"{least} to {most}"


@dataclass(frozen=True)
class Claim:
    """A text of the page, and what must hold for it in each run.

    Attributes:
        text: with names of `cells` in braces.
        holds: is called with the value of each of `cells`, or a list of values, by name.
        cells: the numbers; several share a name where the text has the range of them.
    """

    text: str
    holds: Callable[..., bool]
    cells: Mapping[str, Cell | Sequence[Cell]]

    def of_name(self, name: str) -> Sequence[Cell]:
        """Return the cells of a name."""
        cells = self.cells[name]
        return [cells] if isinstance(cells, Cell) else cells

    @property
    def tables(self) -> list[str]:
        """The titles of its tables."""
        return [*dict.fromkeys(cell.table for name in self.cells for cell in self.of_name(name))]

    def figures(self, run: Run) -> dict[str, list[str]]:
        """Return the figures of each name in a run."""
        return {name: [cell.text(run) for cell in self.of_name(name)] for name in self.cells}

    def is_met(self, run: Run) -> bool:
        """Return whether the claim holds in a run."""
        values = {name: [cell.value(run) for cell in self.of_name(name)] for name in self.cells}
        single = {name for name, cells in self.cells.items() if isinstance(cells, Cell)}
        return self.holds(**{k: v[0] if k in single else v for k, v in values.items()})

    @property
    def pattern(self) -> str:
        """An expression for the text with any figures, which are groups, and any white space."""
        parts = NAME.split(self.text)[::2]
        return FIGURE.join(re.escape(part).replace(r"\ ", r"\s+") for part in parts)

    def put(self, match: re.Match[str], runs: Sequence[Run]) -> str:
        """Return the matching text of the page with the figures of the runs."""
        of_runs = [self.figures(run) for run in runs]
        text, begin = match[0], match.start()
        for group, name in reversed([*enumerate(NAME.findall(self.text), start=1)]):
            figure = spread_of([number for figures in of_runs for number in figures[name]])
            text = text[: match.start(group) - begin] + figure + text[match.end(group) - begin :]
        return text


@dataclass(frozen=True)
class PageTable:
    """A table of the page.

    Attributes:
        columns: title on the page -> table and column of a run.
        rows: title on the page -> name of the row in the tables of a run.
        corner: title of the column of rows.
    """

    columns: Mapping[str, tuple[str, str]]
    rows: Mapping[str, str]
    corner: str = ""

    @property
    def tables(self) -> list[str]:
        """The titles of its tables of a run."""
        return [*dict.fromkeys(table for table, _ in self.columns.values())]

    @property
    def header(self) -> str:
        """The first line on the page."""
        return re.sub("  +", " ", f"| {self.corner} | {' | '.join(self.columns)} |")

    def put(self, _match: re.Match[str], runs: Sequence[Run]) -> str:
        """Return the lines of the table."""
        rows = {
            title: [merged(cells_of(name, *source, runs)) for source in self.columns.values()]
            for title, name in self.rows.items()
        }
        for title, cells in rows.items():
            if not any(cells):
                raise LookupError(f"no row {self.rows[title]!r} in {', '.join(self.tables)}")
        for position, (table, column) in enumerate(self.columns.values()):
            if not any(cells[position] for cells in rows.values()):
                raise LookupError(f"no column {column!r} in the table {table!r}")
        lines = [self.header, "| --- |" + " --- |" * len(self.columns)]
        lines += [f"| {title} | " + " | ".join(cells) + " |" for title, cells in rows.items()]
        return "".join(re.sub("  +", " ", line) + "\n" for line in lines)

    @property
    def pattern(self) -> str:
        """An expression for the table with any rows."""
        return re.escape(self.header) + r"\n(?:\|.*\n)*"


def cells_of(name: str, table: str, column: str, runs: Sequence[Run]) -> list[str]:
    """Return the cell of each run; nothing if no run has one.

    Raises:
        LookupError: only some runs have it.
    """
    rows = [row for run in runs for row in run[table] if row[""] == name]
    cells = [row[column] for row in rows if row.get(column)]
    if len(cells) not in (0, len(runs)):
        raise LookupError(f"{table}: {name}: {column} is in {len(cells)} of {len(runs)} runs")
    return cells


def merged(cells: Sequence[str]) -> str:
    """Return a cell of the page: that of all runs, or the range of each number over the runs."""
    if len(cells) == 1:
        return cells[0]
    texts = [cell.partition(" (")[0] for cell in cells]  # without the range of a run
    if len({NUMBER.sub("#", text) for text in texts}) > 1:
        return " / ".join(dict.fromkeys(texts))
    of_runs = [NUMBER.findall(text) for text in texts]
    spreads = iter([spread_of(numbers) for numbers in zip(*of_runs, strict=True)])
    return NUMBER.sub(lambda _: next(spreads), texts[0]) if texts else ""


class Report(NamedTuple):
    """What a check has found, and the page as the runs have it."""

    errors: list[str]
    in_no_run: list[str]
    in_one_run: list[str]
    page: str


def check(
    page: str, runs: Mapping[str, Run], claims: Sequence[Claim], tables: Sequence[PageTable]
) -> Report:
    """Check a page: that it has each text, and that this holds in each run with its tables."""
    report = Report([], [], [], page)
    parts: list[Claim | PageTable] = [*claims, *tables]
    for part in parts:
        name = part.text if isinstance(part, Claim) else part.header
        matches = [*re.finditer(part.pattern, page)]
        if len(matches) != 1:
            report.errors.append(f"{len(matches)} times on the page: {name}")
        having = {one: run for one, run in runs.items() if run.keys() >= {*part.tables}}
        if len(having) < 2:
            listed = report.in_one_run if having else report.in_no_run
            listed.append(f"{', '.join(part.tables)}, for: {name}")
        if not having:
            continue
        try:
            if isinstance(part, Claim):
                report.errors.extend(failures(part, having))
            for match in matches[:1]:
                text = part.put(match, [*having.values()])
                if text != match[0]:
                    report.errors.append(f"the page says:\n{match[0]}\nand the runs:\n{text}")
                    page = page[: match.start()] + text + page[match.end() :]
        except LookupError as error:
            report.errors.append(f"{error.args[0]}, for: {name}")
    return report._replace(page=page)


def failures(claim: Claim, runs: Mapping[str, Run]) -> Iterator[str]:
    """Yield an error for each run in which a claim does not hold."""
    figures = "; ".join(f"{name}: {claim.figures(run)}" for name, run in runs.items())
    for name, run in runs.items():
        if not claim.is_met(run):
            yield f"not so in {name}: {claim.text} ({', '.join(claim.tables)}: {figures})"


def read_run(path: Path) -> Run:
    """Return the tables that `compare.py --json` wrote.

    Raises:
        ValueError: the run shows nothing.
    """
    tables: list[dict[str, Any]] = json.loads(path.read_text())
    if quick := [table["title"] for table in tables if table["quick"]]:
        raise ValueError(f"{path} has tables of --quick, which show nothing: {', '.join(quick)}")
    return {table["title"]: table["rows"] for table in tables}
