"""Prints data to stdout in the output format of a command: tables, JSON, YAML or names. Messages go to stderr.

In JSON, a list is printed as an array, a single item as an object, and a stream as one object per line.
"""

import json
import os
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mizzen.cli import amounts

_GAP = "  "
_PROGRESS_EVERY_S = 0.2
_LEAST = 10
_BREAKS = re.compile(r"[\t\n\r]+")
_BEYOND_ASCII = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""The characters that `amounts.visible` replaces and that JSON does not escape."""
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
    """A column of a table. `text` returns the cell of an item."""

    header: str
    text: Callable[[Any], object]
    drop: int = 0
    """On a narrow terminal, the column with the highest number is omitted first; a column with 0 is always shown."""
    flexible: bool = False
    """The column may be truncated, and it takes the remaining space."""
    wide: bool = False
    """The column is shown only with `-o wide`."""
    right: bool = False


class Formatted(Protocol):
    """An object with an output format: a session, or the parsed arguments of a command."""

    @property
    def output(self) -> str:
        """`table`, `wide`, `json`, `yaml` or `name`."""


def emit_list(
    command: Formatted,
    items: Sequence[Any],
    columns: Sequence[Column],
    name: Callable[[Any], str] = lambda item: str(item["id"]),
) -> None:
    """Print a list of items in the format of `command`. `name` returns the text that the format `name` prints."""
    output = command.output
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
        say("no items found")


def emit_one(command: Formatted, item: Mapping[str, Any], page: Callable[[], str], name: str | None = None) -> None:
    """Print one item: `page` for the formats table and wide, `name` (default: the item's id) for the format name."""
    output = command.output
    if output == "name":
        _out(amounts.visible(str(item["id"] if name is None else name)))
    elif output in ("json", "yaml"):
        _out(dump(item, output))
    else:
        _out(amounts.visible(page()))


def emit_stream(
    command: Formatted, items: Iterable[Any], line: Callable[[Any], str], name: Callable[[Any], str]
) -> None:
    """Print items as they arrive."""
    for item in items:
        if command.output == "json":
            _out(dump_line(item))
        elif command.output == "yaml":
            _out("---\n" + dump(item, "yaml"))
        else:
            _out(cell(name(item) if command.output == "name" else line(item)))


def name_of(item: Mapping[str, Any]) -> str:
    """Return the name of an item: what `-o name` prints for items without an id."""
    return str(item["name"])


def _out(text: str) -> None:
    # Flush, because other output of the same command may bypass Python's buffer.
    print(text, flush=True)


def say(text: str) -> None:
    """Print a message to stderr."""
    print(f"mizzen: {amounts.visible(text)}", file=sys.stderr)


class ProgressLine:
    """A progress line on stderr, updated in place, if that is a terminal. Use it as a context manager."""

    def __init__(self, total_bytes: int) -> None:
        """Create a progress line for reading `total_bytes` bytes."""
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._shown_s = 0.0
        self._shows = sys.stderr.isatty()

    def __call__(self, size_bytes: int) -> None:
        """Add `size_bytes` to the bytes that were read."""
        self._done_bytes += size_bytes
        now_s = time.monotonic()
        if self._shows and now_s >= self._shown_s + _PROGRESS_EVERY_S:
            self._shown_s = now_s
            print(f"\r\x1b[K{self._line()}", end="", file=sys.stderr, flush=True)

    def _line(self) -> str:
        part = min(1.0, self._done_bytes / self._total_bytes) if self._total_bytes else 1.0
        return f"{amounts.size(self._done_bytes)} of {amounts.size(self._total_bytes)} read, {part:.0%}"

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown_s:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def no_colour() -> bool:
    """Return whether stdout must not be coloured (NO_COLOR is set, or stdout is not a terminal)."""
    return bool(os.environ.get("NO_COLOR")) or not sys.stdout.isatty()


def dump(body: Any, form: str) -> str:
    """Return `body` as text in the format `json` or `yaml` (which needs pyyaml), without a final line end."""
    if form == "json":
        return _escaped(json.dumps(body, indent=2, ensure_ascii=False))
    import yaml

    text = str(yaml.safe_dump(body, sort_keys=False, allow_unicode=True))
    if _BEYOND_ASCII.search(text):
        text = str(yaml.safe_dump(body, sort_keys=False, allow_unicode=False))
    return text.removesuffix("\n")


def dump_line(body: Any) -> str:
    """Return `body` as JSON on one line."""
    return _escaped(json.dumps(body, ensure_ascii=False))


def _escaped(text: str) -> str:
    r"""Return JSON with the same value, with terminal control characters written as `\uXXXX`."""
    return _BEYOND_ASCII.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def table(items: Sequence[Any], columns: Sequence[Column], width: int | None, colour: bool = False) -> list[str]:
    """Return the lines of a table, at most `width` wide if the columns that are always shown fit. None: no limit."""
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
    """Return a value as one line of text without control characters; `-` for None and for empty values."""
    if value is None or value == "" or value == () or value == [] or value == {}:
        return "-"
    return amounts.visible(_BREAKS.sub(" ", str(value)))


def measure(text: str) -> int:
    """Return the number of terminal columns that `text` takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def _cut(text: str, width: int) -> str:
    if measure(text) <= width:
        return text
    while text and measure(text) > width - 1:
        text = text[:-1]
    return text + "…"
