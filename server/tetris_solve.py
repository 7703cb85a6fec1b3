"""`mizzen tetris solve`: reads the instance, shows the progress of the search, and writes the plan."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from domain.instance import DOCUMENT_VERSION
from infra.errors import ConfigurationError
from server.instance_files import read_any, read_needed
from server.outputs import write_json
from server.progress import EXIT_INTERRUPTED, Shown, compiling, interrupts, shown, starting
from server.tetris_commands import SolveOptions
from tetris import documents, exact, report
from tetris.climb import SearchStep, climb, load, may_prove
from tetris.columns import Columns, Ints
from tetris.exact import ExactProgress
from tetris.explain import Move, explain
from tetris.pieces import RequiredPieces
from tetris.replicas import ReplicaPolicy, Replicated, jobs_without_region, replicas_document, replicate

_CLIMB_S = 10.0
_EXACT_S = 600.0
_PROVED = "optimal: no feasible plan has a lower total"
_CLIMBING = 0.1
"""Fraction of the exact method's time that is used to find an initial plan."""
_TELLS_NOTHING = 1e-3
"""A lower bound below this fraction of the plan's total cost is not reported."""
_MOVES_SHOWN = 8


def run_solve(given: SolveOptions) -> int:
    """Runs `mizzen tetris solve`; returns the exit code. Ctrl-C ends the search and the best plan so far is written.

    Raises:
        ConfigurationError: a document or an option is invalid, or a file cannot be written.
    """
    method = given.method
    with starting():
        columns = read_any(given.instance)
        needed = read_needed(columns, given.reads)
        if method != "v0":
            with compiling():
                load(method == "exact" or may_prove(columns))
    err = Console(stderr=True)
    with interrupts() as interrupted:
        with shown(err) as show:
            home, proved = _solve(columns, given, show(method), interrupted)
        ended = interrupted()
        write_json(given.out, documents.plan_document(columns.plan_of(home)))
        with shown(err) as show:
            first, made = _moves(columns, home, given.moves is not None, show, lambda: not ended and interrupted())
    said = []
    left_out = interrupted() and not ended
    if given.moves is not None and not left_out:
        write_json(given.moves, {"version": DOCUMENT_VERSION, "moves": made})
    if given.replicas is not None and not left_out:
        found = replicate(columns, home, ReplicaPolicy(), needed)
        write_json(given.replicas, replicas_document(columns, found, needed))
        said.append(_said(columns, found, needed))
    said += _summary(columns, home, first)
    if proved:
        said.append(proved)
    if ended:
        said.append("mizzen: interrupted: this is the best plan so far")
    if left_out:
        said.append("mizzen: interrupted: the plan is written; the files of --moves and --replicas are not")
    for line in said:
        err.print(line, highlight=False, markup=False, soft_wrap=True)
    return EXIT_INTERRUPTED if ended or left_out else 0


def _moves(
    columns: Columns, home: Ints, wanted: bool, show: Callable[[str], Shown], stop: Callable[[], bool]
) -> tuple[list[Move], list[dict[str, Any]]]:
    """Returns the first moves and, if `wanted`, the list of all moves for the document."""
    first: list[Move] = []
    made: list[dict[str, Any]] = []
    count = int((home != columns.home).sum())
    far = show("moves")
    for move in explain(columns, home):
        if len(first) < _MOVES_SHOWN:
            first.append(move)
        elif not wanted:
            break
        if wanted:
            made.append(asdict(move))
            far(len(made) / count, f"{len(made):,} of {count:,} explained")
        if stop():
            break
    return first, made


def _solve(columns: Columns, given: SolveOptions, show: Shown, stop: Callable[[], bool]) -> tuple[Ints, str]:
    """Returns the plan, and a message about its optimality, which may be empty."""
    method, seed = given.method, given.seed
    if method == "v0":
        return columns.home, ""

    def listen(step: SearchStep) -> None:
        lacking = f", over limits by {step.lack:.3g}" if step.lack > 0 else ""
        show(step.part, f"{step.phase}: total {step.total:.6g}{lacking}")

    if method == "exact":
        return _solve_exactly(columns, _EXACT_S if given.time_s is None else given.time_s, seed, show, stop)
    budget_s = _CLIMB_S if given.time_s is None else given.time_s
    found = climb(columns, time_s=budget_s, seed=seed, listener=listen, stop=stop)
    return found.home, _PROVED if found.proved else ""


def _solve_exactly(
    columns: Columns, time_s: float, seed: int, show: Shown, stop: Callable[[], bool]
) -> tuple[Ints, str]:
    """Like `_solve`, with the exact method. A good initial plan makes the exact method faster."""
    began_s = time.process_time()

    def climbed(step: SearchStep) -> None:
        show(step.part * _CLIMBING, f"initial plan: total {step.total:.6g}")

    def listen(far: ExactProgress) -> None:
        part = _CLIMBING + (1 - _CLIMBING) * far.elapsed_s / max(left_s, 1e-9)
        show(min(1.0, part), f"total {far.total:.6g}, bound {far.bound:.6g}")

    upper = climb(columns, time_s=min(_CLIMB_S, time_s * _CLIMBING), seed=seed, listener=climbed, stop=stop).home
    left_s = max(time_s - (time.process_time() - began_s), 0.0)
    try:
        found = exact.solve(columns, time_s=left_s, upper=upper, progress=listen, stop=stop)
    except exact.TooLarge as error:
        raise ConfigurationError(f"--method exact: {error}") from None
    if found.proved:
        return found.home, _PROVED
    if found.bound <= found.total * _TELLS_NOTHING:
        return found.home, "optimality not proved, no lower bound found: the instance is too large for this time"
    return found.home, f"optimality not proved: no feasible plan has a total below {found.bound:.6g}"


def _summary(columns: Columns, home: Ints, first: list[Move]) -> list[str]:
    summary = report.summarise(columns, home)
    lines = report.lines(summary)
    for move in first:
        lines.append(f"  {move.table}: {move.source} -> {move.target}, total {move.total:+.4g}{_jobs(move)}")
    if summary.moved_tables > len(first):
        lines.append(f"  and {summary.moved_tables - len(first):,} more; `--moves FILE` writes all")
    return lines + report.violation_lines(summary)


def _said(columns: Columns, found: Replicated, needed: RequiredPieces) -> str:
    count = Counter(replica.reason for replica in found.replicas)
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(count.items())) or "none"
    nowhere = len(jobs_without_region(columns, found.pieces, needed))
    return f"replicas: {reasons}; {nowhere:,} of {len(columns.kind):,} jobs have no region with their data and hardware"


def _jobs(move: Move) -> str:
    counts = {
        "gain": len(move.gain_region), "lose": len(move.lose_region), "change": len(move.change_region),
    }  # fmt: skip
    said = [f"{count} {word} a region" for word, count in counts.items() if count]
    return f"; jobs: {', '.join(said)}" if said else ""
