"""The tables of `mizzen reclaim simulate`, for the terminal, the report and docs/reclaim-experiments.md."""

from collections.abc import Mapping

from infra.reports.formats import NONE, number
from infra.reports.tables import ALL, ReportTable
from research.reclaim import published_tables
from research.reclaim.compare import Figures, ratio

_NOTE_3 = """means over seeds, of departures after the calibration; in brackets the value of Table III
loss: GPU hours from the newest complete checkpoint to the departure, in all; x slurm: relative to slurm-pr's
downtime: median over departures that hit a job; success: running again within 10 minutes of the departure
degradation: research traffic displaced on links that carry a migration"""
_NOTE_4 = "as above; in brackets the value of Table IV; relative: to the row without protocols"
_NOTE_MORE = """handed over: share of departures with notice before which the job had moved; local: within a building
saving: GPU hours stalled by checkpoints; overhead: with those held in transfers and restarts, or computed beside jobs
clairvoyant: the loss if the newest checkpoint had completed just before each departure without notice"""


def tables(found: Mapping[str, Figures]) -> dict[str, ReportTable]:
    """Returns the tables that have rows, by their headings in a report."""
    every = {
        "Systems": main_table(found),
        "Bounds": bounds_table(found),
        "Protocols alone and together": ablation_table(found),
        "More values": more_table(found),
    }
    return {heading: table for heading, table in every.items() if table.rows}


def main_table(found: Mapping[str, Figures]) -> ReportTable:
    """Returns Table III with our results."""
    base, was = found.get("slurm-pr"), published_tables.TABLE_3["slurm-pr"]
    rows = []
    for name, one in found.items():
        row = published_tables.TABLE_3.get(published_tables.SAME.get(name, name))
        relative = NONE if base is None else number(ratio(one, base, "loss_gpu_h")[0], 2)
        rows.append(
            [
                name,
                _pair(one.mean("loss_gpu_h"), row.loss_gpu_h if row else None, 2),
                _with(relative, row.loss_gpu_h / was.loss_gpu_h if row else None, 2),
                _pair(one.mean("downtime_s"), row.downtime_s if row else None, 0),
                _pair(100 * one.mean("success"), 100 * row.success if row else None, 1),
                _pair(100 * one.mean("degradation"), 100 * row.degradation if row else None, 1),
                _pair(100 * one.mean("utilization"), 100 * row.utilization if row else None, 1),
            ]
        )
    head = ["SYSTEM", "LOSS GPU-H", "X SLURM", "DOWNTIME S", "SUCCESS %", "DEGRADATION %", "GPU UTIL. %"]
    return ReportTable(head, rows, _NOTE_3)


def ablation_table(found: Mapping[str, Figures]) -> ReportTable:
    """Returns Table IV with our results; rows that were not run are left out."""
    base = published_tables.named(found, "none")
    rows = []
    for name, (loss, downtime, degradation) in published_tables.TABLE_4.items():
        one = published_tables.named(found, name)
        if one is None:
            continue
        relative = NONE if base is None else number(ratio(one, base, "loss_gpu_h")[0], 2)
        rows.append(
            [
                *("on" if protocol in name.split("+") else "-" for protocol in ("p1", "p2", "p3")),
                _pair(one.mean("loss_gpu_h"), loss, 2),
                _with(relative, loss / published_tables.TABLE_4["none"][0], 2),
                _pair(one.mean("downtime_s"), downtime, 0),
                _pair(100 * one.mean("degradation"), 100 * degradation, 1),
            ]
        )
    return ReportTable(["P1", "P2", "P3", "LOSS GPU-H", "RELATIVE", "DOWNTIME S", "DEGRADATION %"], rows, _NOTE_4)


def more_table(found: Mapping[str, Figures]) -> ReportTable:
    """Returns the measurements that Table III does not show."""
    columns: dict[str, tuple[str, float, int]] = {
        "HITS": ("hits", 1, 1),
        "NO NOTICE": ("emergencies", 1, 1),
        "THEIR LOSS": ("emergency_loss_gpu_h", 1, 2),
        "CLAIRVOYANT": ("clairvoyant_gpu_h", 1, 2),
        "HANDED OVER %": ("handed_over", 100, 1),
        "LOCAL %": ("local_share", 100, 0),
        "DOWN P99 S": ("downtime_p99_s", 1, 0),
        "INTERVAL S": ("interval_s", 1, 0),
        "SAVING GPU-H": ("saving_gpu_h", 1, 2),
        "OVERHEAD GPU-H": ("overhead_gpu_h", 1, 1),
        "WRITTEN TB": ("written_tb", 1, 1),
        "EARLY MOVES": ("early_moves", 1, 0),
    }
    rows = [
        [name, *(number(one.mean(value) * factor, places) for value, factor, places in columns.values())]
        for name, one in found.items()
    ]
    return ReportTable(["SYSTEM", *columns], rows, _NOTE_MORE)


def bounds_table(found: Mapping[str, Figures]) -> ReportTable:
    """Returns the bounds of the comparison."""
    words = {None: "not run", True: "met", False: "missed"}
    rows = [[one.name, one.required, one.measured, words[one.is_met]] for one in published_tables.bounds(found)]
    return ReportTable(["BOUND", "REQUIRED", "MEASURED (95 % OF SEEDS' RESAMPLES)", ""], rows, texts=ALL)


def _pair(value: float, published_value: float | None, places: int) -> str:
    return _with(number(value, places), published_value, places)


def _with(text: str, published_value: float | None, places: int) -> str:
    return text if published_value is None else f"{text} ({number(published_value, places)})"
