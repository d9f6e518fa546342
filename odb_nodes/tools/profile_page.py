"""A profile as one page of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from odb_nodes._core.checks import import_extra
from odb_nodes._core.text import counted
from odb_nodes.tools.svg import Level, bars, levels

__all__ = ["render_page"]

_MOST_HISTOGRAMS = 40  # of a page; tables have all sources

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Profile of lengths</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}
th,td{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8885}
th:first-child,td:first-child{text-align:left}
tr.own td{font-weight:600}
</style></head><body>
<h1>Profile of lengths</h1>
<p>{{ about }}</p>
{% macro table(rows) %}<table><thead><tr>{% for title in rows[0] %}<th scope="col">{{ title }}</th>
{%- endfor %}</tr></thead><tbody>
{% for row in rows %}<tr{% if row.batches == "odb_nodes" %} class="own"{% endif %}>
{%- for cell in row.values() %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>{% endmacro %}
<h2>Batches</h2>
<p>{{ heading }}</p>
<div>{{ chart | safe }}</div>
<p>{{ why }}</p>
<details><summary>All figures</summary>
{{ table(comparisons) }}
<p>Padding: share of all tokens. Fill: tokens of a batch / budget, padding included. Efficiency:
real tokens / (ranks &times; sum over the steps of the largest batch).</p>
</details>
<h2>Lengths, in tokens</h2>
{{ table(lengths) }}
{% for figure in figures %}<div>{{ figure | safe }}</div>
{% endfor %}
</body></html>
"""


def render_page(
    *,
    about: str,
    heading: str,
    lengths: Sequence[dict[str, str]],
    why: str,
    comparisons: Sequence[dict[str, str]],
    efficiencies: Mapping[str, Sequence[Level]],
    histograms: Sequence[tuple[str, Sequence[int], Sequence[int]]],
) -> str:
    """Return the page."""
    jinja2 = import_extra("jinja2", "tools")
    figures = [
        bars(
            counts,
            [f"{edge:,}" for edge in edges],
            axes=("tokens of a sample", "samples"),
            title=f"Lengths of {name}",
            text=_words(edges, counts),
        )
        for name, edges, counts in histograms[:_MOST_HISTOGRAMS]
    ]
    marked = [
        f"{name}: {one.name}, {one.value:.3f}"
        for name, group in efficiencies.items()
        for one in group
        if one.mark
    ]
    chart = levels(
        efficiencies,
        axis="efficiency: real tokens / (ranks x largest batch of each step)",
        title="Efficiency by ranks, batches and window",
        text=f"To take: {'; '.join(marked)}",
    )
    environment = jinja2.Environment(autoescape=True)
    page = environment.from_string(_PAGE).render(
        about=about,
        heading=heading,
        chart=chart,
        why=why,
        comparisons=comparisons,
        lengths=lengths,
        figures=figures,
    )
    return str(page)


def _words(edges: Sequence[int], counts: Sequence[int]) -> str:
    peak = max(range(len(counts)), key=counts.__getitem__)
    return (
        f"{counted(sum(counts), 'sample')} from {edges[0]:,} to {edges[-1] - 1:,} tokens, most of "
        f"them ({counts[peak]:,}) from {edges[peak]:,} to {edges[peak + 1] - 1:,}"
    )
