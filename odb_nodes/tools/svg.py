"""Figures in SVG that follow the light or dark colours of the reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from odb_nodes.monitor.reporting.svg import svg

__all__ = ["Level", "bars", "heat_map", "levels"]

COLOUR = "#4a7fc1"
"""Readable on white and on black."""
_STYLE = (
    "svg{color:#222;font:12px system-ui,sans-serif}svg text{fill:currentColor}"
    "@media(prefers-color-scheme:dark){svg{color:#ddd}}"
)
_WIDTH, _LEFT, _TOP, _BOTTOM = 720, 60, 24, 22  # pixels
_NAMES, _ROW = 190, 20  # pixels, of `levels`


class Level(NamedTuple):
    """A bar of `levels`.

    Attributes:
        name: what it is of.
        value: between 0 and 1.
        is_own: whether it has a colour, or is one of those to compare with.
        mark: what is written behind its value.
    """

    name: str
    value: float
    is_own: bool
    mark: str = ""


def levels(groups: Mapping[str, Sequence[Level]], *, axis: str, title: str, text: str) -> str:
    """Return groups of bars below one another, over one axis from 0 to 1."""
    scale, y = _WIDTH - _NAMES - 100, _TOP + 6
    grid: list[str] = []
    parts: list[str] = []
    for name, group in groups.items():
        y += _ROW
        parts.append(f'<text x="4" y="{y - 5}" font-weight="600">{escape(name)}</text>')
        for one in group:
            look = f'fill="{COLOUR}"' if one.is_own else 'fill="#888" fill-opacity="0.6"'
            wide = one.value * scale
            weight = ' font-weight="600"' if one.mark else ""
            parts.append(
                f'<text x="{_NAMES - 6}" y="{y + 13}" text-anchor="end"{weight}>'
                f'{escape(one.name)}</text><rect x="{_NAMES}" y="{y + 2}" width="{wide:.1f}" '
                f'height="{_ROW - 5}" {look}/><text x="{_NAMES + wide + 5:.1f}" y="{y + 13}"'
                f"{weight}>{one.value:.3f}{escape(one.mark and f' {one.mark}')}</text>"
            )
            y += _ROW
    for tick in range(6):
        x = _NAMES + tick / 5 * scale
        grid.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP + 6}" y2="{y + 4}" stroke="currentColor" '
            f'stroke-opacity="0.2"/><text x="{x:.1f}" y="{y + 18}" text-anchor="middle">'
            f"{tick / 5:g}</text>"
        )
    parts.append(
        f'<text x="{_NAMES + scale / 2}" y="{y + 36}" text-anchor="middle">{escape(axis)}</text>'
    )
    return _figure("".join((*grid, *parts)), y + 20 - _TOP, title, text)


def bars(
    counts: Sequence[float], labels: Sequence[str], *, axes: tuple[str, str], title: str, text: str
) -> str:
    """Return a bar for each count, from left to right."""
    height, step = 160, (_WIDTH - _LEFT) / len(counts)
    scale = height / (max(counts) or 1)
    parts = []
    for index, count in enumerate(counts):
        x, tall = _LEFT + index * step, count * scale
        parts.append(
            f'<rect x="{x:.1f}" y="{_TOP + height - tall:.1f}" width="{max(step - 1, 0.5):.1f}" '
            f'height="{tall:.1f}" fill="{COLOUR}"><title>{escape(labels[index])} to '
            f"{escape(labels[index + 1])}: {count:,.6g}</title></rect>"
        )
    every = -(-len(labels) // 10)
    for index in range(0, len(labels), every):
        parts.append(
            f'<text x="{_LEFT + index * step:.1f}" y="{_TOP + height + 15}" '
            f'text-anchor="middle">{escape(labels[index])}</text>'
        )
    for y, tick in ((_TOP + 10, f"{max(counts):,.6g}"), (_TOP + height, "0")):
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{tick}</text>')
    across, up = map(escape, axes)
    parts.append(
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_TOP + height + 32}" text-anchor="middle">{across}'
        f'</text><text transform="translate(12 {_TOP + height / 2}) rotate(-90)" '
        f'text-anchor="middle">{up}</text>'
    )
    return _figure("".join(parts), height + 16, title, text)


def heat_map(values: NDArray[np.float64], *, title: str, text: str) -> str:
    """Return a cell for each value, darker the higher it is: rows of ranks, columns of steps."""
    rows, columns = values.shape
    tall, step = max(4, min(18, 480 // rows)), (_WIDTH - _LEFT) / columns
    parts = []
    for row, cells in enumerate(values.tolist()):
        y = _TOP + row * tall
        if tall >= 10 or row in (0, rows - 1):
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 9}" text-anchor="end">{row}</text>')
        parts += [
            f'<rect x="{_LEFT + column * step:.1f}" y="{y}" width="{step + 0.2:.1f}" '
            f'height="{tall - 1}" fill="{COLOUR}" fill-opacity="{cell:.2f}"/>'
            for column, cell in enumerate(cells)
        ]
    return _figure("".join(parts), rows * tall, title, text)


def _figure(content: str, height: int, title: str, text: str) -> str:
    heading = f'<text x="{_LEFT}" y="14" font-weight="600">{escape(title)}</text>'
    drawn = svg(
        f"<style>{_STYLE}</style>{heading}{content}",
        (_WIDTH + 20, height + _TOP + _BOTTOM),
        title=title,
        text=text,
        attributes='xmlns="http://www.w3.org/2000/svg" style="max-width:100%"',
    )
    return f"{drawn}\n"
