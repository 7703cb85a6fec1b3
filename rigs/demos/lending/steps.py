"""Reads the files that the trainings wrote (`stepwise_training.py`)."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StepLine:
    """One line of a rank."""

    at_s: float
    event: str
    """`begun`, `step` or `saved`."""
    step: int
    attempt: int
    pid: int
    machine: str
    gpu: int
    digest: str
    """Digest of the weights after a step; empty for other events."""


def _line(body: dict[str, Any]) -> StepLine:
    gpu = int(body.pop("gpu") or 0)
    return StepLine(**{"digest": "", **body, "machine": body["machine"] or "", "gpu": gpu})


def read_lines(file: Path, ranks: int) -> list[list[StepLine]]:
    """Returns the lines that each rank of a training wrote; none for a missing file."""
    paths = [file.with_name(f"{file.name}.{rank}") for rank in range(ranks)]
    texts = (path.read_text() if path.exists() else "" for path in paths)
    return [[_line(json.loads(line)) for line in text.splitlines()] for text in texts]


def done(lines: Iterable[StepLine], attempt: int) -> list[int]:
    """Returns the steps that a rank made in an attempt."""
    return [one.step for one in lines if one.event == "step" and one.attempt == attempt]
