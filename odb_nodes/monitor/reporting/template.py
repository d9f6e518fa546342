"""The page of a report, for jinja2. It asks for nothing over a network."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --page: #ffffff; --text: #1c2024; --soft: #5b636b; --line: #dde1e5; --panel: #f6f7f8;
  --0: #0b6fa4; --1: #c2410c; --2: #15803d; --3: #9333a8; --4: #8a6100; --5: #be123c;
  --6: #0f766e; --7: #4b5563; }
@media (prefers-color-scheme: dark) {
:root { --page: #15181b; --text: #e6e8ea; --soft: #a2abb3; --line: #343b41; --panel: #1d2125;
  --0: #58b4e8; --1: #fb9a5e; --2: #5fd08a; --3: #d79af0; --4: #e3b73f; --5: #ff8fa6;
  --6: #4fd1c5; --7: #b4bcc6; } }
body { background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif;
  margin: 0 auto; padding: 1rem; max-width: 90rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p, figcaption { max-width: 45rem; } figcaption, .soft { color: var(--soft); font-size: .9rem; }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; padding: .75rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: .4rem; min-width: 0; }
figure h3 { font-size: 1rem; margin: 0; }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .grid { stroke: var(--line); stroke-width: 1; }
svg polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg .dot { fill-opacity: .45; } svg line:not(.grid) { stroke-dasharray: 2 3; }
{% for n in range(8) %}polyline.c{{ n }}, line.c{{ n }} { stroke: var(--{{ n }}); }
circle.c{{ n }} { fill: var(--{{ n }}); }
.s{{ n }} { background: var(--{{ n }}); }
{% endfor %}
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: .15em;
  margin-right: .4em; }
.run { margin-right: 1rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child { text-align: left; } caption { text-align: left; color: var(--soft); }
pre { background: var(--panel); border: 1px solid var(--line); padding: .75rem; overflow-x: auto; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
</style>
</head>
<body>
{% macro rows(table) %}<div class="scroll"><table>
{% if table.caption %}<caption>{{ table.caption }}</caption>{% endif %}
<thead><tr>{% for cell in table.head %}<th scope="col">{{ cell }}</th>{% endfor %}</tr>\
</thead>
<tbody>{% for row in table.rows %}<tr><th scope="row">{{ row[0] }}</th>\
{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endmacro %}
<main>
<h1>{{ title }}</h1>
<p>{% for run in runs %}<span class="run">\
<span class="swatch s{{ loop.index0 % 8 }}"></span>{{ run }}</span>
{% endfor %}</p>
{{ rows(facts) }}
{% if settings.rows %}<h2>Settings</h2>
{{ rows(settings) }}{% endif %}
<h2>Curves</h2>
<p class="soft">Each point is one record: a mean over its steps, where nothing else
is said: learning rates, memory, and what <code>values</code> told are of its last step. A dotted
line down a picture is where the run of its colour was resumed. Of long runs, the lowest and the
highest record of each part are drawn.</p>
<div class="grid">
{% for chart in charts %}<figure><h3>{{ chart.title }}</h3>{{ chart.svg | safe }}
<figcaption>{% for run, text in chart.words %}<div>{% if runs | length > 1 %}\
<span class="swatch s{{ run % 8 }}"></span>{% endif %}{{ text }}</div>{% endfor %}</figcaption>
<details><summary>Numbers</summary>{{ rows(chart.table) }}</details></figure>
{% endfor %}</div>
{% if sources %}<h2>Sources and tasks</h2>
{% for table in sources %}{{ rows(table) }}{% endfor %}{% endif %}
{% if samples %}<h2>Samples with the highest loss</h2>
{% for table in samples %}{{ rows(table) }}{% endfor %}{% endif %}
{% if audits %}<h2>What was trained on</h2>
{% for name, text in audits %}<h3>{{ name }}</h3><pre>{{ text }}</pre>{% endfor %}{% endif %}
</main>
</body>
</html>
"""
