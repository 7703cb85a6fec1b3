"""Reads when machines came and went: a CSV file of intervals, or tables of the Failure Trace Archive."""

import csv
import lzma
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf, isfinite, nan
from pathlib import Path

import numpy as np

from reclaim.arrays import Ints

_UP = "1"
_SHORTEST_S = 60.0
"""An interval of a failure trace that is shorter, or a gap, is an error of a probe, not an owner."""


class ScenarioError(Exception):
    """A scenario is not valid. The message names the file, the field and what is valid."""


@dataclass(frozen=True)
class Interval:
    """A time in which a machine was there."""

    node: str
    from_s: float
    to_s: float
    """Infinite: it was still there at the end."""
    notice_s: float = nan
    """nan: not known."""
    building: str = ""
    gpus: int | None = None
    memory_bytes: float | None = None


def table(path: Path, required: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of a CSV file with a header, each with its line number. Empty lines and `#` lines are skipped.

    Raises:
        ScenarioError: the file cannot be read, or a required column is missing.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    reader = csv.reader(line for _, line in lines)
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in required if name not in header]
    if missing:
        raise ScenarioError(f"{path}: has the columns {', '.join(header) or 'none'}: {', '.join(missing)} is missing")
    for (number_of_line, _), row in zip(lines[1:], reader, strict=False):
        if len(row) != len(header):
            raise ScenarioError(
                f"{path}, line {number_of_line}: {len(row)} values: must be {len(header)}, as in the header"
            )
        yield number_of_line, {name: value.strip() for name, value in zip(header, row, strict=True)}


def number(path: Path, line: int, name: str, text: str, least: float = -inf) -> float:
    """Returns a number of a CSV file.

    Raises:
        ScenarioError: the text is not a finite number of at least `least`.
    """
    try:
        found = float(text)
    except ValueError:
        found = nan
    if not (isfinite(found) and found >= least):
        wanted = "a number" if least == -inf else f"a number, {least:g} or more"
        raise ScenarioError(f"{path}, line {line}: {name}: {text!r}: must be {wanted}")
    return found


def read_csv(path: Path, start_s: float, length_s: float) -> list[Interval]:
    """Returns the intervals of a CSV file with the columns `node`, `up` and `down`.

    `up` and `down` are seconds since the start of the scenario, or times of ISO 8601. An empty `down`: until the end.
    Optional columns: `notice_s` (0: an emergency; empty: drawn), `building`, `gpus`, `memory_gb`. Intervals of a
    machine that overlap or touch are joined; parts outside the scenario are cut off.

    Raises:
        ScenarioError: the file is not valid, or no interval is within the scenario.
    """
    found = []
    for line, row in table(path, ("node", "up", "down")):
        if not row["node"]:
            raise ScenarioError(f"{path}, line {line}: node: is empty: must be a name")
        from_s, to_s = _time(path, line, "up", row["up"], start_s), inf
        if row["down"]:
            to_s = _time(path, line, "down", row["down"], start_s)
        if to_s < from_s:
            raise ScenarioError(f"{path}, line {line}: down: {row['down']}: must not be before up, {row['up']}")
        notice = row.get("notice_s", "")
        gpus, memory = row.get("gpus", ""), row.get("memory_gb", "")
        found.append(
            Interval(
                row["node"],
                from_s,
                to_s,
                number(path, line, "notice_s", notice, 0.0) if notice else nan,
                row.get("building", ""),
                int(number(path, line, "gpus", gpus, 1.0)) if gpus else None,
                number(path, line, "memory_gb", memory, 0.0) * 1e9 if memory else None,
            )
        )
    kept = _joined(found, length_s, 0.0)
    if not kept:
        raise ScenarioError(
            f"{path}: no interval is between 0 and {length_s:g} s after the start: check start and days"
        )
    return kept


def _time(path: Path, line: int, name: str, text: str, start_s: float) -> float:
    try:
        return float(text) if isfinite(float(text)) else number(path, line, name, text)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ScenarioError(
            f"{path}, line {line}: {name}: {text!r}: must be seconds since the start, or a time such as "
            "2026-03-02T08:00:00+00:00"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - start_s


def _joined(intervals: list[Interval], length_s: float, gap_s: float) -> list[Interval]:
    """Returns intervals cut to the scenario, with those of a machine joined that overlap or are at most a gap apart."""
    by_node: dict[str, list[Interval]] = defaultdict(list)
    for one in sorted(intervals, key=lambda one: (one.from_s, one.to_s)):
        kept = by_node[one.node]
        if kept and one.from_s <= kept[-1].to_s + gap_s:
            if one.to_s > kept[-1].to_s:
                kept[-1] = replace(one, from_s=kept[-1].from_s)
        else:
            kept.append(one)
    found = []
    for kept in by_node.values():
        for one in kept:
            cut = replace(one, from_s=max(one.from_s, 0.0))
            if cut.to_s > cut.from_s and cut.from_s < length_s:
                found.append(cut)
    return sorted(found, key=lambda one: (one.from_s, one.node))


def places(intervals: list[Interval], buildings: int) -> tuple[tuple[str, ...], Ints, tuple[str, ...]]:
    """Returns the machines of intervals, the building of each, and the names of the buildings.

    Machines without a building are dealt to `buildings` buildings in turn.
    """
    names = sorted({one.node for one in intervals})
    of = {one.node: one.building for one in intervals if one.building}
    missing = [name for name in names if name not in of]
    of |= {name: f"building-{n % buildings + 1}" for n, name in enumerate(missing)}
    known = sorted(set(of.values()))
    return tuple(names), np.array([known.index(of[name]) for name in names], np.int64), tuple(known)


def read_failure_trace(
    folder: Path,
    sites: tuple[str, ...],
    buildings: int,
    machines: int,
    from_day: float,
    length_s: float,
    rng: np.random.Generator,
) -> tuple[list[Interval], float]:
    """Returns the intervals of some machines of a failure trace, and the start on the wall clock.

    Each site becomes a building, and machines are drawn from all sites in equal numbers. Up times and gaps of less than
    a minute are probes that failed: they are joined.

    Raises:
        ScenarioError: the folder has no event_trace.tab or event_trace.tab.xz, or a site is unknown.
    """
    path = next((folder / name for name in ("event_trace.tab", "event_trace.tab.xz") if (folder / name).exists()), None)
    if path is None:
        raise ScenarioError(f"{folder}: has no event_trace.tab or event_trace.tab.xz: give a folder with one of them")
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    first_s = inf
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt") as file:
        for line, text in enumerate(file, 1):
            row = text.split()
            if not row or row[0].startswith("#"):
                continue
            if len(row) < 8:
                raise ScenarioError(f"{path}, line {line}: {len(row)} columns: must be 8 or more")
            from_s, to_s = number(path, line, "start", row[6]), number(path, line, "stop", row[7])
            first_s = min(first_s, from_s)
            if row[5] == _UP:
                rows[row[4]].append((from_s, to_s))
    start_s = first_s + from_day * 86_400.0
    present = {node: spans for node, spans in rows.items() if any(to_s > start_s for _, to_s in spans)
               and any(from_s < start_s + length_s for from_s, _ in spans)}  # fmt: skip
    members = defaultdict(list)
    for node in sorted(present):
        members[_site(node)].append(node)
    chosen = list(sites) or [
        site for site, _ in Counter({s: len(m) for s, m in members.items()}).most_common(buildings)
    ]
    unknown = [site for site in chosen if site not in members]
    if unknown or not chosen:
        known = ", ".join(sorted(members)) or "none"
        raise ScenarioError(f"availability.failure_trace.sites: {', '.join(unknown) or 'none'}: known are {known}")
    found = []
    for place, site in enumerate(sorted(chosen)):
        wanted = machines // len(chosen) + (place < machines % len(chosen))
        picked = rng.permutation(len(members[site]))[:wanted]
        for node in (members[site][int(n)] for n in sorted(picked)):
            spans = [Interval(node, a - start_s, b - start_s, building=site) for a, b in present[node]]
            found += [one for one in _joined(spans, length_s, _SHORTEST_S) if one.to_s - one.from_s >= _SHORTEST_S]
    return sorted(found, key=lambda one: (one.from_s, one.node)), start_s


def _site(node: str) -> str:
    """Returns the site of a name such as G1/site1/c1/node1: the part before the cluster, or the whole name."""
    parts = node.split("/")
    return parts[1] if len(parts) >= 3 else parts[0]
