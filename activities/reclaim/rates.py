"""How often a region's lent machines are expected to depart without notice, in the next hours and in the days after."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy.orm import Session

from infra.db.models import Cluster
from infra.db.reclaim import SiteHazard
from reclaim.arrays import Floats
from reclaim.forecasts import NEAR_S
from reclaim.hazard import HazardModel
from reclaim.hazard_state import HazardState
from reclaim.joint import EARLY_HORIZON_S, HOUR_S

_NOTICEABLE = 0.1
"""A relative change of a rate by less is not stored."""


@dataclass(frozen=True)
class Rates:
    """Departures per hour of each machine and of each cluster. Rates are pairs: in the next `NEAR_S`, and later."""

    number: dict[str, int]
    """The row of each machine in `machines`."""
    machines: Floats
    """One row for each machine, two columns."""
    clusters: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, model: HazardModel, state: HazardState, now_s: float) -> "Rates":
        """Returns the rates at a time."""
        near = model.expected(state, now_s, NEAR_S)
        later = model.expected(state, now_s, EARLY_HORIZON_S) - near
        machines = np.stack([near / (NEAR_S / HOUR_S), later / ((EARLY_HORIZON_S - NEAR_S) / HOUR_S)], axis=1)
        machines = np.maximum(machines, 0.0)
        size = len(state.building_names)
        counts = np.maximum(np.bincount(state.building, minlength=size), 1)
        means = [np.bincount(state.building, column, minlength=size) / counts for column in machines.T]
        clusters = {name: (float(means[0][n]), float(means[1][n])) for n, name in enumerate(state.building_names)}
        return cls({node: row for row, node in enumerate(state.nodes)}, machines, clusters)

    @property
    def least(self) -> tuple[float, float]:
        """The lowest rates of any machine."""
        near, later = self.machines.min(axis=0, initial=np.inf)
        return float(near), float(later)

    def of_machines(self, machines: Iterable[str]) -> tuple[float, float]:
        """Returns the rates of some machines together."""
        near, later = self.machines[[self.number[machine] for machine in machines]].sum(axis=0)
        return float(near), float(later)

    def of_cluster(self, cluster: str) -> tuple[float, float]:
        """Returns the rates of one machine of a cluster; zeros if it has no lent machines."""
        return self.clusters.get(cluster, (0.0, 0.0))


def write_rates(session: Session, region: str, rates: Rates) -> None:
    """Stores the rates of a region's clusters and machines, as far as they have changed noticeably.

    A change of a cluster lets the schedulers read its machines again.
    """
    for name, values in rates.clusters.items():
        row = session.get(Cluster, (region, name), with_for_update=True)
        if row is not None:
            stored = row.departures_per_h, row.later_departures_per_h
            if _differs(stored, values):
                row.departures_per_h, row.later_departures_per_h = _short(values)
    site = session.get_one(SiteHazard, region)
    each = {machine: rates.of_machines([machine]) for machine in rates.number}
    if site.machines.keys() != each.keys() or any(_differs(site.machines[one], each[one]) for one in each):
        site.machines = {machine: list(_short(values)) for machine, values in each.items()}


def _differs(stored: Sequence[float], values: Sequence[float]) -> bool:
    return any(abs(a - b) > _NOTICEABLE * max(a, b) for a, b in zip(stored, values, strict=True))


def _short(values: tuple[float, float]) -> tuple[float, float]:
    return float(f"{values[0]:.2g}"), float(f"{values[1]:.2g}")
