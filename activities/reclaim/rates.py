"""How often the owners of a region's lent machines are expected to take them back."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from sqlalchemy.orm import Session

from infra.db.models import Cluster
from infra.db.reclaim import SiteHazard
from reclaim.arrays import Floats
from reclaim.buildings import AHEAD_S, NEAR_S, Rate
from reclaim.hazard import HazardModel
from reclaim.hazard_state import HazardState

_NOTICEABLE = 0.1
"""A relative change of a rate by less is not stored."""


@dataclass(frozen=True)
class Rates:
    """The rates of a region's lent machines."""

    number: Mapping[str, int]
    """The row of each machine."""
    table: Floats
    """One row for each machine, one column for each field of `Rate`."""

    @classmethod
    def of(cls, model: HazardModel, emergencies: HazardState, noticed: HazardState, now_s: float) -> "Rates":
        """Returns the rates at a time, from the hazards of departures without and with notice of the same machines."""
        columns = [column for state in (emergencies, noticed) for column in _near_and_later(model, state, now_s)]
        return cls({node: row for row, node in enumerate(emergencies.nodes)}, np.stack(columns, axis=1))

    def by_machine(self) -> dict[str, Rate]:
        """Returns the expected departures of each machine, by its id."""
        return {machine: Rate(*row) for machine, row in zip(self.number, self.table.tolist(), strict=True)}


def _near_and_later(model: HazardModel, state: HazardState, now_s: float) -> tuple[Floats, Floats]:
    near = model.expected(state, now_s, NEAR_S)
    later = np.maximum(model.expected(state, now_s, AHEAD_S) - near, 0.0)
    return near / (NEAR_S / 3600), later / ((AHEAD_S - NEAR_S) / 3600)


def write_rates(session: Session, region: str, rates: Rates, state: HazardState) -> None:
    """Stores the rates of a region's machines and clusters, as far as they have changed noticeably.

    A change of a cluster lets the schedulers read its machines again. `state` says which machines are in which cluster.
    """
    near = rates.table[:, 0]
    for number, name in enumerate(state.building_names):
        value = float(near[state.building == number].mean())
        row = session.get(Cluster, (region, name), with_for_update=True)
        if row is not None and _differs(row.departures_per_h, value):
            row.departures_per_h = _short(value)
    site = session.get_one(SiteHazard, region)
    new, stored = rates.by_machine(), site.machines
    if stored.keys() != new.keys() or any(
        _differs(before, now) for one, rate in new.items() for before, now in zip(stored[one], rate, strict=True)
    ):
        site.machines = {machine: [_short(value) for value in rate] for machine, rate in new.items()}


def _differs(stored: float, value: float) -> bool:
    return abs(stored - value) > _NOTICEABLE * max(stored, value)


def _short(value: float) -> float:
    return float(f"{value:.2g}")
