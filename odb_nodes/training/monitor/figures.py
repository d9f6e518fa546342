"""Figures of plotly, and HTML pages that show figures without a network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from odb_nodes._support.checks import import_extra

Figure = Any
"""A `plotly.graph_objects.Figure`, which a notebook displays."""
Points = Sequence[tuple[float, float]]

COLORS = ("#3b82c4", "#e0702f", "#35a06b", "#b463c9", "#b8901f", "#e0566f", "#1f9e97", "#7c8896")
"""Colors that are readable on white and on black."""
_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtonsToRemove": ["sendChartToCloud"],  # which uploads a figure
    "plotlyServerURL": "",
}
_GREY = "rgba(128,128,128,0.25)"
_MOST_POINTS = 2000  # points of a curve: more would make a page large

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; --page: light-dark(#fff, #15181b);
  --text: light-dark(#1c2024, #e6e8ea); --line: light-dark(#dde1e5, #343b41); }}
body {{ background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif;
  margin: 0 auto; padding: 1rem; max-width: 90rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.2rem; margin-top: 2rem; }}
h3 {{ font-size: 1rem; margin: 0; }} p {{ max-width: 45rem; }}
.grid {{ display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }}
figure {{ margin: 0; padding: .75rem; border: 1px solid var(--line); border-radius: .4rem;
  min-width: 0; }}
figure text:not(.hovertext text) {{ fill: var(--text) !important; }}
.hoverlayer .legend .bg {{ fill: var(--page) !important; stroke: var(--line) !important; }}
.hoverlayer .spikeline {{ stroke: #888 !important; stroke-width: 1px !important; }}
.scroll {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: .9rem; }}
th, td {{ padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; white-space: normal; }}
pre {{ overflow-x: auto; }}
</style><script>{script}</script></head><body>
<main><h1>{title}</h1>
{content}</main></body></html>
"""


class Curve(NamedTuple):
    """A curve of a figure."""

    name: str  # in the legend
    points: Points  # (x, y), sorted by x
    marks: Sequence[float] = ()  # x of vertical lines
    color: int = 0  # index into `COLORS`; a line after the last color is dashed


def curves(title: str, x_title: str, drawn: Iterable[Curve]) -> Figure:
    """Return a figure with several curves; a click in the legend hides a curve."""
    figure = _figure(title, x_title, hovermode="x unified")
    for curve in drawn:
        x, y = zip(*_thinned(curve.points), strict=True)
        color = COLORS[curve.color % len(COLORS)]
        mode = "lines" if len(x) > 1 else "markers"
        line = {"color": color, "width": 1.6}
        line["dash"] = ("solid", "dash", "dot")[curve.color // len(COLORS) % 3]
        figure.add_scatter(x=x, y=y, name=escape(curve.name), mode=mode, line=line)
        for mark in curve.marks:
            figure.add_vline(mark, line={"color": color, "dash": "dot", "width": 1})
    return figure


def dots(
    title: str, axes: tuple[str, str], groups: Mapping[str, Mapping[tuple[int, int], int]]
) -> Figure:
    """Return a figure of dots at (x, y), sized by their count, over logarithmic axes."""
    figure = _figure(title, *axes)
    for number, (name, counts) in enumerate(groups.items()):
        x, y = zip(*counts, strict=True)
        sizes = [min(24.0, 4 + 2 * math.sqrt(count)) for count in counts.values()]
        marker = {"size": sizes, "color": COLORS[number % len(COLORS)], "opacity": 0.5}
        text = [f"{rows} x {width}: {count:,}" for (width, rows), count in counts.items()]
        options = {"name": escape(name), "mode": "markers", "hovertext": text, "hoverinfo": "text"}
        figure.add_scatter(x=x, y=y, marker=marker, **options)
    figure.update_xaxes(type="log").update_yaxes(type="log")
    return figure


def histogram(
    title: str, axes: tuple[str, str], counts: Sequence[int], edges: Iterable[int]
) -> Figure:
    """Return a figure with a bar for each count, labelled by its two edges."""
    labels = [f"{low:,} to {high - 1:,}" for low, high in pairwise(edges)]
    figure = _figure(title, *axes)
    figure.add_bar(x=labels, y=counts, marker={"color": COLORS[0]})
    return figure.update_layout(bargap=0.05)


def levels(title: str, x_title: str, groups: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return a figure of horizontal bars from 0 to 1. groups: group -> name -> value."""
    figure = _figure(title, x_title, height=120 + 22 * sum(map(len, groups.values())))
    for number, (group, values) in enumerate(groups.items()):
        names = [f"{escape(group)}, {escape(name)}" for name in values]
        text = [f"{value:.3f}" for value in values.values()]
        options = {"orientation": "h", "name": escape(group), "text": text}
        color = {"color": COLORS[number % len(COLORS)]}
        figure.add_bar(x=[*values.values()], y=names, marker=color, **options)
    figure.update_xaxes(range=[0, 1.1]).update_yaxes(autorange="reversed")
    return figure


def require_plotly() -> None:
    """Raise an `ImportError` unless plotly is installed."""
    import_extra("plotly", "report")


def page(title: str, sections: Iterable[tuple[str, Sequence[Figure | str]]]) -> str:
    """Return a page of sections: each has a heading, HTML and figures. It needs no network."""
    get_plotlyjs = import_extra("plotly.offline", "report").get_plotlyjs
    parts, number = [], 0
    for heading, members in sections:
        if heading:
            parts.append(f"<h2>{escape(heading)}</h2>")
        cells = []
        for member in members:
            if isinstance(member, str):
                parts.append(f'<div class="scroll">{member}</div>')
                continue
            number += 1
            name = member.layout.title.text
            drawn = type(member)(member).update_layout(title_text=None, margin_t=8)
            html = drawn.to_html(
                full_html=False,
                include_plotlyjs=False,
                div_id=f"figure-{number}",
                default_height=f"{member.layout.height}px",
                config=_CONFIG,
            )
            cells.append(f'<figure aria-label="{name}"><h3>{name}</h3>{html}</figure>')
        if cells:
            parts.append(f'<div class="grid">{"".join(cells)}</div>')
    content = "\n".join(parts)
    return _PAGE.format(title=escape(title), content=content, script=get_plotlyjs())


def _figure(title: str, x_title: str, y_title: str = "", **layout: Any) -> Figure:
    go = import_extra("plotly.graph_objects", "report")
    axis = {"gridcolor": _GREY, "linecolor": _GREY, "zeroline": False, "automargin": True}
    return go.Figure(
        layout={
            "template": "none",
            "title": {"text": escape(title), "font": {"size": 14}},
            "height": 320,
            "margin": {"l": 40, "r": 12, "t": 48, "b": 40},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": {**axis, "title": {"text": x_title, "standoff": 4}},
            "yaxis": {**axis, "title": {"text": y_title}},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#888", "activecolor": COLORS[0]},
            "legend": {"orientation": "h", "y": -0.25, "yanchor": "top"},
            **layout,
        }
    )


def _thinned(points: Points) -> Points:
    """Return the lowest and the highest point of each part of a curve: thinning keeps peaks."""
    if len(points) <= _MOST_POINTS:
        return points
    parts = _MOST_POINTS // 2
    kept = list[tuple[float, float]]()
    for number in range(parts):
        part = points[number * len(points) // parts : (number + 1) * len(points) // parts]
        kept += sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})
    return kept
