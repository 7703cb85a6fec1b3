"""A table of texts, as HTML, as Markdown, or with aligned columns for a terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ALL = 9
"""Value of `texts`: all columns are texts."""


@dataclass(frozen=True)
class ReportTable:
    """A table of texts."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """The note below the table."""
    texts: int = 1
    """How many of the first columns are texts, which are left-aligned in HTML: 1, 2 or `ALL`."""

    def __str__(self) -> str:
        """Returns the table and its note, for a terminal."""
        return "\n".join([*aligned([self.columns, *self.rows]), *filter(None, [self.note])])

    def html(self) -> str:
        """Returns the table and its note; a narrow screen shows each row as a list of labels and values."""
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        rows = "".join(f"<tr>{''.join(map(_cell, self.columns, row))}</tr>" for row in self.rows)
        note = "<br>".join(map(escape, self.note.splitlines()))
        below = f'<p class="muted">{note}</p>' if note else ""
        return f'<table class="texts{self.texts}"><tr>{head}</tr>{rows}</table>{below}'

    def markdown(self) -> str:
        """Returns the table without its note."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a line of text for each row, with aligned columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def write_between(document: Path, begin: str, end: str, text: str) -> None:
    """Replaces the text between two markers of a Markdown file. A new file gets a title and the markers."""
    document.parent.mkdir(parents=True, exist_ok=True)
    before = document.read_text() if document.exists() else f"# Experiments\n\n{begin}\n{end}\n"
    head, _, rest = before.partition(begin)
    document.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


def _cell(column: str, text: str) -> str:
    mark = f' class="{text}"' if text in ("holds", "fails") else ""
    return f'<td{mark} data-label="{escape(column)}">{escape(text)}</td>'
