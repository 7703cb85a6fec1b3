"""The counts of the estimator of hazards: an immutable value, which can be stored as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from reclaim.arrays import Floats, Ints
from reclaim.drift import DriftState
from reclaim.profile import DAY_S, Profile, ProfileSettings


@dataclass(frozen=True)
class RateChange:
    """The last change of the rate that was noticed."""

    since_s: float
    """The estimated time of the change."""
    events: int
    """The departures since the change..."""
    expected: float
    """...and the number expected at the rate before the change."""


@dataclass(frozen=True)
class HazardState:
    """The counts of a site. Departures and exposure are counted for each node and day, the rest for the site."""

    nodes: tuple[str, ...]
    buildings: tuple[str, ...]
    """The building of each node."""
    now_s: float
    """Everything up to this time has been counted."""
    row_from_s: float
    """When the last row of the next two tables began. A row covers a day, and the last row is the newest."""
    events: Ints
    """The departures of each node (columns) on each day (rows)."""
    hours: Floats
    """The hours for which the node was lent, each weighted with the factor of its time of day."""
    profile: Profile
    recent_events: Floats
    """The departures of each building (`building_names`), with fast decay..."""
    recent_expected: Floats
    """...and how many were expected, with the same decay."""
    drift: DriftState
    change: RateChange | None = None
    departures: int = 0
    """All departures so far."""
    part_events: int = 0
    """The departures in the current part of the day..."""
    part_expected: float = 0.0
    """...and how many were expected."""
    squares: float = 0.0
    """The sum of (departures - expected)^2 over past parts of the day, with the decay of the profile..."""
    means: float = 0.0
    """...and the sum of the expected departures, which it equals in the mean for a Poisson process."""

    @classmethod
    def start(
        cls, nodes: Sequence[str], buildings: Sequence[str], at_s: float, settings: ProfileSettings
    ) -> "HazardState":
        """Returns the state of a site without observations.

        Args:
            nodes: the name of each node.
            buildings: the building of each node.
            at_s: the time from which departures are counted.
            settings: the parts of the day.

        Raises:
            ValueError: a node occurs twice, or there is not one building for each node.
        """
        _check(nodes, buildings)
        none = np.zeros((1, len(nodes)))
        few = np.zeros(len(set(buildings)))
        return cls(
            tuple(nodes), tuple(buildings), at_s, at_s, none.astype(np.int64), none, Profile.start(settings), few, few,
            DriftState.start(at_s),
        )  # fmt: skip

    @cached_property
    def building_names(self) -> tuple[str, ...]:
        """The names of the buildings, sorted."""
        return tuple(sorted(set(self.buildings)))

    @cached_property
    def building(self) -> Ints:
        """The number of each node's building in `building_names`."""
        number = {name: i for i, name in enumerate(self.building_names)}
        return np.array([number[name] for name in self.buildings], dtype=np.int64)

    @cached_property
    def row_starts_s(self) -> Floats:
        """When each row began."""
        return np.asarray(self.row_from_s - DAY_S * np.arange(len(self.events))[::-1], np.float64)

    def with_nodes(self, nodes: Sequence[str], buildings: Sequence[str]) -> "HazardState":
        """Returns the state for another list of nodes: known nodes keep their counts, the counts of others are dropped.

        Raises:
            ValueError: as `start`.
        """
        _check(nodes, buildings)
        column = {name: i for i, name in enumerate(self.nodes)}
        place = [column.get(name, -1) for name in nodes]
        known = np.array(place, dtype=np.int64) >= 0
        names = sorted(set(buildings))
        row = {name: i for i, name in enumerate(self.building_names)}
        kept = [row.get(name, -1) for name in names]
        return replace(
            self,
            nodes=tuple(nodes),
            buildings=tuple(buildings),
            events=np.where(known, self._padded(self.events)[:, place], 0),
            hours=np.where(known, self._padded(self.hours)[:, place], 0.0),
            recent_events=np.append(self.recent_events, 0.0)[kept],
            recent_expected=np.append(self.recent_expected, 0.0)[kept],
        )

    @staticmethod
    def _padded(table: Any) -> Any:
        return np.pad(table, ((0, 0), (0, 1)))

    def to_json(self) -> dict[str, Any]:
        """Returns the state as values of JSON, without settings."""
        return {
            "nodes": list(self.nodes),
            "buildings": list(self.buildings),
            "now_s": self.now_s,
            "row_from_s": self.row_from_s,
            "events": self.events.tolist(),
            "hours": self.hours.round(6).tolist(),
            "profile": self.profile.to_json(),
            "recent_events": self.recent_events.tolist(),
            "recent_expected": self.recent_expected.tolist(),
            "drift": self.drift.to_json(),
            "change": None if self.change is None else asdict(self.change),
            "departures": self.departures,
            "part_events": self.part_events,
            "part_expected": self.part_expected,
            "squares": self.squares,
            "means": self.means,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any], settings: ProfileSettings) -> "HazardState":
        """Returns the state from the result of `to_json`, under the settings with which it was counted.

        Raises:
            ValueError: the body was counted with other parts of the day.
        """
        return cls(
            nodes=tuple(body["nodes"]),
            buildings=tuple(body["buildings"]),
            now_s=float(body["now_s"]),
            row_from_s=float(body["row_from_s"]),
            events=np.array(body["events"], dtype=np.int64),
            hours=np.array(body["hours"], dtype=np.float64),
            profile=Profile.from_json(body["profile"], settings),
            recent_events=np.array(body["recent_events"], dtype=np.float64),
            recent_expected=np.array(body["recent_expected"], dtype=np.float64),
            drift=DriftState.from_json(body["drift"]),
            change=None if body["change"] is None else RateChange(**body["change"]),
            departures=int(body["departures"]),
            part_events=int(body["part_events"]),
            part_expected=float(body["part_expected"]),
            squares=float(body["squares"]),
            means=float(body["means"]),
        )


def _check(nodes: Sequence[str], buildings: Sequence[str]) -> None:
    if len(buildings) != len(nodes):
        raise ValueError(f"buildings: has {len(buildings)} entries: must have one for each of the {len(nodes)} nodes")
    if len(set(nodes)) != len(nodes):
        twice = next(name for i, name in enumerate(nodes) if name in nodes[:i])
        raise ValueError(f"nodes: {twice!r} occurs twice: each node must occur once")
