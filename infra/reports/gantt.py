"""A Gantt chart of GPU slots: a row for each slot, by region and machine, over time."""

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes

from infra.reports.charts import INK, tip

_BAR = 0.84
_GAP, _HEADING = 0.6, 1.6
"""Space between two machines, and above the first machine of a region, in rows."""
_CHARACTER = 0.005
"""Width of a character in a bar, in widths of the chart."""


class Gantt:
    """Draws into axes; times are seconds since the epoch, and the chart shows the seconds since `start_s`."""

    def __init__(self, axes: Axes, slots: Mapping[str, int], start_s: float, end_s: float) -> None:
        """Draws the rows of the machines. `slots`: number of slots by machine, `region/cluster/name (more)`."""
        self.axes, self.start_s, self.length_s = axes, start_s, end_s - start_s
        self._y: dict[tuple[str, int], float] = {}
        y, last = -_GAP, None
        labels = []
        for machine, count in slots.items():
            region, _, name = machine.partition("/")
            y += _GAP if region == last else _HEADING
            if region != last:
                place = axes.get_yaxis_transform()
                axes.text(-0.005, y - 0.9, region, transform=place, ha="right", fontweight="bold", color=INK)
            last = region
            for slot in range(max(1, count)):
                self._y[machine.partition(" ")[0], slot] = y
                axes.axhspan(y - 0.5, y + 0.5, color="#eef2f6" if slot % 2 else "#f6f8fa", lw=0, zorder=0)
                labels.append("  ".join(filter(None, (name if slot == 0 else "", str(slot) if count else ""))))
                y += 1
        axes.set_ylim(y - 0.3, -0.8)
        axes.set_xlim(0, max(self.length_s, 1e-9))
        axes.set_xlabel("seconds")
        axes.set_yticks([*self._y.values()], labels, fontsize=7.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(False)

    def rows(self, machine: str, slots: Iterable[int] | None = None) -> list[float]:
        """Returns the vertical positions of some slots of a machine, or of all."""
        wanted = None if slots is None else set(slots)
        return [y for (of, slot), y in self._y.items() if of == machine and (wanted is None or slot in wanted)]

    def bar(
        self, machine: str, slot: int, begin_s: float, end_s: float, *, name: str = "", says: str = "", **style: object
    ) -> None:
        """Draws a bar. `name` is written into the bar if it is wide enough; `says` is its tooltip."""
        left, y = max(0.0, begin_s - self.start_s), self._y[machine, slot]
        width = end_s - self.start_s - left
        (bar,) = self.axes.barh(y, width, _BAR, left=left, **style)  # type: ignore[arg-type]
        if says:
            bar.set_gid(tip(says))
        if name and width > (len(name) + 1) * _CHARACTER * self.length_s:
            inset = left + _CHARACTER / 2 * self.length_s
            self.axes.text(inset, y, name, va="center_baseline", fontsize=6.5, color="#ffffff", zorder=8)

    def line(self, at_s: float, rows: list[float], colour: str, width: float, says: str = "") -> None:
        """Draws a vertical line at a time over some rows."""
        lines = self.axes.vlines(
            at_s - self.start_s, min(rows) - 0.5, max(rows) + 0.5, color=colour, lw=width, zorder=7
        )
        if says:
            lines.set_gid(tip(says))
