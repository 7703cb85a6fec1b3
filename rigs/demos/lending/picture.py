"""The picture of a run: one row for each GPU, coloured by training, with the owners' commands."""

from datetime import datetime

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from infra.reports.charts import ALARM, INK, colours, events, svg
from infra.reports.gantt import Gantt
from rigs.demos.lending.installation import BUILDINGS, MACHINES, TRAININGS
from rigs.demos.lending.scenario import LendingCourse, Word

_OWNED, _SAVE, _EDGE = "#d3dae0", "#16202a", "#8995a1"
_TOGETHER_S = 1.0
_COLOURS = colours(one.name for one in TRAININGS)


def picture(course: LendingCourse) -> str:
    """Returns an SVG."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        gantt = Gantt(axes, MACHINES, course.began_s, course.ended_s)
        for word in course.words:
            if word.notice_s is not None:
                _owned(gantt, course, word)
        _held(gantt, course)
        _worked(gantt, course)
        for word in course.words:
            gantt.line(word.said_s, gantt.rows(word.machine, word.gpus), INK, 1.4)
        for at_s, _ in course.events:
            axes.axvline(at_s - course.began_s, color=INK, lw=0.8, ls=":", zorder=7)
        events(axes, [(at_s - course.began_s, text) for at_s, text in _labels(course)])
        figure.legend(handles=_handles(), loc="outside lower center", ncols=5, fontsize=7.5, frameon=False)

    return svg(draw, (9.6, 6.0))


def _labels(course: LendingCourse) -> list[tuple[float, str]]:
    """Returns time and text of the events. Events within `_TOGETHER_S` share one text."""
    marks = [(word.said_s, word.text, word.machine.partition("/")[2]) for word in course.words]
    groups: list[list[tuple[float, str, str]]] = []
    for mark in sorted([*marks, *((at_s, text, "") for at_s, text in course.events)]):
        if groups and mark[0] - groups[-1][0][0] < _TOGETHER_S:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    out = []
    for group in groups:
        places: dict[str, list[str]] = {}
        for _, text, place in group:
            places.setdefault(text, []).extend([place] if place else [])
        texts = (f"{_named(where)}: {text}" if where else text for text, where in places.items())
        out.append((group[0][0], "; ".join(texts)))
    return out


def _named(places: list[str]) -> str:
    """Returns a short name of machines: that of the building, if they are all machines of one."""
    for building in BUILDINGS:
        if sorted(places) == sorted(m.partition("/")[2] for m in MACHINES if f"/{building}/" in m):
            return f"all of {building}"
    return ", ".join(places)


def _owned(gantt: Gantt, course: LendingCourse, word: Word) -> None:
    """Draws the periods in which owners had GPUs, and the notices."""
    assert word.notice_s is not None
    for gpu in word.gpus:
        lent = (
            one.said_s for one in course.words
            if one.notice_s is None and one.machine == word.machine and gpu in one.gpus and one.said_s > word.said_s
        )  # fmt: skip
        until_s = min(lent, default=course.ended_s)
        gantt.bar(word.machine, gpu, word.answered_s or word.said_s, until_s, color=_OWNED, zorder=1)
        if word.notice_s:
            gantt.bar(
                word.machine, gpu, word.said_s, min(until_s, word.said_s + word.notice_s), facecolor="none",
                hatch="/////", edgecolor=_EDGE, lw=0, zorder=2,
            )  # fmt: skip


def _held(gantt: Gantt, course: LendingCourse) -> None:
    """Draws the allocations, pale: a task starts, loads or ends."""
    for name, holds in course.holds.items():
        for hold in holds:
            if hold["held_at"] is None:
                continue
            begin_s = datetime.fromisoformat(hold["held_at"]).timestamp()
            end = hold["released_at"]
            end_s = course.ended_s if end is None else datetime.fromisoformat(end).timestamp()
            for gpu in hold["slots"]:
                gantt.bar(hold["machine"], gpu, begin_s, end_s, color=_COLOURS[name], alpha=0.35, lw=0, zorder=3)


def _worked(gantt: Gantt, course: LendingCourse) -> None:
    """Draws the steps of each task, its saves, and the work that was done again."""
    for name, ranks in course.lines.items():
        for rank in ranks:
            for attempt in sorted({line.attempt for line in rank}):
                own = [line for line in rank if line.attempt == attempt]
                machine, gpu = own[0].machine, own[0].gpu
                gantt.bar(machine, gpu, own[0].at_s, own[-1].at_s, color=_COLOURS[name], lw=0, zorder=4)
                repeated = {one.step for one in rank if one.attempt > attempt and one.event == "step"}
                again_s = [line.at_s for line in own if line.event == "step" and line.step in repeated]
                if again_s:
                    gantt.bar(machine, gpu, again_s[0], own[-1].at_s, color=ALARM, lw=0, zorder=5)
                saved_s = [line.at_s for line in ranks[0] if line.attempt == attempt and line.event == "saved"]
                _saves(gantt.axes, gantt.rows(machine, (gpu,))[0], [at_s - course.began_s for at_s in saved_s])


def _saves(axes: Axes, row: float, at_s: list[float]) -> None:
    axes.vlines(at_s, row + 0.1, row + 0.4, color=_SAVE, lw=0.8, zorder=6)


def _handles() -> list[Patch | Line2D]:
    """Returns the entries of the legend."""
    return [
        *(Patch(color=colour, label=name) for name, colour in _COLOURS.items()),
        Patch(color="#7f7f7f", alpha=0.35, label="held: task starts or leaves"),
        Patch(color=ALARM, label="work done again"),
        Patch(color=_OWNED, label="taken by the owner"),
        Patch(facecolor="none", edgecolor=_EDGE, hatch="/////", lw=0, label="notice"),
        Line2D([], [], color=_SAVE, lw=0.8, marker="|", ls="", markersize=6, label="checkpoint"),
    ]
