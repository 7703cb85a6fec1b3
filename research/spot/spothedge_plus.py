"""`spothedge+`: places replicas by the learned risk of each zone, and adds spare replicas only while they pay."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from domain.capacity import CapacityKind
from research.spot.estimates import Estimates, group_of
from research.spot.knowledge import Knowledge
from research.spot.plans import cheapest_plan
from research.spot.risk import Option, RiskModel
from research.spot.state import ReplayState
from services.spot.spothedge import split
from services.spot.values import Action, Launch, Observation, PolicyState, SpotReplica, Terminate, ZoneEventKind

OUTAGE_PRICE_S = 3840.0
"""The default price of an outage, in seconds of N_tar on-demand replicas."""
_FORBIDDEN = 1e6
"""The factor on the price of on-demand replicas that may not be launched."""
_LATE = 3.0
"""A spot replica that has been starting for more cold starts than this is late."""


@dataclass(frozen=True)
class SpotHedgePlus:
    """The policy. At most twice the target of spot replicas and N_tar on-demand replicas are launched."""

    estimates: Estimates
    on_demand_usd_per_h: float = 3.0
    """The price of an on-demand replica, in the unit of the prices of the zones."""
    outage_price_s: float = OUTAGE_PRICE_S
    """The price of a loss after which fewer than N_tar replicas are left, in seconds of N_tar on-demand replicas.

    The price does not depend on the cold start. With a price for each second of an outage, a service with a cold start
    of five minutes would cost more than SpotHedge, and one of a minute would be less available.
    """
    base: int = 0
    """The number of on-demand replicas that are always kept; they count towards the target."""
    fallback: bool = True
    """Whether on-demand replicas are launched beyond the base."""
    most_extra: int | None = None
    """The largest number of spot replicas beyond the target, also while replicas move; None: N_tar."""
    far_share: float = 0.02
    """The share of losses in which all zones of all groups are lost together."""
    horizon_h: float = 2.0
    """The time in hours within which a launch must have paid for its cold start."""
    retry_s: float = 300.0
    """The time in seconds after which a zone that refused a launch is tried again while spot replicas are missing."""
    longest_retry_s: float = 3600.0
    """The limit of that time while no spot replica is missing: the time doubles with each refusal in a row."""

    def __post_init__(self) -> None:
        for name in ("on_demand_usd_per_h", "horizon_h", "retry_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)}: must be above 0")
        for name in ("outage_price_s", "base", "most_extra", "far_share"):
            if not (getattr(self, name) is None or getattr(self, name) >= 0):
                raise ValueError(f"{name}: {getattr(self, name)}: must be 0 or more")

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return ReplayState()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        """See `Policy.decide`."""
        refused = [event.zone for event in observation.events if event.kind is ZoneEventKind.REFUSED]
        if refused:
            state = state.refused(refused, observation.now_s, self.retry_s)
        before = ReplayState.of(state)
        after = replace(before, knowledge=self.estimates.learn(before.knowledge, observation))
        plan = self._plan(after, observation)
        kept = self._kept(after, observation, plan)
        return after, (*self._launches(after, observation, plan), *self._ends(observation, plan, kept))

    def most_spot(self, target: int) -> int:
        """Returns N_tar + N_extra, the largest number of spot replicas that are launched at the same time."""
        return target + (target if self.most_extra is None else min(target, self.most_extra))

    def _plan(self, state: ReplayState, observation: Observation) -> dict[str | None, int]:
        """Returns how many replicas to have in each zone, and on demand (None)."""
        target, known = observation.target, state.knowledge
        if target == 0:
            return {}
        spot, others = split(observation.replicas)
        held = Counter(one.zone for one in spot)
        waiting = self._waiting(state, observation, short=bool(others) or len(spot) < target)
        hazards = self.estimates.hazards(known, observation.now_s)
        zones = self.estimates.zones
        groups = {group: at for at, group in enumerate(dict.fromkeys(group_of(zone) for zone in zones))}
        options = [
            Option(
                zone.name,
                zone.usd_per_h,
                hazards[zone.name],
                groups[group_of(zone)],
                held[zone.name],
                held[zone.name] if zone.name in waiting else self.most_spot(target),
                self.estimates.obtainability(known.zones.get(zone.name)),
            )
            for zone in zones
        ]
        kept = min(self.base, target)
        # Without fallback, on-demand replicas beyond the base stand for replicas that cannot be had. Their price is so
        # high that a plan contains them only if no zone can have a spot replica.
        price = self.on_demand_usd_per_h if self.fallback else _FORBIDDEN * self.on_demand_usd_per_h
        options.append(Option(None, price, 0.0, -1, len(others), target))
        model = RiskModel(
            tuple(options),
            target,
            self.estimates.cold_start_s(known) / 3600,
            self.outage_price_s / 3600 * target * self.on_demand_usd_per_h,
            self.estimates.whole_share(known),
            self.estimates.joint_share(known),
            self.far_share,
            self.horizon_h,
            kept,
        )
        counts = cheapest_plan(model, self.most_spot(target))
        plan = {option.zone: count for option, count in zip(options, counts, strict=True)}
        uncovered = self._uncovered(known, observation, spot)
        plan[None] = min(target, plan[None] + uncovered) if self.fallback else kept
        return plan

    def _waiting(self, state: ReplayState, observation: Observation, *, short: bool) -> frozenset[str]:
        """Returns the zones in which no launch is tried now. If spot replicas are missing, pauses are not doubled."""
        waiting = state.waiting(observation.now_s)
        if short:
            return waiting
        paused = {
            name
            for name, record in state.knowledge.zones.items()
            if record.refused_at_s is not None
            and record.refusals
            # 2 ** 20 is above any useful limit, and keeps the number finite.
            and observation.now_s - record.refused_at_s
            < min(self.longest_retry_s, self.retry_s * 2.0 ** min(20, record.refusals - 1))
        }
        return waiting | paused

    def _uncovered(self, known: Knowledge, observation: Observation, spot: list[SpotReplica]) -> int:
        """Returns how many on-demand replicas stand in for launches that are late."""
        if known.cold_start_s is None:
            return 0
        limit_s = _LATE * known.cold_start_s
        late = sum(observation.now_s - known.starting.get(one.number, observation.now_s) > limit_s for one in spot)
        ready = sum(one.is_ready for one in spot)
        return min(late, max(0, observation.target - ready))

    def _launches(self, state: ReplayState, observation: Observation, plan: Mapping[str | None, int]) -> list[Action]:
        held = Counter(one.zone for one in observation.replicas)
        free = self.most_spot(observation.target) - sum(one.is_spot for one in observation.replicas)
        actions: list[Action] = []
        for zone, count in plan.items():
            missing = max(0, count - held[zone])
            if zone is None:
                actions += [Launch(CapacityKind.ON_DEMAND)] * missing
            else:
                launched = min(missing, max(0, free))
                free -= launched
                actions += [Launch(CapacityKind.SPOT, zone)] * launched
        return actions

    def _kept(self, state: ReplayState, observation: Observation, plan: Mapping[str | None, int]) -> frozenset[int]:
        """Returns the replicas that are not ready, but are not ended now even if they are beyond the plan.

        Otherwise two plans could replace each other again and again. Replicas that are starting are kept in two cases:

        - The plan contains replicas that are not there. They may be refused, or the limit on spot replicas may not
          allow them yet.
        - They were launched at this time and no launch was refused. So the decisions at one time come to an end: each
          zone refuses once, and then waits.
        """
        held = Counter(one.zone for one in observation.replicas)
        if any(count > held[zone] for zone, count in plan.items()):
            return frozenset(one.number for one in observation.replicas if not one.is_ready)
        if any(event.kind is ZoneEventKind.REFUSED for event in observation.events):
            return frozenset()
        starting = state.knowledge.starting
        return frozenset(number for number, since_s in starting.items() if since_s == observation.now_s)

    def _ends(self, observation: Observation, plan: Mapping[str | None, int], kept: frozenset[int]) -> list[Action]:
        """Returns the ends of replicas beyond the plan, except `kept`.

        A replica that is not ready is ended at once. A ready on-demand replica is ended if N_tar other replicas are
        ready, and a ready spot replica if all the replicas of the plan that are there are ready. Replicas beyond the
        limits of the policy are always ended.
        """
        here: dict[str | None, list[SpotReplica]] = {}
        for one in observation.replicas:
            here.setdefault(one.zone, []).append(one)
        beyond: list[SpotReplica] = []
        for zone, replicas in here.items():
            beyond += sorted(replicas, key=lambda one: (not one.is_ready, one.number))[plan.get(zone, 0) :]
        beyond.sort(key=lambda one: (one.is_ready, one.is_spot, -one.number))
        target = observation.target
        ready = sum(one.is_ready for one in observation.replicas)
        planned = max(target, min(sum(plan.values()), len(observation.replicas) - len(beyond)))
        counts = Counter(one.is_spot for one in observation.replicas)
        limits = {True: self.most_spot(target), False: target}
        actions: list[Action] = []
        for one in beyond:
            needed = planned if one.is_spot else target
            over = counts[one.is_spot] > limits[one.is_spot]
            if over or (one.number not in kept and (not one.is_ready or ready > needed)):
                ready -= one.is_ready
                counts[one.is_spot] -= 1
                actions.append(Terminate(one.number))
        return actions
