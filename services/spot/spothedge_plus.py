"""`spothedge+`: places replicas by the learned risk of each zone, and adds spare replicas only while they pay."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf
from zlib import crc32

from domain.capacity import CapacityKind
from services.spot.estimates import Estimates, group_of
from services.spot.knowledge import Knowledge, LaunchRecord, ZoneRecord
from services.spot.plans import cheapest_plan
from services.spot.risk import Option, RiskModel
from services.spot.spothedge import split
from services.spot.values import Action, Launch, Observation, PolicyState, SpotReplica, Terminate, Zone, ZoneEventKind

OUTAGE_PRICE_S = 4800.0
"""The default price of an outage, in seconds of N_tar on-demand replicas."""
_FORBIDDEN = 1e6
"""The factor on the price of on-demand replicas that may not be launched."""
_LATE = 3.0
"""A launch without an answer, and a replica that is not ready, is late after so many times the expected time."""
_REVIEW_S = 300.0
"""Without a change, the policy decides at multiples of this time, because its estimates change with time."""
KEPT_S = 600.0
"""A granted spot replica is kept for this long: zones that grant one are not taken for granted."""


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
    still_h: float = 4.0
    """For so many hours after a launch, no replica moves to another zone, unless spot replicas are missing."""
    retry_s: float = 300.0
    """The time in seconds after which a zone that refused a launch is tried again while spot replicas are missing."""
    longest_retry_s: float = 3600.0
    """The limit of that time while no spot replica is missing: the time doubles with each refusal in a row."""
    full_retry_s: float = 1200.0
    """The limit for zones that held replicas when they refused another one, while spot replicas are missing. Otherwise
    these zones are not asked for more: they are full, not down."""

    def __post_init__(self) -> None:
        for name in ("on_demand_usd_per_h", "horizon_h", "retry_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)}: must be above 0")
        for name in ("outage_price_s", "base", "most_extra", "far_share"):
            if not (getattr(self, name) is None or getattr(self, name) >= 0):
                raise ValueError(f"{name}: {getattr(self, name)}: must be 0 or more")

    def start(self) -> PolicyState:
        """See `SpotPolicy.start`."""
        return PolicyState()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        """See `SpotPolicy.decide`.

        The times of decisions do not depend on how often the caller asks: an observation without a change is ignored
        until the next review, unless the decision before returned actions, which the caller may have postponed.
        """
        settings = crc32(repr(self).encode())
        if settings == state.settings and _is_as_before(state, observation):
            return state, ()
        now_s, known = observation.now_s, self.estimates.learn(state.knowledge, observation)
        granted = {one.zone or "" for number, one in known.launches.items() if _is_new(state.knowledge, number, one)}
        refused = {event.zone for event in observation.events if event.kind is ZoneEventKind.REFUSED}
        late = self._late(known)
        refused |= {known.launches[number].zone or "" for number in late if known.launches[number].granted_at_s is None}
        # A zone that holds no more than when it refused may still be full.
        more = {zone for zone in granted - {""} if zone not in known.zones or known.zones[zone].room is None}
        state = replace(state.granted(more), knowledge=known)
        # A zone that has just preempted a replica has no capacity left.
        lost = {event.zone for event in observation.events if event.kind is ZoneEventKind.PREEMPTED}
        state = state.paused(lost, now_s + self.retry_s)
        if refused - {""}:
            state = state.refused(refused - {""}, now_s, self.retry_s)
        kept = self._kept(known, observation, late)
        plan = self._plan(state, observation, kept, late)
        launches = self._launches(state, observation, plan)
        ends = self._ends(known, observation, plan, kept, launches, answered=bool(granted | refused))
        actions = (*launches, *ends)
        review_at_s = now_s if actions else (now_s // _REVIEW_S + 1) * _REVIEW_S
        return replace(state, review_at_s=review_at_s, settings=settings), actions

    def most_spot(self, target: int) -> int:
        """Returns N_tar + N_extra, the largest number of spot replicas that are launched at the same time."""
        return target + (target if self.most_extra is None else min(target, self.most_extra))

    def _late(self, known: Knowledge) -> frozenset[int]:
        """Returns the launches without an answer, and the replicas that start, for too long."""
        now_s = known.now_s or 0.0
        limit_s = _LATE * (self.estimates.answer_s(known) + self.estimates.cold_start_s(known))

        def is_late(one: LaunchRecord) -> bool:
            since_s = one.asked_at_s if one.granted_at_s is None else one.granted_at_s
            return not one.is_ready and now_s - since_s > limit_s

        return frozenset(number for number, one in known.launches.items() if is_late(one))

    def _kept(self, known: Knowledge, observation: Observation, late: Collection[int]) -> frozenset[int]:
        """Returns the spot replicas that no plan may end: those granted recently, and launches without an answer.

        After a refusal, only what was refused is planned again. Otherwise each refusal would lead to another plan that
        ends what was granted. If the target fell, any replica may be ended.
        """

        def is_kept(number: int, one: LaunchRecord) -> bool:
            if one.zone is None or one.target > observation.target:
                return False
            if one.granted_at_s is None:
                return number not in late
            return observation.now_s - one.granted_at_s < KEPT_S

        kept = sorted(number for number, one in known.launches.items() if is_kept(number, one))
        return frozenset(kept[: self.most_spot(observation.target)])

    def _plan(
        self, state: PolicyState, observation: Observation, kept: Collection[int], late: Collection[int]
    ) -> dict[str | None, int]:
        """Returns how many replicas to have in each zone, and on demand (None)."""
        now_s, target, known = observation.now_s, observation.target, state.knowledge
        if target == 0:
            return {}
        spot, others = split(observation.replicas)
        there = [one for one in spot if one.is_granted or one.number not in late]
        held = Counter(one.zone for one in there)
        least = Counter(one.zone for one in there if one.number in kept)
        # On-demand replicas that stand in for a spot replica, or for a spare, cost more than another launch.
        stand_in = sum(one.is_ready for one in others) > min(self.base, target)
        short = stand_in or sum(one.is_granted for one in there) < target
        waiting = self._waiting(state, observation, short=short)
        hazards = self.estimates.hazards(known, now_s)
        zones = self.estimates.zones
        groups = {group: at for at, group in enumerate(dict.fromkeys(group_of(zone) for zone in zones))}
        options = [
            Option(
                zone.name,
                zone.usd_per_h,
                hazards[zone.name],
                groups[group_of(zone)],
                held[zone.name],
                max(held[zone.name], _room(known, zone)) if zone.name in waiting else self.most_spot(target),
                self.estimates.obtainability(known.zones.get(zone.name)),
                least[zone.name],
            )
            for zone in zones
        ]
        base = min(self.base, target)
        # Without fallback, on-demand replicas beyond the base stand for replicas that are not available. Their price is
        # so high that a plan contains them only if no zone can have a spot replica.
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
            base,
            self.estimates.answer_s(known) / 3600 * self.on_demand_usd_per_h,
            not short and known.launched_at_s is not None and now_s - known.launched_at_s < 3600 * self.still_h,
            # If on-demand replicas took the place of spot replicas, these would be missing and be launched again.
            min(target - base, sum(min(option.held, option.most) for option in options[:-1])),
        )
        counts = cheapest_plan(model, self.most_spot(target))
        plan = {option.zone: count for option, count in zip(options, counts, strict=True)}
        sure = sum(self._is_sure(known, one) for one in spot if one.number not in late)
        plan[None] = max(plan[None], min(target, target - sure)) if self.fallback else base
        return plan

    def _waiting(self, state: PolicyState, observation: Observation, *, short: bool) -> frozenset[str]:
        """Returns the zones in which no launch is tried now.

        While no spot replica is missing, a zone that held replicas when it refused is not asked for more: it is full.
        While spot replicas are missing, or on-demand replicas stand in for them, its pause is at most `full_retry_s`,
        and that of another zone is not doubled, because the zone may have recovered.
        """
        counts = dict(state.refusals)

        def pause_s(record: ZoneRecord, count: int) -> float:
            if record.room:
                longest_s = self.full_retry_s if short else inf
            else:
                longest_s = 0.0 if short else self.longest_retry_s
            # 2 ** 20 is above any useful limit, and keeps the number finite.
            return longest_s if longest_s == inf else min(longest_s, self.retry_s * 2.0 ** min(20, count - 1))

        paused = {
            name
            for name, record in state.knowledge.zones.items()
            if record.refused_at_s is not None
            and name in counts
            and observation.now_s - record.refused_at_s < pause_s(record, counts[name])
        }
        return state.waiting(observation.now_s) | paused

    def _is_sure(self, known: Knowledge, one: SpotReplica) -> bool:
        """Returns whether no on-demand replica needs to replace a spot replica that exists.

        A launch without an answer is sure if waiting for the answer costs little, see `_is_short`. The expected wait is
        that of other launches, or as long as this one has waited.
        """
        if one.is_granted:
            return True
        waited_s = (known.now_s or 0.0) - known.launches[one.number].asked_at_s
        return self._is_short(known, max(self.estimates.answer_s(known), waited_s))

    def _is_short(self, known: Knowledge, wait_s: float) -> bool:
        """Returns whether an outage of `wait_s` costs at most what an on-demand replica costs while it starts.

        The price of an outage is that of one which lasts a cold start.
        """
        cold_s = self.estimates.cold_start_s(known)
        return wait_s * self.outage_price_s * known.target <= cold_s * cold_s

    def _launches(self, state: PolicyState, observation: Observation, plan: Mapping[str | None, int]) -> list[Action]:
        """Returns the launches. A zone that refused the launch before is asked for one replica at a time."""
        held = Counter(one.zone for one in observation.replicas)
        asked = Counter(one.zone for one in observation.replicas if not one.is_granted)
        refusing = {zone for zone, _ in state.refusals}
        free = self.most_spot(observation.target) - sum(one.is_spot for one in observation.replicas)
        actions: list[Action] = []
        for zone, count in plan.items():
            missing = max(0, count - held[zone])
            if zone is None:
                actions += [Launch(CapacityKind.ON_DEMAND)] * missing
            else:
                most = 1 - asked[zone] if zone in refusing else missing
                launched = max(0, min(missing, free, most))
                free -= launched
                actions += [Launch(CapacityKind.SPOT, zone)] * launched
        return actions

    def _ends(
        self,
        known: Knowledge,
        observation: Observation,
        plan: Mapping[str | None, int],
        kept: Collection[int],
        launches: Collection[Action],
        *,
        answered: bool,
    ) -> list[Action]:
        """Returns the ends of replicas beyond the plan, except `kept`.

        A ready replica is ended if as many others as the plan has are ready, and no launch of a spot replica in the
        plan is without an answer: it may be refused, and the ended replica would have to be launched again. A spot
        replica that is not ready is ended at once, and an on-demand replica that starts is ended if enough spot
        replicas were granted since. Replicas beyond the limits of the policy are always ended.
        """
        here: dict[str | None, list[SpotReplica]] = {}
        for one in observation.replicas:
            here.setdefault(one.zone, []).append(one)
        beyond: list[SpotReplica] = []
        for zone, replicas in here.items():
            first = sorted(replicas, key=lambda one: (one.number not in kept, not one.is_ready, one.number))
            beyond += first[plan.get(zone, 0) :]
        beyond.sort(key=lambda one: (one.is_ready, one.is_spot, -one.number))
        target = observation.target
        ready = sum(one.is_ready for one in observation.replicas)
        planned = max(target, sum(plan.values()))
        counts = Counter(one.is_spot for one in observation.replicas)
        limits = {True: self.most_spot(target), False: target}
        late = self._late(known)
        enough_s = _enough_s(known, max(0, target - plan.get(None, 0)), late)
        asked = {one.number for one in observation.replicas if one.is_spot and not one.is_granted} - {*late}
        is_open = bool(asked - {one.number for one in beyond}) or any(
            isinstance(one, Launch) and one.zone is not None for one in launches
        )
        actions: list[Action] = []
        for one in beyond:
            over = counts[one.is_spot] > limits[one.is_spot]
            if one.is_ready:
                needless = one.number not in kept and ready > planned and not is_open
            else:
                needless = (
                    one.number not in kept if one.is_spot else self._comes_late(known, one, enough_s, answered=answered)
                )
            if over or needless:
                ready -= one.is_ready
                counts[one.is_spot] -= 1
                actions.append(Terminate(one.number))
        return actions

    def _comes_late(self, known: Knowledge, one: SpotReplica, enough_s: float, *, answered: bool) -> bool:
        """Returns whether enough spot replicas are ready before a starting on-demand replica, or shortly after it.

        Args:
            known: the knowledge.
            one: the on-demand replica.
            enough_s: when enough spot replicas were granted. If that was before the on-demand replica was launched, a
                plan has launched it for another reason, and it is kept until it is ready.
            answered: whether this observation has another answer than the one before.
        """
        record, now_s = known.launches[one.number], known.now_s or 0.0
        if enough_s < record.asked_at_s or (enough_s == record.asked_at_s and not answered):
            return False
        from_s = now_s if record.granted_at_s is None else record.granted_at_s
        return self._is_short(known, max(0.0, enough_s - from_s))


def _is_as_before(state: PolicyState, observation: Observation) -> bool:
    """Returns whether nothing has changed since the last decision, and no zone's pause and no review are due."""
    known = state.knowledge
    wake_s = None if known.now_s is None else state.wake_at_s(known.now_s)
    if wake_s is None or observation.now_s >= wake_s or observation.events or observation.target != known.target:
        return False
    if state.review_at_s <= (known.now_s or 0.0):
        return False
    here = {one.number: (one.is_granted, one.is_ready) for one in observation.replicas}
    return here == {number: (one.granted_at_s is not None, one.is_ready) for number, one in known.launches.items()}


def _is_new(before: Knowledge, number: int, one: LaunchRecord) -> bool:
    """Returns whether a launch was granted since the observation before."""
    known = before.launches.get(number)
    return one.granted_at_s is not None and (known is None or known.granted_at_s is None)


def _enough_s(known: Knowledge, needed: int, late: Collection[int]) -> float:
    """Returns when `needed` of the existing spot replicas were granted; infinity: fewer are granted."""
    sure = [one for number, one in known.launches.items() if one.zone is not None and number not in late]
    times_s = sorted(one.granted_at_s for one in sure if one.granted_at_s is not None)
    return (times_s[needed - 1] if needed else float("-inf")) if needed <= len(times_s) else float("inf")


def _room(known: Knowledge, zone: Zone) -> int:
    """Returns how many replicas a zone that refused a launch held then; 0: unknown."""
    record = known.zones.get(zone.name)
    return 0 if record is None or record.room is None else record.room
