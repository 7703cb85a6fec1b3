"""The picture of a run: one row for each GPU, coloured by training, with the words of the owners."""

import io
from datetime import datetime

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rigs.demos.lending.installation import BUILDINGS, MACHINES, TRAININGS
from rigs.demos.lending.scenario import Course, Word
from simulation.pictures import COLOURS, STYLE

_INK, _OWNED, _LOST, _SAVE = "#3a4652", "#dfe4e9", "#a01c2c", "#16202a"
_BAR, _GAP = 0.8, 0.7
_TOGETHER_S = 1.0
_COLOURS = {one.name: COLOURS[index] for index, one in enumerate(TRAININGS)}


def picture(course: Course) -> bytes:
    """Returns a PNG."""
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(9.6, 6.0), layout="constrained")
        FigureCanvasAgg(figure)
        _Picture(figure.subplots(), course).draw()
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=120)
        return out.getvalue()


def _labels(course: Course) -> list[tuple[float, str]]:
    """Returns time and text of what happened. What happened within `_TOGETHER_S` has one text."""
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


class _Picture:
    def __init__(self, axes: Axes, course: Course) -> None:
        self._axes, self._course = axes, course
        self._length_s = course.ended_s - course.began_s
        self._y: dict[tuple[str, int], float] = {}
        y = 0.0
        for machine, gpus in MACHINES.items():
            for gpu in range(gpus):
                self._y[machine, gpu] = y
                y += 1.0
            y += _GAP

    def draw(self) -> None:
        axes = self._axes
        for word in self._course.words:
            if word.notice_s is not None:
                self._owned(word)
        self._held()
        self._worked()
        self._words()
        axes.set_ylim(max(self._y.values()) + 0.8, -0.8)
        axes.set_xlim(0, self._length_s)
        axes.set_xlabel("seconds")
        axes.set_yticks([*self._y.values()], [f"GPU {gpu}" for _, gpu in self._y], fontsize=7.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        for machine, gpus in MACHINES.items():
            middle = self._y[machine, 0] + (gpus - 1) / 2
            axes.annotate(
                machine.partition("/")[2].replace("/", "\n"), (-0.062, middle), xycoords=("axes fraction", "data"),
                ha="right", va="center", fontsize=8.5, fontweight="bold", color=_INK,
            )  # fmt: skip
        self._legend()

    def _x(self, at_s: float) -> float:
        return at_s - self._course.began_s

    def _bar(self, row: tuple[str, int], begin_s: float, end_s: float, **style: object) -> None:
        left = max(0.0, self._x(begin_s))
        self._axes.barh(self._y[row], self._x(end_s) - left, _BAR, left=left, **style)  # type: ignore[arg-type]

    def _owned(self, word: Word) -> None:
        """Draws when GPUs were the owner's, and the notice."""
        assert word.notice_s is not None
        for gpu in word.gpus:
            lent = (
                one.said_s for one in self._course.words
                if one.notice_s is None and one.machine == word.machine and gpu in one.gpus and one.said_s > word.said_s
            )  # fmt: skip
            until_s = min(lent, default=self._course.ended_s)
            row = (word.machine, gpu)
            self._bar(row, word.answered_s or word.said_s, until_s, color=_OWNED, zorder=1)
            if word.notice_s:
                self._bar(
                    row, word.said_s, min(until_s, word.said_s + word.notice_s), facecolor="none", hatch="/////",
                    edgecolor="#8995a1", lw=0, zorder=2,
                )  # fmt: skip

    def _held(self) -> None:
        """Draws the allocations, pale: a task starts, loads or ends."""
        for name, holds in self._course.holds.items():
            for hold in holds:
                if hold["held_at"] is None:
                    continue
                begin_s = datetime.fromisoformat(hold["held_at"]).timestamp()
                end = hold["released_at"]
                end_s = self._course.ended_s if end is None else datetime.fromisoformat(end).timestamp()
                for gpu in hold["slots"]:
                    self._bar((hold["machine"], gpu), begin_s, end_s, color=_COLOURS[name], alpha=0.35, lw=0, zorder=3)

    def _worked(self) -> None:
        """Draws the steps of each task, its saves, and the work that was done again."""
        for name, ranks in self._course.lines.items():
            for rank in ranks:
                for attempt in sorted({line.attempt for line in rank}):
                    own = [line for line in rank if line.attempt == attempt]
                    row = (own[0].machine, own[0].gpu)
                    repeated = {one.step for one in rank if one.attempt > attempt and one.event == "step"}
                    self._bar(row, own[0].at_s, own[-1].at_s, color=_COLOURS[name], lw=0, zorder=4)
                    again_s = [
                        line.at_s for line in own if line.event == "step"
                        and line.step in repeated
                    ]  # fmt: skip
                    if again_s:
                        self._bar(row, again_s[0], own[-1].at_s, color=_LOST, lw=0, zorder=5)
                    saves = [line for line in ranks[0] if line.attempt == attempt and line.event == "saved"]
                    y = self._y[row]
                    self._axes.vlines(
                        [self._x(line.at_s) for line in saves], y + 0.1, y + _BAR / 2, color=_SAVE, lw=0.8, zorder=6
                    )

    def _words(self) -> None:
        """Draws a line at each word, over the GPUs that it is about, and its text above."""
        axes, course = self._axes, self._course
        for word in course.words:
            rows = [self._y[word.machine, gpu] for gpu in word.gpus]
            axes.vlines(self._x(word.said_s), min(rows) - 0.5, max(rows) + 0.5, color=_INK, lw=1.4, zorder=7)
        for at_s, _ in course.events:
            axes.axvline(self._x(at_s), color=_INK, lw=0.8, ls=":", zorder=7)
        for number, (at_s, text) in enumerate(_labels(course), 1):
            axes.annotate(
                f"{number} {text}", (self._x(at_s), 1.01), xycoords=("data", "axes fraction"), fontsize=7.0,
                rotation=28, ha="left", va="bottom", color=_INK,
            )  # fmt: skip

    def _legend(self) -> None:
        handles = [
            *(Patch(color=colour, label=name) for name, colour in _COLOURS.items()),
            Patch(color="#7f7f7f", alpha=0.35, label="held: task starts or leaves"),
            Patch(color=_LOST, label="work done again"),
            Patch(color=_OWNED, label="taken by the owner"),
            Patch(facecolor="none", edgecolor="#8995a1", hatch="/////", lw=0, label="notice"),
            Line2D([], [], color=_SAVE, lw=0.8, marker="|", ls="", markersize=6, label="checkpoint"),
        ]
        self._axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=5, fontsize=7.5, frameon=False
        )
