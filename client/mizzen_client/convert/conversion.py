"""A conversion: the documents that it wrote, and a remark for each line or option of the source."""

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mizzen_client.errors import DocumentError

_NAME_LENGTH = 63
_OUTSIDE = re.compile(r"[^a-z0-9]+")

VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]{0,255}")
RESERVED = re.compile(
    "MIZZEN_|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES)$"
)
"""Variables that a document cannot set."""
SET_BY_MIZZEN = "mizzen sets it for each task"


class Carryover(StrEnum):
    """How a line or an option of the source was converted."""

    CARRIED = "carried"
    """It has the same meaning in the document."""
    CHANGED = "changed"
    """It is in the document with a different meaning, which the remark describes."""
    DROPPED = "dropped"
    """It is not in the document, and the result of the workload is the same."""
    LOST = "lost"
    """It is not in the document, and the result of the workload may differ: the user must act."""


@dataclass(frozen=True)
class Remark:
    """How one line or option was converted."""

    line: int
    """The line of the source, from 1."""
    source: str
    """The option or field as the source writes it."""
    outcome: Carryover
    target: str = ""
    """The field of the document, such as `jobs[0].tasks`, if there is one."""
    why: str = ""
    """The difference, or why there is no counterpart and what to do instead."""
    last_line: int | None = None
    """The last line, if the remark is about several."""

    def __str__(self) -> str:
        lines = self.line if self.last_line is None else f"{self.line}-{self.last_line}"
        text = f"{lines}: {self.outcome}: {self.source}"
        return f"{text}{f' -> {self.target}' if self.target else ''}{f': {self.why}' if self.why else ''}"


class CannotConvert(DocumentError):
    """The source cannot be converted. The message names the line and what would be right."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        """The line of the source, from 1."""
        self.reason = message
        super().__init__(f"{line}: refused: {message}")


@dataclass
class Conversion:
    """The documents and the remarks of a conversion."""

    kind: str
    """`slurm`, `skypilot`, `kubernetes` or `submitit`."""
    documents: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

    def carried(self, line: int, source: str, target: str) -> None:
        """Add a remark that a line or option has the same meaning in the field `target`."""
        self.remarks.append(Remark(line, source, Carryover.CARRIED, target))

    def changed(self, line: int, source: str, target: str, why: str) -> None:
        """Add a remark that a line or option is in the field `target` with another meaning."""
        self.remarks.append(Remark(line, source, Carryover.CHANGED, target, why))

    def dropped(self, line: int, source: str, why: str) -> None:
        """Add a remark that a line or option has no counterpart, without an effect on the result of the workload."""
        self.remarks.append(Remark(line, source, Carryover.DROPPED, "", why))

    def lost(self, line: int, source: str, why: str) -> None:
        """Add a remark that a line or option has no counterpart, which may change the result. `why` gives advice."""
        self.remarks.append(Remark(line, source, Carryover.LOST, "", why))

    @property
    def counts(self) -> dict[str, int]:
        """The number of remarks with each outcome."""
        found = Counter(remark.outcome for remark in self.remarks)
        return {outcome.value: found[outcome] for outcome in Carryover}

    @property
    def is_complete(self) -> bool:
        """Whether nothing was lost."""
        return all(remark.outcome is not Carryover.LOST for remark in self.remarks)


def named(conversion: Conversion, line: int, source: str, given: str) -> str:
    """Return a workload's name for `given`, with a remark about the name."""
    name = fitting_name(given)
    if name == given:
        conversion.carried(line, source, "name")
    else:
        why = f"the name is {name}, because names have lower-case letters, digits and hyphens"
        conversion.changed(line, source, "name", why)
    return name


def fitting_name(given: str) -> str:
    """Return a valid name for a workload or job that is similar to `given`."""
    return _OUTSIDE.sub("-", given.lower()).strip("-")[:_NAME_LENGTH].strip("-") or "main"


def shown(value: object, most: int = 60) -> str:
    """Return a value of the source on one line, for a remark."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
