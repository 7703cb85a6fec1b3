"""`mizzen spot replay`: reads the traces, replays the policies with progress, and prints a table or writes JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from infra.errors import ConfigurationError
from server.outputs import STANDARD, check_outputs, write_json
from server.progress import EXIT_INTERRUPTED, interrupts, shown
from spot.policies import POLICIES
from spot.replay import ReplaySettings, WindowResult
from spot.traces import SpotTrace, TraceError, read_traces
from spot.windows import Mean, Windows, means, replay_windows

_ALL = "all"


def run_replay(
    *,
    traces: Path,
    names: Sequence[str],
    target: int,
    overprovision: int,
    cold_start_s: float,
    od_price_ratio: float,
    window_h: float,
    windows: int,
    seed: int,
    unlimited: bool | None,
    json_path: Path | None,
) -> int:
    """Runs `mizzen spot replay`; returns the exit code. An interrupted run prints the policies that are complete.

    Raises:
        ConfigurationError: an option or a trace file is not valid; the message names it.
    """
    chosen = _policies(names)
    check_outputs({"--json": json_path}, {})
    try:
        trace = read_traces(traces, unlimited=unlimited)
    except TraceError as error:
        raise ConfigurationError(f"--traces: {error}") from None
    settings = ReplaySettings(target, cold_start_s, od_price_ratio)
    span = Windows(_ticks(window_h, trace), windows, seed)
    err = Console(stderr=True)
    results: dict[str, list[WindowResult]] = {}
    with interrupts() as interrupted, shown(err) as show:
        for name in chosen:
            progress = show(name)
            done: list[WindowResult] = []
            for result in replay_windows(trace, name, overprovision, settings, span):
                done.append(result)
                progress(len(done) / windows, f"{len(done):,} of {windows:,} windows replayed")
                if interrupted():
                    break
            if len(done) == windows:
                results[name] = done
            if interrupted():
                break
    complete = len(results) == len(chosen)
    if json_path is not None:
        write_json(json_path, _document(traces, trace, settings, overprovision, span, results, complete))
    if json_path != STANDARD and results:
        click.echo(_table(results))
    if not complete:
        missing = ", ".join(name for name in chosen if name not in results)
        err.print(f"mizzen: interrupted: not all windows were replayed for {missing}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    return 0


def _policies(names: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    for name in names:
        if name != _ALL and name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigurationError(f"--policy: {name}: no such policy: give {_ALL}, or one of {known}")
        chosen += POLICIES if name == _ALL else [name]
    return list(dict.fromkeys(chosen))


def _ticks(window_h: float, trace: SpotTrace) -> int:
    ticks = int(window_h * 3600 / trace.gap_s + 1e-9)
    gap_h, whole_h = trace.gap_s / 3600, trace.ticks * trace.gap_s / 3600
    if not 1 <= ticks <= trace.ticks:
        raise ConfigurationError(
            f"--window-h: {window_h:g}: the trace has {trace.ticks:,} ticks of {trace.gap_s:g} s: "
            f"give {gap_h:.4g} to {whole_h:.6g} hours"
        )
    return ticks


def _document(
    traces: Path,
    trace: SpotTrace,
    settings: ReplaySettings,
    overprovision: int,
    windows: Windows,
    results: dict[str, list[WindowResult]],
    complete: bool,
) -> dict[str, Any]:
    return {
        "traces": str(traces),
        "zones": [zone.name for zone in trace.zones],
        "gap_s": trace.gap_s,
        "ticks": trace.ticks,
        "ticks_cut": trace.cut,
        "unlimited": trace.unlimited,
        "settings": {**asdict(settings), "overprovision": overprovision},
        "windows": {**asdict(windows), "window_s": windows.ticks * trace.gap_s},
        "interrupted": not complete,
        "policies": [
            {
                "policy": name,
                "means": {field: asdict(mean) for field, mean in means(of).items()},
                "windows": [one.to_json() for one in of],
            }
            for name, of in results.items()
        ],
    }


def _table(results: dict[str, list[WindowResult]]) -> str:
    rows = [["POLICY", "AVAILABILITY %", "COST %", "ON-DEMAND %", "LAUNCHES", "PREEMPTIONS"]]
    columns = {"availability": 100, "cost": 100, "on_demand_share": 100, "launches": 1, "preemptions": 1}
    for name, of in results.items():
        found = means(of)
        cells = [_cell(found[field], factor) for field, factor in columns.items()]
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "means over windows ± standard errors; cost relative to all on-demand"])


def _cell(value: Mean, factor: float) -> str:
    return f"{factor * value.mean:.1f} ± {factor * value.standard_error:.1f}"
