"""The frame of the report's page: its HTML, its style, and the few lines of script that sort and filter."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{made}</p>
<nav>{links} <button type="button" id="theme">light / dark</button></nav>
</header>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""

STYLE = """
:root { --back: #ffffff; --text: #1a1a1a; --faint: #d9d9d9; --soft: #f4f5f7; --quiet: #666666; --bad: #a00000;
  --link: #0058a3; color-scheme: light; }
:root.dark { --back: #14171c; --text: #e8e8e8; --faint: #3a3f47; --soft: #1d2127; --quiet: #a6a6a6; --bad: #ff8a80;
  --link: #74b9f0; color-scheme: dark; }
body { margin: 0 auto; padding: 1rem 1.5rem 4rem; max-width: 90rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; } h3 { font-size: 1rem; }
header p, .file { color: var(--quiet); margin: .2rem 0; }
a { color: var(--link); margin-right: 1em; }
nav { display: flex; flex-wrap: wrap; align-items: center; gap: .3rem; }
nav button { margin-left: auto; }
button, input { font: inherit; color: inherit; background: var(--soft); border: 1px solid var(--faint);
  border-radius: 4px; padding: .1rem .6rem; }
.table { overflow-x: auto; margin: .5rem 0 1rem; }
.table input { margin: 0 0 .4rem; min-width: 16rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: var(--soft); text-align: left; padding: 0; }
th button { border: 0; font-weight: 600; padding: .25rem .6rem; cursor: pointer; white-space: nowrap; }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
td { padding: .2rem .6rem; border-top: 1px solid var(--faint); white-space: nowrap; }
td:last-child { white-space: normal; }
td.n { text-align: right; }
tr.fail td, tr.error td { color: var(--bad); }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; border: 1px solid var(--faint); }
img.dark { display: none; } :root.dark img.dark { display: inline; } :root.dark img.light { display: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
.note { color: var(--quiet); }
article { border-left: 3px solid var(--faint); padding-left: 1rem; margin: 1rem 0; overflow-x: auto; }
article h1 { font-size: 1.1rem; } article h2 { font-size: 1rem; }
@media print { nav, .table input { display: none; } th { position: static; } }
"""

SCRIPT = """
'use strict';
const root = document.documentElement;
root.classList.toggle('dark', matchMedia('(prefers-color-scheme: dark)').matches);
document.getElementById('theme').onclick = () => root.classList.toggle('dark');
function key(row, column) {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
}
function compare(a, b) {
  if (typeof a === 'number' && typeof b === 'number') return a - b;
  if (typeof a === 'number') return -1;  // figures before empty cells and words
  if (typeof b === 'number') return 1;
  return a.localeCompare(b, undefined, {numeric: true});
}
for (const box of document.querySelectorAll('.table')) {
  const body = box.querySelector('tbody'), heads = [...box.querySelectorAll('th')];
  heads.forEach((head, column) => head.firstChild.onclick = () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    heads.forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const rows = [...body.rows].map(row => [key(row, column), row]);
    rows.sort((a, b) => compare(a[0], b[0]) * (down ? -1 : 1));
    body.append(...rows.map(pair => pair[1]));
  });
  const field = box.querySelector('input');
  if (field) field.oninput = () => {
    const words = field.value.toLowerCase().split(/\\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
  };
}
"""
