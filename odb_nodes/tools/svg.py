"""Figures in SVG that follow the light or dark colours of the reader."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from odb_nodes.monitor.reporting.svg import svg

__all__ = ["bars", "heat_map"]

COLOUR = "#4a7fc1"
"""Readable on white and on black."""
_STYLE = (
    "svg{color:#222;font:12px system-ui,sans-serif}svg text{fill:currentColor}"
    "@media(prefers-color-scheme:dark){svg{color:#ddd}}"
)
_WIDTH, _LEFT, _TOP, _BOTTOM = 720, 60, 24, 22  # pixels


def bars(counts: Sequence[float], labels: Sequence[str], *, title: str, text: str) -> str:
    """Return a bar for each count, from left to right.

    Args:
        counts: the heights, not negative.
        labels: one for the left edge of each bar, and one for the right edge of the last.
        title: what is shown.
        text: what is to be seen, in words, for readers that cannot see it.
    """
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
    parts.append(
        f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{max(counts):,.6g}</text>'
    )
    return _figure("".join(parts), height, title, text)


def heat_map(values: NDArray[np.float64], *, title: str, text: str) -> str:
    """Return a cell for each value, darker the higher it is: rows of ranks, columns of steps.

    Args:
        values: (rows, columns) between 0 and 1.
        title: what is shown.
        text: what is to be seen, in words, for readers that cannot see it.
    """
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
