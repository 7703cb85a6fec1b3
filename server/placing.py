"""`mizzen tetris solve` and `generate`: read the instance, show how far the search is, write the plan."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

from rich.console import Console

from domain.instance import DOCUMENT_VERSION, Score
from infra.errors import ConfigurationError
from server.instance_files import read_any, write_json
from server.progress import EXIT_INTERRUPTED, Shown, interrupts, shown
from tetris import documents, exact, report
from tetris.climb import Step, climb
from tetris.columns import ML, Columns, Ints
from tetris.exact import ExactProgress
from tetris.explain import Move, explain
from tetris.folders import write_folder
from tetris.generate import generate
from tetris.problem import Problem
from tetris.replicas import Policy, Replicated, replicas_document, replicate, without_region
from tetris.versions import v1

_CLIMB_S = 10.0
_EXACT_S = 600.0
_PROVED = "proved: no plan that may be chosen costs less"
_MOVES_SHOWN = 8
_REGIONS_SHOWN = 40


def run_generate(tables: int, regions: int, seed: int, out: Path) -> int:
    """`mizzen tetris generate`; the exit code.

    Raises:
        ConfigurationError: a number cannot be, or the file cannot be written.
    """
    try:
        columns = generate(tables, regions, seed)
    except ValueError as error:
        raise ConfigurationError(f"--{error}") from None
    if out.suffix == ".json" or str(out) == "-":
        write_json(out, documents.instance_document(columns.to_instance()))
    else:
        write_folder(columns, out)
    return 0


def run_solve(
    *,
    instance: Path,
    method: str,
    time_s: float | None,
    seed: int,
    out: Path,
    moves: Path | None,
    replicas: Path | None,
) -> int:
    """`mizzen tetris solve` with its options; the exit code. Ctrl-C ends the search: the best plan so far is written.

    Raises:
        ConfigurationError: a document or an option cannot be used, or a file cannot be written.
    """
    if time_s is not None and time_s < 0:
        raise ConfigurationError(f"--time-s: {time_s}: must be 0 or more seconds")
    for path in (out, moves, replicas):
        if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{path}: folder {path.absolute().parent} does not exist")
    columns = read_any(instance)
    err = Console(stderr=True)
    with interrupts() as interrupted, shown(err) as show:
        home, proved = _solve(columns, method, time_s, seed, show(method), interrupted)
        ended = interrupted()
    homes = columns.plan_of(home)
    write_json(out, documents.plan_document(homes))
    made = explain(columns, home)
    first = list(islice(made, _MOVES_SHOWN))
    if moves is not None:
        write_json(moves, {"version": DOCUMENT_VERSION, "moves": [asdict(move) for move in chain(first, made)]})
    if replicas is not None:
        found = replicate(columns, home, Policy())
        write_json(replicas, replicas_document(columns, found))
        err.print(_said(columns, found), highlight=False, markup=False, soft_wrap=True)
    for line in _summary(columns, home, first):
        err.print(line, highlight=False, markup=False, soft_wrap=True)
    if proved:
        err.print(proved, highlight=False, markup=False, soft_wrap=True)
    if ended:
        err.print("mizzen: interrupted: this is the best plan so far", highlight=False)
        return EXIT_INTERRUPTED
    return 0


def _solve(
    columns: Columns, method: str, time_s: float | None, seed: int, show: Shown, stop: Callable[[], bool]
) -> tuple[Ints, str]:
    """The plan, and what is proved of it in a few words."""
    if method == "v0":
        return columns.home, ""

    def listen(step: Step) -> None:
        lacking = f", over limits by {step.lack:.3g}" if step.lack > 0 else ""
        show(step.part, f"{step.phase}: total {step.total:.6g}{lacking}")

    if method == "exact":
        return _solve_exactly(columns, _EXACT_S if time_s is None else time_s, seed, show, stop)
    search = v1 if method == "v1" else climb
    found = search(columns, time_s=_CLIMB_S if time_s is None else time_s, seed=seed, listener=listen, stop=stop)
    return found.home, _PROVED if found.proved and method == "climb" else ""


def _solve_exactly(
    columns: Columns, time_s: float, seed: int, show: Shown, stop: Callable[[], bool]
) -> tuple[Ints, str]:
    """As `_solve`. A good plan to begin with saves the exact method time."""
    began_s = time.monotonic()
    upper = climb(columns, time_s=min(_CLIMB_S, time_s / 10), seed=seed, stop=stop).home
    left_s = max(time_s - (time.monotonic() - began_s), 0.0)

    def listen(far: ExactProgress) -> None:
        show(min(1.0, far.elapsed_s / max(left_s, 1e-9)), f"total {far.total:.6g}, bound {far.bound:.6g}")

    try:
        found = exact.solve(columns, time_s=left_s, seed=seed, upper=upper, progress=listen, stop=stop)
    except ValueError as error:
        raise ConfigurationError(f"--method exact: {error}") from None
    if found.proved:
        return found.home, _PROVED
    return found.home, f"not proved: no plan that may be chosen costs less than {found.bound:.6g}"


def _summary(columns: Columns, home: Ints, first: list[Move]) -> list[str]:
    problem = Problem(columns)
    before = problem.score()
    problem.restart(home)
    after = problem.score()
    rows = [("", "BEFORE", "AFTER")]
    rows += [(name, f"{getattr(before, name):.6g}", f"{getattr(after, name):.6g}") for name in Score.__slots__[:4]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(columns.regions) <= _REGIONS_SHOWN:
        lines += report.lines(report.report(columns, columns.home), report.report(columns, home))
    moved = int((home != columns.home).sum())
    lines.append(f"{moved:,} of {len(home):,} tables move, {problem.moved_bytes:,.0f} bytes are copied")
    for move in first:
        lines.append(f"  {move.table}: {move.source} -> {move.target}, total {move.total:+.4g}{_jobs(move)}")
    if moved > len(first):
        lines.append(f"  and {moved - len(first):,} more; `--moves FILE` has all")
    lines += [f"cannot hold: {v.constraint} {v.where}, by {v.by:.6g}" for v in after.violations]
    return lines


def _said(columns: Columns, found: Replicated) -> str:
    count = Counter(replica.reason for replica in found.replicas)
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(count.items())) or "none"
    nowhere, jobs = int(without_region(columns, found.held).sum()), int((columns.kind == ML).sum())
    return f"replicas: {reasons}; {nowhere:,} of {jobs:,} ML jobs have no region with their data and hardware"


def _jobs(move: Move) -> str:
    counts = {
        "gain": len(move.gain_region), "lose": len(move.lose_region), "change": len(move.change_region),
    }  # fmt: skip
    said = [f"{count} {word} a region" for word, count in counts.items() if count]
    return f"; jobs: {', '.join(said)}" if said else ""
