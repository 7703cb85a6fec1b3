"""The picture of a plan of pools: for each GPU type, the GPUs of each pool by fault domain."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infra.reports.charts import ALARM, COLOURS, INK, svg, tip
from ras.plan import PoolOutcome, RegionPlan

_ROW_INCHES, _HEAD_INCHES, _WIDTH_INCHES = 0.28, 0.9, 9.0


def draw(region: str, plan: RegionPlan) -> str:
    """Returns the picture as an `svg` element.

    A bar is a pool, its parts are fault domains. The line is what the pool needs; red is what it lacks after a loss.
    """
    resources = sorted({one.resource for one in plan.outcomes})
    rows = {resource: [one for one in plan.outcomes if one.resource == resource] for resource in resources}
    heights = [_HEAD_INCHES + _ROW_INCHES * len(rows[resource]) for resource in resources]

    def whole(figure: Figure) -> None:
        places = figure.subplots(len(resources), 1, squeeze=False, height_ratios=heights)
        for axes, resource in zip(places.flat, resources, strict=True):
            axes.set_title(f"{region}: {resource}")
            _pools(axes, plan, rows[resource])

    return svg(whole, (_WIDTH_INCHES, sum(heights)))


def _pools(axes: Axes, plan: RegionPlan, outcomes: list[PoolOutcome]) -> None:
    domains = sorted({domain for domain, _ in plan.targets})
    for y, one in enumerate(outcomes):
        left = 0
        for number, domain in enumerate(domains):
            units = sum(
                type_.units * pools.get(one.pool, 0)
                for (place, type_), pools in plan.targets.items()
                if place == domain and type_.resource == one.resource
            )
            if units:
                (bar,) = axes.barh(y, units, 0.7, left=left, color=COLOURS[number % len(COLOURS)], edgecolor="white")
                bar.set_gid(tip(f"{one.pool}: {units} GPUs in {domain}"))
                left += units
        if one.short:
            (bar,) = axes.barh(y, one.short, 0.7, left=left, color="white", edgecolor=ALARM, hatch="////")
            bar.set_gid(tip(f"{one.pool}: lacks {one.short} of {one.needed} GPUs"))
        axes.vlines(one.needed, y - 0.42, y + 0.42, color=INK, linewidth=1.5)
    axes.set_yticks(range(len(outcomes)), [one.pool for one in outcomes])
    axes.invert_yaxis()
    axes.set_xlabel("GPUs, by fault domain; line: needed after the loss of a fault domain; hatched: lacking")
    axes.grid(False, axis="y")
