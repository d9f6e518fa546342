"""Pictures as SVG, which takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 260  # as wide as a column, so that text is not made small on a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 44
_DIGIT = 7.5  # about as wide as a character, in pixels
COLORS = 8  # colours that the page has; further curves are dashed

_ALIKE = 1e-9  # relative: values that differ by less are drawn as one
_NOTHING = 1e-100  # drawn as 0


@dataclass(frozen=True)
class Curve:
    """Points of one run, in order of x.

    Attributes:
        run: number of the run, which decides the colour.
        points: (x, y), finite.
        layer: number of curves that it lies on; above 0 it is drawn with gaps, which show them.
        marks: x where a line is drawn down the picture.
    """

    run: int
    points: Sequence[tuple[float, float]]
    layer: int = 0
    marks: Sequence[float] = ()


@dataclass(frozen=True)
class Axis:
    """An axis from its lowest to its highest tick.

    Attributes:
        ticks: values, ascending, at least two.
        is_log: whether equal factors are equally far apart.
    """

    ticks: Sequence[float]
    is_log: bool = False

    @classmethod
    def linear(cls, values: Iterable[float], count: int = 5) -> Axis:
        """Return an axis that has all values, with about so many ticks at round numbers."""
        known = [*values] or [0.0]
        low, high = min(known), max(known)
        largest = max(abs(low), abs(high))
        if high - low <= _ALIKE * largest or largest < _NOTHING:
            half = largest / 2 if largest >= _NOTHING else 0.5
            low, high = low - half, high + half
        rough = (high - low) / count
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.99)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls([number * step for number in range(first, last + 1)])

    @classmethod
    def log(cls, values: Iterable[float]) -> Axis:
        """Return an axis of powers of two that has all values, which are above 0."""
        known = [*values] or [1.0]
        first = math.floor(math.log2(min(known)))
        last = max(math.ceil(math.log2(max(known))), first + 1)
        step = -(-(last - first) // 8)
        return cls([2.0**power for power in range(first, last + step, step)], is_log=True)

    def place(self, value: float) -> float:
        """Return where a value is, from 0 to 1."""
        low, high, at = self.ticks[0], self.ticks[-1], value
        if self.is_log:
            low, high, at = math.log2(low), math.log2(high), math.log2(value)
        return (at - low) / (high - low)


def line_chart(title: str, text: str, x_label: str, curves: Sequence[Curve]) -> str:
    """Return a picture of curves over one another."""
    x_axis = Axis.linear(x for curve in curves for x, _ in curve.points)
    y_axis = Axis.linear(y for curve in curves for _, y in curve.points)
    marks = []
    for curve in curves:
        places = [(_x(x_axis, x), _y(y_axis, y)) for x, y in curve.points]
        look = f'class="c{curve.run % COLORS}"'
        for x in (one for one in curve.marks if 0 <= x_axis.place(one) <= 1):
            at = f'x1="{_x(x_axis, x):.1f}" x2="{_x(x_axis, x):.1f}"'
            marks.append(f'<line {look} {at} y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        if curve.layer:
            look += f' stroke-dasharray="9 {9 * curve.layer}"'
        elif curve.run >= COLORS:
            look += f' stroke-dasharray="{2 + 2 * (curve.run // COLORS)} 3"'
        if len(places) == 1:
            marks.append(f'<circle {look} cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3"/>')
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            marks.append(f'<polyline {look} points="{path}"/>')
    marks = [*_grid(x_axis, y_axis, x_label, ""), *marks]
    return svg("".join(marks), (WIDTH, HEIGHT), title=title, text=text)


def scatter(
    title: str, text: str, labels: tuple[str, str], dots: Sequence[tuple[Curve, float]]
) -> str:
    """Return a picture of dots over two logarithmic axes."""
    x_axis = Axis.log(curve.points[0][0] for curve, _ in dots)
    y_axis = Axis.log(curve.points[0][1] for curve, _ in dots)
    marks = [
        f'<circle class="c{curve.run % COLORS} dot" cx="{_x(x_axis, curve.points[0][0]):.1f}" '
        f'cy="{_y(y_axis, curve.points[0][1]):.1f}" r="{radius:.1f}"/>'
        for curve, radius in dots
    ]
    marks = [*_grid(x_axis, y_axis, *labels), *marks]
    return svg("".join(marks), (WIDTH, HEIGHT), title=title, text=text)


def svg(content: str, size: tuple[int, int], *, title: str, text: str, attributes: str = "") -> str:
    """Return a picture with its title, and with words for readers that cannot see it."""
    width, height = size
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}. '
        f'{escape(text)}" {attributes}><title>{escape(title)}</title><desc>{escape(text)}</desc>'
        f"{content}</svg>"
    )


def number(value: float) -> str:
    """Return a number in a few characters."""
    if abs(value) >= 1e4:
        rounded = float(f"{value:.3g}")  # first: 999,600 is 1M, and not 1,000k
        units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
        limit, unit = next(one for one in units if abs(rounded) >= one[0])
        return f"{rounded / limit:.3g}{unit}"
    is_whole = value == round(value) or abs(value) >= 999.5
    return f"{value:,.0f}" if is_whole else f"{value:.3g}"


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.place(value) * (HEIGHT - _TOP - _BOTTOM)


def _grid(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    marks = []
    for tick in y_axis.ticks:
        y = _y(y_axis, tick)
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        )
    free = math.inf  # up to where, so that no label touches the one to its right
    for tick in reversed(x_axis.ticks):
        x, text = _x(x_axis, tick), number(tick)
        half = _DIGIT * len(text) / 2
        anchor, middle = ("end", x - half) if x + half > WIDTH else ("middle", x)
        if middle + half < free:
            free = middle - half - _DIGIT
            marks.append(
                f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="{anchor}">{text}</text>'
            )
    bottom_line = HEIGHT - 6
    marks.append(f'<text x="{right}" y="{bottom_line}" text-anchor="end">{escape(x_label)}</text>')
    if y_label:
        marks.append(f'<text x="4" y="{bottom_line}">{escape(y_label)} (up)</text>')
    return marks
