"""The page of a report: one HTML file that needs no other file, readable on a narrow screen."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.reports.charts import Picture

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1240px;padding:1.2rem 1rem 3rem;color:#1c2733;
background:#fff;overflow-wrap:anywhere}h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2rem 0 .6rem}
.muted{color:#5b6874}.warn{background:#fff3c4;padding:.5rem .8rem;border-radius:4px}
.holds{color:#2c7a4b;font-weight:600}.fails{color:#b3261e;font-weight:600}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}
td,th{text-align:right;padding:.3rem .7rem .3rem 0;border-bottom:1px solid #e3e8ee;overflow-wrap:normal}
td{white-space:nowrap}td:first-child{min-width:7em}td:first-child,.texts2 td:nth-child(2),.texts9 td{white-space:normal}
:is(td,th):first-child,.texts2 :is(td,th):nth-child(2),.texts9 :is(td,th){text-align:left}
th{font-weight:600;color:#51606f;vertical-align:bottom}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em;vertical-align:-.05em}
.keys{position:sticky;top:0;background:#fffffff0;padding:.4rem 0;z-index:1;display:flex;flex-wrap:wrap;
gap:.1rem 1.2rem}.keys b{font-weight:500}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:1.4rem}
.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr))}
.whole{display:block;overflow:auto}.whole svg{min-width:900px}
figure{margin:0}figure svg{width:100%;height:auto;display:block}figcaption{font-size:.85rem;color:#5b6874}
@media (max-width:900px){table tr:first-child{display:none}tr{display:block;padding:.5rem 0;
border-bottom:1px solid #ccd4dc}table td:nth-child(n){display:flex;justify-content:space-between;gap:1rem;
text-align:right;white-space:normal;padding:.1rem 0;border:0}td::before{content:attr(data-label);color:#51606f;
text-align:left}.keys{position:static}}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Returns an HTML page with a title and the given parts."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>"
    )
    return "\n".join((head, *parts, "</body></html>\n"))


def muted(text: str) -> str:
    """Returns a paragraph in a pale colour."""
    return f'<p class="muted">{escape(text)}</p>'


def warning(text: str) -> str:
    """Returns a highlighted paragraph; an empty string for an empty text."""
    return f'<p class="warn">{escape(text)}</p>' if text else ""


def keys(colours: Mapping[str, str]) -> str:
    """Returns a legend: one line with the colour of each name. It stays visible while its parent is scrolled."""
    shown = "".join(
        f'<span><span class="key" style="background:{colour}"></span><b>{escape(name)}</b></span>'
        for name, colour in colours.items()
    )
    return f'<p class="keys">{shown}</p>'


def grid(pictures: "Iterable[Picture]", size: str = "") -> str:
    """Returns charts with their captions side by side. `size` of a chart: `wide`, `whole` (page), or small."""
    figures = "".join(f"<figure>{one.svg}<figcaption>{escape(one.says)}</figcaption></figure>" for one in pictures)
    return f'<div class="grid {size}">{figures}</div>'
