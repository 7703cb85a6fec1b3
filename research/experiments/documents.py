"""Formats Markdown tables, and replaces the generated part of a document."""

from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_between(document: Path, begin: str, end: str, text: str) -> None:
    """Replaces the text between two markers of a document. A new document gets a title and the markers."""
    document.parent.mkdir(parents=True, exist_ok=True)
    before = document.read_text() if document.exists() else f"# Experiments\n\n{begin}\n{end}\n"
    head, _, rest = before.partition(begin)
    document.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")
