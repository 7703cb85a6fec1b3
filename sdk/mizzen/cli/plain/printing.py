"""Printing data to stdout: tables, JSON, YAML, or names only. Everything else goes to stderr.

A list is printed as a JSON array, one thing as an object, and a stream as one object a line.
"""

import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen.cli import words

_GAP = "  "
_LEAST = 10
_BREAKS = re.compile(r"[\t\n\r]+")
_BEYOND_ASCII = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Of what `words.visible` replaces, what JSON leaves as it is."""
_RED, _GREEN, _YELLOW = 31, 32, 33
_COLOURS = {
    "running": _GREEN,
    "succeeded": _GREEN,
    "ready": _GREEN,
    "failed": _RED,
    "lost": _RED,
    "cancelled": _YELLOW,
    "preempted": _YELLOW,
    "checkpointing": _YELLOW,
}


@dataclass(frozen=True)
class Column:
    """One column: `text` makes its cell of an item."""

    header: str
    text: Callable[[Any], object]
    drop: int = 0
    """On a narrow terminal the columns with the highest number go first; 0 stays."""
    flexible: bool = False
    """May be cut to fit, and takes what space is left."""
    wide: bool = False
    """Only with `-o wide`."""
    right: bool = False


def emit_list(
    output: str,
    items: Sequence[Any],
    columns: Sequence[Column],
    name: Callable[[Any], str] = lambda item: str(item["id"]),
) -> None:
    """Print a list of items in the format `output`. `name` is what the format `name` prints."""
    if output == "name":
        for item in items:
            _out(cell(name(item)))
    elif output in ("json", "yaml"):
        _out(dump(items, output))
    elif items:
        shown = [column for column in columns if output == "wide" or not column.wide]
        narrow = output == "table" and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if narrow else None
        for line in table(items, shown, width, colour=not no_colour()):
            _out(line)
    else:
        say("there are none")


def emit_one(output: str, item: Mapping[str, Any], page: Callable[[], str], name: str | None = None) -> None:
    """Print one thing: `page` for the formats table and wide, `name` (its id by default) for name."""
    if output == "name":
        _out(words.visible(str(item["id"] if name is None else name)))
    elif output in ("json", "yaml"):
        _out(dump(item, output))
    else:
        _out(words.visible(page()))


def _out(text: str) -> None:
    # Other output of the same command may go past Python's buffer.
    print(text, flush=True)


def say(text: str) -> None:
    """Tell the user something that is not data."""
    print(f"mizzen: {words.visible(text)}", file=sys.stderr)


def no_colour() -> bool:
    """Whether stdout must stay plain (NO_COLOR, or no terminal)."""
    return bool(os.environ.get("NO_COLOR")) or not sys.stdout.isatty()


def dump(body: Any, form: str) -> str:
    """`body` as text in `json` or `yaml` (which needs pyyaml), without a line end."""
    if form == "json":
        return _escaped(json.dumps(body, indent=2, ensure_ascii=False))
    import yaml

    text = str(yaml.safe_dump(body, sort_keys=False, allow_unicode=True))
    if _BEYOND_ASCII.search(text):
        text = str(yaml.safe_dump(body, sort_keys=False, allow_unicode=False))
    return text.removesuffix("\n")


def dump_line(body: Any) -> str:
    """`body` as JSON in one line."""
    return _escaped(json.dumps(body, ensure_ascii=False))


def _escaped(text: str) -> str:
    r"""JSON with the same value, in which what could command a terminal is written as `\uXXXX`."""
    return _BEYOND_ASCII.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def table(items: Sequence[Any], columns: Sequence[Column], width: int | None, colour: bool = False) -> list[str]:
    """Lines of a table no wider than `width` (None: as wide as needed), as far as the columns that stay allow."""
    cells = {column.header: [cell(column.text(item)) for item in items] for column in columns}
    natural = {header: max(map(measure, [header, *texts])) for header, texts in cells.items()}
    shown = list(columns)
    widths = dict(natural)
    if width is not None:
        least = {c.header: min(_LEAST, natural[c.header]) if c.flexible else natural[c.header] for c in columns}
        while _total(shown, least) > width and any(column.drop for column in shown):
            shown.remove(max(shown, key=lambda column: column.drop))
        widths = {column.header: least[column.header] for column in shown}
        for column in shown:
            if column.flexible:
                left = width - _total(shown, widths)
                widths[column.header] = min(natural[column.header], widths[column.header] + max(0, left))
    lines = [_line(shown, [column.header for column in shown], widths)]
    for row in range(len(items)):
        texts = [cells[column.header][row] for column in shown]
        lines.append(_line(shown, texts, widths, colour))
    return lines


def _total(columns: Sequence[Column], widths: Mapping[str, int]) -> int:
    return sum(widths[column.header] for column in columns) + len(_GAP) * (len(columns) - 1)


def _line(columns: Sequence[Column], texts: Sequence[str], widths: Mapping[str, int], colour: bool = False) -> str:
    out = []
    for column, text in zip(columns, texts, strict=True):
        cut = _cut(text, widths[column.header])
        space = " " * (widths[column.header] - measure(cut))
        styled = f"\x1b[{_COLOURS[text]}m{cut}\x1b[0m" if colour and text in _COLOURS else cut
        out.append(space + styled if column.right else styled + space)
    return _GAP.join(out).rstrip()


def cell(value: object) -> str:
    """A value as one line of text that a terminal takes for nothing else; `-` for None and nothing."""
    if value is None or value == "" or value == () or value == [] or value == {}:
        return "-"
    return words.visible(_BREAKS.sub(" ", str(value)))


def measure(text: str) -> int:
    """Terminal columns that `text` takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def _cut(text: str, width: int) -> str:
    if measure(text) <= width:
        return text
    while text and measure(text) > width - 1:
        text = text[:-1]
    return text + "…"
