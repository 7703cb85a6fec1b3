"""The parts of which HTML reports are made: the style, tables, charts with captions, and keys of colours."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from simulation.pictures import Picture

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1240px;padding:1.2rem 1rem 3rem;color:#1c2733;
background:#fff;overflow-wrap:anywhere}h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2rem 0 .6rem}
.muted{color:#5b6874}.warn{background:#fff3c4;padding:.5rem .8rem;border-radius:4px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}
td,th{text-align:right;padding:.3rem .7rem .3rem 0;border-bottom:1px solid #e3e8ee;overflow-wrap:normal}
td{white-space:nowrap}td:first-child{min-width:7em}td:first-child,.words td:nth-child(2){white-space:normal}
td:first-child,th:first-child,.words td:nth-child(2),.words th:nth-child(2){text-align:left}
th{font-weight:600;color:#51606f;vertical-align:bottom}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em;vertical-align:-.05em}
.keys{position:sticky;top:0;background:#fffffff0;padding:.4rem 0;z-index:1;display:flex;flex-wrap:wrap;
gap:.1rem 1.2rem}.keys b{font-weight:500}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:1.4rem}
figure{margin:0}figure svg{width:100%;height:auto;display:block}figcaption{font-size:.85rem;color:#5b6874}
@media (max-width:900px){tr:first-child{display:none}tr{display:block;padding:.5rem 0;border-bottom:1px solid #ccd4dc}
td,td:first-child,.words td:nth-child(2){display:flex;justify-content:space-between;gap:1rem;text-align:right;
padding:.1rem 0;border:0}td::before{content:attr(data-label);color:#51606f;text-align:left}.keys{position:static}}
"""


def head(title: str) -> str:
    """Returns the start of a page, up to the start of its body."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
    )


def keys(colours: Mapping[str, str]) -> str:
    """Returns a line with the colour of each name."""
    shown = "".join(
        f'<span><span class="key" style="background:{colour}"></span><b>{escape(name)}</b></span>'
        for name, colour in colours.items()
    )
    return f'<p class="keys">{shown}</p>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """Returns a table; a narrow screen shows each row as a list of labels and values. `words`: column 2 is text."""
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td data-label="{column}">{cell}</td>' for column, cell in zip(columns, row, strict=True))
        + "</tr>"
        for row in rows
    )
    kind = ' class="words"' if words else ""
    return f"<table{kind}><tr>{head}</tr>{body}</table>"


def figure(picture: Picture) -> str:
    """Returns a chart with its caption."""
    return f"<figure>{picture.svg}<figcaption>{escape(picture.says)}</figcaption></figure>"
