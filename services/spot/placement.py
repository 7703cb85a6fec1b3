"""Dynamic Placement: the zone of the next spot replica (SkyServe, Algorithm 1)."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from services.spot.values import PolicyState, Zone

FEWEST_ACTIVE = 2
"""With fewer active zones than this, all zones become active again (line 7 of Algorithm 1)."""


@dataclass(frozen=True)
class DynamicPlacement:
    """The three procedures of Algorithm 1 on a `PolicyState`. All results are independent of the order of sets."""

    zones: tuple[Zone, ...]
    """Z, the enabled zones. Zones with equal prices are preferred in this order."""
    spread: bool = True
    """Whether zones with fewer replicas are preferred before cheaper ones, as the text of section 3.1 says. Algorithm 1
    itself only distinguishes zones without replicas from zones with replicas. The two differ once every active zone has
    a replica: Algorithm 1 then launches all further replicas in the cheapest zone."""

    def start(self) -> PolicyState:
        """Returns the state in which all zones are active (line 1)."""
        return PolicyState(available=tuple(zone.name for zone in self.zones))

    def known(self, state: PolicyState) -> PolicyState:
        """Returns the state for the enabled zones, which may have changed: a new zone is active."""
        active = {zone.name for zone in self.zones} - set(state.preempting)
        return self._with(state, active if len(active) >= FEWEST_ACTIVE else {zone.name for zone in self.zones})

    def preempted(self, state: PolicyState, zone: str) -> PolicyState:
        """HANDLE-PREEMPTION: the zone becomes inactive; below two active zones, all zones become active.

        A refused launch counts as a preemption, as in Figure 7. A zone that is not enabled is ignored.
        """
        if zone in state.available:
            state = self._with(state, set(state.available) - {zone})
        if len(state.available) < FEWEST_ACTIVE:
            state = self._with(state, {one.name for one in self.zones})
        return state

    def launched(self, state: PolicyState, zone: str) -> PolicyState:
        """HANDLE-LAUNCH: a replica of the zone became ready, so the zone is active again."""
        return self._with(state, {*state.available, zone}) if zone in state.preempting else state

    def select(self, state: PolicyState, placed: Sequence[str], without: Collection[str] = ()) -> str | None:
        """SELECT-NEXT-ZONE: returns the zone of the next replica; None if `without` contains all active zones.

        Args:
            state: the state of the placement.
            placed: the zone of each current spot replica, ready or not (C of Algorithm 1).
            without: zones in which no launch is tried now, because they recently refused one.
        """
        counts = Counter(placed)
        active = set(state.available) - set(without)

        def key(at: int) -> tuple[int, float, int]:
            zone = self.zones[at]
            held = counts[zone.name]
            return held if self.spread else min(held, 1), zone.usd_per_h, at

        candidates = [at for at, zone in enumerate(self.zones) if zone.name in active]
        return self.zones[min(candidates, key=key)].name if candidates else None

    def _with(self, state: PolicyState, active: Collection[str]) -> PolicyState:
        names = [zone.name for zone in self.zones]
        return replace(
            state,
            available=tuple(name for name in names if name in active),
            preempting=tuple(name for name in names if name not in active),
        )
