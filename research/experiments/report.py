"""Writes the tables of docs/experiments.md between two markers; the text around them is kept."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from math import inf, isnan
from pathlib import Path

from infra.reports.tables import ReportTable, write_between
from research.experiments.cases import (
    BEFORE,
    BY_TENANT,
    FEW_REGIONS,
    HIGH_LEVELS,
    LOADS,
    MIXED,
    POLICIES,
    SEEDS,
    TRACES,
    VARIANTS,
    ExperimentCase,
    cases,
)
from research.experiments.pictures import draw
from research.experiments.summary import Misses, PolicyResult, bound_gpu_h, load, misses, wait_figures

BEGIN, END = "<!-- tables: written by `make experiment` -->", "<!-- end of the tables -->"
LEVELS = {"1 and 2": (1, 2), "3 and 4": (3, 4), "5 to 7": (5, 6, 7)}
SIZES = {"1 GPU": range(1, 2), "2 to 7": range(2, 8), "8 to 15": range(8, 16), "16 and more": range(16, 1 << 20)}
SAYS = {
    MIXED: "levels drawn for each workload",
    BY_TENANT: "levels by tenant",
    FEW_REGIONS: "levels drawn, data in few regions",
}
_ALL = (*POLICIES, BEFORE)
_MISSED = ("until the award", "until running", "avoidable until running")
_EVERY_LEVEL, _EVERY_SIZE = range(1, 8), range(1 << 20)


def write_report(out: Path, report: Path) -> None:
    """Writes the tables of the outcomes in `out` into the report, and the pictures into a folder beside it."""
    chosen = list(cases())
    found = load(out, chosen, _ALL)
    if not found:
        return
    pictures = draw(found, report.parent / "experiments")
    write_between(report, BEGIN, END, "\n\n".join(_tables(out, found, pictures)))


def _tables(out: Path, found: Sequence[PolicyResult], pictures: Sequence[str]) -> Iterable[str]:
    yield _seeds(found)
    yield from (f"![{name}](experiments/{name}.svg)" for name in pictures)
    yield "### Before and after\n\nMissed objectives of levels 1 and 2, in %:"
    yield _before(found)
    yield "### Joint placement\n\nPlacement of one workload at a time (`global`) and jointly (`global-joint`):"
    yield _joint(found)
    for trace, variant in product(TRACES, (MIXED, BY_TENANT)):
        here = [o for o in found if o.case.trace == trace and o.case.variant == variant]
        if here:
            yield f"### {trace}, {SAYS[variant]}"
            yield _misses(here)
            yield _waits(here, "until running", LEVELS)
            yield _waits(here, "until running", SIZES)
            yield _waits(here, "until the award", LEVELS)
            yield _hours(out, here)


def _seeds(found: Sequence[PolicyResult]) -> str:
    """Returns the table with the number of seeds for which all policies of a case were run."""
    rows = []
    for trace, variant in product(TRACES, VARIANTS):
        cells = [f"{trace}, {SAYS[variant]}"]
        for load_ in LOADS:
            last = ExperimentCase(trace, load_, 0, variant).policies[-1]
            cells.append(f"{len(_at(found, last, trace, variant, load_))} of {len(SEEDS)}")
        rows.append(cells)
    return "Number of seeds that were run:\n\n" + _table(("case", *(f"load {load_:g}" for load_ in LOADS)), rows)


def _before(found: Sequence[PolicyResult]) -> str:
    rows = []
    for trace, variant, load_ in product(TRACES, (MIXED, BY_TENANT), LOADS):
        both = [_at(found, policy, trace, variant, load_) for policy in (BEFORE, "global")]
        seeds = {o.case.seed for o in both[0]} & {o.case.seed for o in both[1]}
        was, is_ = ([o for o in of if o.case.seed in seeds] for of in both)
        if was and is_:
            cells = [f"{trace}, {SAYS[variant]}", f"{load_:g}"]
            for until, avoidable in (("award", False), ("start", False), ("start", True)):
                old, new = (misses(of, until, avoidable=avoidable) for of in (was, is_))
                cells += [_percent(old), _percent(new), _times(new.percent, old.percent)]
            rows.append(cells)
    compared = (cell for name in _MISSED for cell in (f"{name}: before", "now", "ratio"))
    return _table(("case", "load", *compared), rows)


def _joint(found: Sequence[PolicyResult]) -> str:
    rows = []
    for trace, variant, load_ in product(TRACES, (MIXED, BY_TENANT, FEW_REGIONS), LOADS):
        one, joint = (_at(found, policy, trace, variant, load_) for policy in ("global", "global-joint"))
        if one and len(one) == len(joint):
            cells = [f"{trace}, {SAYS[variant]}", f"{load_:g}"]
            for figure in _JOINTLY.values():
                cells += [figure(one), figure(joint)]
            shorter = sum(_mean_wait_s([b]) < _mean_wait_s([a]) for a, b in zip(one, joint, strict=True))
            rows.append([*cells, f"{shorter} of {len(one)}"])
    compared = (cell for name in _JOINTLY for cell in (f"{name}: one at a time", "jointly"))
    return _table(("case", "load", *compared, "seeds with a shorter mean wait jointly"), rows)


def _misses(here: Sequence[PolicyResult]) -> str:
    def cell(of: Sequence[PolicyResult]) -> list[str]:
        return [
            _spread(of, lambda o: misses(o, "award")),
            _percent(misses(of, "award", within=True)),
            _spread(of, lambda o: misses(o, "start")),
            _percent(misses(of, "start", within=True)),
            _percent(misses(of, "start", avoidable=True)),
        ]

    rows = [[name, f"{load_:g}", *cell(of)] for load_, name, of in _rows(here)]
    return "Missed objectives of levels 1 and 2, in % (lowest and highest seed):\n\n" + _table(
        ("policy", "load", "until the award", "within quota", "until running", "within quota", "avoidable"), rows
    )


def _waits(here: Sequence[PolicyResult], until: str, groups: Mapping[str, Sequence[int]]) -> str:
    by_size = groups is SIZES
    rows = []
    for load_, name, of in _rows(here):
        cells = [
            wait_figures(
                of, until.split()[-1].replace("running", "start"), _EVERY_LEVEL if by_size else group,
                group if by_size else _EVERY_SIZE,
            )
            for group in groups.values()
        ]  # fmt: skip
        rows.append([name, f"{load_:g}", *(" / ".join(map(_seconds, cell)) if cell else "-" for cell in cells)])
    by = "GPUs of the gang" if by_size else "level"
    return f"Waits {until} by {by}, mean / P50 / P95 / P99:\n\n" + _table(("policy", "load", *groups), rows)


def _hours(out: Path, here: Sequence[PolicyResult]) -> str:
    rows = []
    for load_, name, of in _rows(here):
        high = sum(bound_gpu_h(out, o.case, HIGH_LEVELS) for o in of)
        whole = sum(bound_gpu_h(out, o.case, range(1, 8)) for o in of)
        rows.append(
            [
                name, f"{load_:g}",
                _part(sum(o.worked_gpu_h(HIGH_LEVELS) for o in of), high),
                _part(sum(o.worked_gpu_h() for o in of), whole),
                f"{sum(sum(o.body['finished_gpu_h'].values()) for o in of) / len(of):,.0f}",
                f"{sum(o.body['preemptions'] for o in of) / len(of):,.1f}",
                f"{sum(o.body['lost_gpu_h'] for o in of) / len(of):,.1f}",
                f"{100 * sum(o.body['allocation_rate'] or 0 for o in of) / len(of):.1f}",
            ]
        )  # fmt: skip
    return "Work as a fraction of the fluid bound; the other columns are means per seed:\n\n" + _table(
        ("policy", "load", "levels 1 and 2", "all", "GPU h finished", "preemptions", "GPU h lost", "allocated %"), rows
    )


# ------------------------------------------------------------------------------------------------------------- details


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return ReportTable(columns, rows).markdown()


def _mean_wait_s(of: Sequence[PolicyResult]) -> float:
    return (wait_figures(of, "start", _EVERY_LEVEL, _EVERY_SIZE) or [inf])[0]


_JOINTLY: dict[str, Callable[[Sequence[PolicyResult]], str]] = {
    "missed until the award, %": lambda of: _percent(misses(of, "award", _EVERY_LEVEL)),
    "mean wait until running": lambda of: _seconds(_mean_wait_s(of)),
    "preemptions": lambda of: f"{sum(o.body['preemptions'] for o in of):,}",
    "GPU h worked": lambda of: f"{sum(o.worked_gpu_h() for o in of):,.0f}",
}


def _at(found: Sequence[PolicyResult], policy: str, trace: str, variant: str, load_: float) -> list[PolicyResult]:
    return [
        o for o in found if (o.policy, o.case.trace, o.case.variant, o.case.load) == (policy, trace, variant, load_)
    ]


def _rows(here: Sequence[PolicyResult]) -> Iterable[tuple[float, str, list[PolicyResult]]]:
    for load_ in LOADS:
        for policy in _ALL:
            of = [o for o in here if o.policy == policy and o.case.load == load_]
            if of:
                yield load_, policy, of


def _percent(of: Misses) -> str:
    return "-" if isnan(of.percent) else f"{of.percent:.1f}"


def _spread(of: Sequence[PolicyResult], figure: Callable[[Sequence[PolicyResult]], Misses]) -> str:
    each = [figure([o]).percent for o in of]
    return f"{_percent(figure(of))} ({min(each):.1f} to {max(each):.1f})" if len(of) > 1 else _percent(figure(of))


def _times(new: float, old: float) -> str:
    if isnan(new) or isnan(old):
        return "-"
    return f"{new / old:.2f}" if old else ("1" if not new else "more")


def _part(part: float, whole: float) -> str:
    return "-" if isnan(whole) or not whole else f"{part / whole:.3f}"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < inf else "-"
