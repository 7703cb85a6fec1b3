"""Learns from launches, refusals and preemptions, and estimates the hazard and the obtainability of each zone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp

from services.spot.knowledge import Knowledge, LaunchRecord, ZoneRecord
from services.spot.values import Observation, Zone, ZoneEventKind

_MOST_TIMES = 10
"""The mean cold start and the mean time until an answer are those of about this many recent replicas."""


@dataclass(frozen=True)
class Priors:
    """The values of the estimates before any observation, and how fast observations replace them."""

    settle_h: float = 1.3
    """Hours without a loss after which the hazard of a zone has halved. Directly after a loss it is 1 / settle_h."""
    unknown_h: float = 3.0
    """A zone without a history counts as if it had been without a loss for so many hours."""
    history: float = 0.1
    """The weight of the losses and the hours before the last loss; 0: only the time since the last loss counts."""
    memory_h: float = 24.0
    """The time constant in hours with which losses and held hours are forgotten."""
    forget_h: float = 6.0
    """The time constant in hours with which the time without a loss is forgotten after the last replica has ended."""
    follow: float = 0.25
    """The expected number of losses of a zone that follow the loss of another zone of its group..."""
    follow_h: float = 0.5
    """...and the time constant in hours within which they follow."""
    follow_weight: float = 4.0
    """The number of observed losses that weigh as much as `follow`."""
    joint: float = 0.25
    """The share of losses in which another zone of the group loses its replicas at the same time."""
    joint_weight: float = 4.0
    """The number of observed losses that weigh as much as `joint`."""
    whole: float = 0.7
    """The share of losses that take all replicas of a zone."""
    whole_weight: float = 4.0
    """The number of observed losses that weigh as much as `whole`."""
    cold_start_s: float = 120.0
    """The cold start in seconds until the first replica is ready."""
    answer_s: float = 10.0
    """The time in seconds until a launch is answered, until the first answer."""
    obtain_h: float = 3.0
    """The time constant in hours with which granted and refused launches are forgotten."""

    def __post_init__(self) -> None:
        for name in (
            "settle_h", "memory_h", "forget_h", "follow_h", "obtain_h", "follow_weight", "joint_weight", "whole_weight",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)}: must be above 0")
        for name in ("joint", "whole"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)}: must be from 0 to 1")
        for name in ("unknown_h", "history", "follow", "cold_start_s", "answer_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)}: must be 0 or more")


def group_of(zone: Zone) -> tuple[str, str]:
    """Returns the group of zones that fail together: those of the same region with the same machine type."""
    return zone.region, zone.accelerator


@dataclass(frozen=True)
class Estimates:
    """The estimates for fixed zones. All methods are pure; hazards are losses for each hour in which a zone is held."""

    zones: tuple[Zone, ...]
    priors: Priors = Priors()

    def learn(self, knowledge: Knowledge, observation: Observation) -> Knowledge:
        """Returns the knowledge after an observation. The replicas of an observation are those after its events."""
        now_s = observation.now_s
        passed_h = 0.0 if knowledge.now_s is None else max(0.0, now_s - knowledge.now_s) / 3600
        records = {name: self._decayed(record, passed_h) for name, record in knowledge.zones.items()}
        spot = [one for one in observation.replicas if one.zone is not None and one.is_granted]
        before = {number for number, one in knowledge.launches.items() if one.granted_at_s is not None}
        kept = Counter(one.zone or "" for one in spot if one.number in before)
        granted = Counter(one.zone or "" for one in spot if one.number not in before)
        held = kept + granted
        for zone in held:
            records[zone] = self._held(records.get(zone), now_s, kept[zone], granted[zone])
        lost = {event.zone for event in observation.events if event.kind is ZoneEventKind.PREEMPTED}
        for zone in sorted(lost):
            record = records.get(zone, ZoneRecord(0.0, now_s))
            records[zone] = replace(
                record,
                up_s=0.0,
                seen_at_s=now_s,
                lost_at_s=now_s,
                down=not held[zone],
                losses=record.losses + 1,
                room=None if record.room is None else min(record.room, held[zone]),
            )
        asked = {one.zone for one in observation.replicas if one.is_spot}
        for event in observation.events:
            if event.kind is ZoneEventKind.REFUSED:
                records[event.zone] = self._refused(
                    records.get(event.zone), now_s, held[event.zone], event.zone in asked
                )
        knowledge = self._followed(knowledge, now_s, passed_h, lost)
        pooled = self._pooled(knowledge, passed_h, lost, held)
        return _with_launches(replace(pooled, zones=records), observation)

    def hazards(self, knowledge: Knowledge, now_s: float) -> dict[str, float]:
        """Returns the expected losses of each zone for each hour in which the zone is held."""
        priors = self.priors
        found: dict[str, float] = {}
        for zone in self.zones:
            record = knowledge.zones.get(zone.name)
            up_h = self.up_h(record, now_s)
            losses, held_h = (record.losses, record.held_h) if record else (0.0, 0.0)
            own = (1 + priors.history * losses) / (priors.settle_h + up_h + priors.history * held_h)
            found[zone.name] = own + self._following(knowledge, zone, now_s)
        return found

    def up_h(self, record: ZoneRecord | None, now_s: float) -> float:
        """Returns for how many hours a zone has been without a loss, as far as this is known.

        While the zone is held, this is the time since its last loss, or since its first launch and `unknown_h` before
        it. A zone that is not held may have been lost and have recovered in between. If it was down when it was last
        seen, the expected time of its recovery is half way between then and now. If it was up, the time without a loss
        decays towards `unknown_h`.
        """
        unknown_h = self.priors.unknown_h
        if record is None:
            return unknown_h
        up_h, gap_h = record.up_s / 3600, max(0.0, now_s - record.seen_at_s) / 3600
        if gap_h == 0:
            return up_h
        if record.down or up_h <= unknown_h:
            return min(unknown_h, up_h + gap_h / 2)
        return unknown_h + (up_h - unknown_h) * exp(-gap_h / self.priors.forget_h)

    def obtainability(self, record: ZoneRecord | None) -> float:
        """Returns the estimated probability that a launch succeeds; 1/2 without observations."""
        return (record.granted + 1) / (record.granted + record.refused + 2) if record else 0.5

    def whole_share(self, knowledge: Knowledge) -> float:
        """Returns the share of losses that take all replicas of a zone."""
        whole, weight = knowledge.whole_losses, self.priors.whole_weight
        return (whole + self.priors.whole * weight) / (whole + knowledge.partial_losses + weight)

    def joint_share(self, knowledge: Knowledge) -> float:
        """Returns the share of losses in which another zone of the group loses its replicas at the same time."""
        joint, weight = knowledge.joint_losses, self.priors.joint_weight
        return (joint + self.priors.joint * weight) / (joint + knowledge.single_losses + weight)

    def answer_s(self, knowledge: Knowledge) -> float:
        """Returns the expected time in seconds from a launch until the provider grants or refuses it."""
        return self.priors.answer_s if knowledge.answer_s is None else knowledge.answer_s

    def cold_start_s(self, knowledge: Knowledge) -> float:
        """Returns the expected time in seconds from a grant until the replica is ready."""
        return self.priors.cold_start_s if knowledge.cold_start_s is None else knowledge.cold_start_s

    def _following(self, knowledge: Knowledge, zone: Zone, now_s: float) -> float:
        follow_s = 3600 * self.priors.follow_h
        times_s = self._times_lost_s(knowledge, zone)
        found = sum(exp(-max(0.0, now_s - at_s) / follow_s) for at_s in times_s)
        return self.follow(knowledge) / self.priors.follow_h * found

    def follow(self, knowledge: Knowledge) -> float:
        """Returns the expected number of losses of a zone that follow the loss of another zone of its group."""
        prior, weight = self.priors.follow, self.priors.follow_weight
        return (knowledge.following_losses + prior * weight) / (knowledge.watched_losses + weight)

    def _times_lost_s(self, knowledge: Knowledge, zone: Zone) -> list[float]:
        """Returns when each other zone of the group of `zone` was lost last."""
        group = [one.name for one in self.zones if one.name != zone.name and group_of(one) == group_of(zone)]
        records = (knowledge.zones.get(name) for name in group)
        return [one.lost_at_s for one in records if one is not None and one.lost_at_s is not None]

    def _followed(self, knowledge: Knowledge, now_s: float, passed_h: float, lost: set[str]) -> Knowledge:
        """Returns the knowledge with the losses that followed others since the observation before."""
        follow_s, before_s = 3600 * self.priors.follow_h, now_s - 3600 * passed_h
        watched = following = 0.0
        held = {one.zone for one in knowledge.launches.values() if one.granted_at_s is not None}
        for zone in self.zones:
            times_s = self._times_lost_s(knowledge, zone) if zone.name in held else []
            if not times_s:
                continue
            watched += sum(exp((at_s - before_s) / follow_s) - exp((at_s - now_s) / follow_s) for at_s in times_s)
            if zone.name in lost:
                caused = self._following(knowledge, zone, now_s)
                following += caused / self.hazards(knowledge, now_s)[zone.name]
        decay = exp(-passed_h / self.priors.memory_h)
        return replace(
            knowledge,
            following_losses=knowledge.following_losses * decay + following,
            watched_losses=knowledge.watched_losses * decay + watched,
        )

    def _held(self, record: ZoneRecord | None, now_s: float, kept: int, granted: int) -> ZoneRecord:
        if record is None:
            record = ZoneRecord(self.up_h(None, now_s) * 3600, now_s)
        passed_s = max(0.0, now_s - record.seen_at_s)
        up_s = record.up_s + passed_s if kept else self.up_h(record, now_s) * 3600
        return replace(
            record,
            up_s=up_s,
            seen_at_s=now_s,
            down=False,
            held_h=record.held_h + (passed_s / 3600 if kept else 0.0),
            granted=record.granted + granted,
            room=None if record.room is None or kept + granted > record.room else record.room,
        )

    def _refused(self, record: ZoneRecord | None, now_s: float, held: int, asked: bool) -> ZoneRecord:
        record = record or ZoneRecord(self.up_h(None, now_s) * 3600, now_s)
        counted = replace(record, refused_at_s=now_s, refused=record.refused + 1, room=held)
        # A zone that holds replicas is full, not down. A launch that is not answered yet will show it otherwise.
        return counted if asked else replace(counted, up_s=0.0, seen_at_s=now_s, down=True)

    def _decayed(self, record: ZoneRecord, passed_h: float) -> ZoneRecord:
        if passed_h == 0:
            return record
        slow, fast = exp(-passed_h / self.priors.memory_h), exp(-passed_h / self.priors.obtain_h)
        return replace(
            record,
            losses=record.losses * slow,
            held_h=record.held_h * slow,
            granted=record.granted * fast,
            refused=record.refused * fast,
        )

    def _pooled(self, knowledge: Knowledge, passed_h: float, lost: set[str], held: Mapping[str, int]) -> Knowledge:
        """Returns the knowledge with the sums over all zones."""
        decay = exp(-passed_h / self.priors.memory_h)
        joint = single = 0
        for zone in self.zones:
            others = [one.name for one in self.zones if one != zone and group_of(one) == group_of(zone)]
            if zone.name in lost and any(name in lost or held.get(name) for name in others):
                joint += any(name in lost for name in others)
                single += all(name not in lost for name in others)
        partial = sum(bool(held.get(zone)) for zone in lost)
        return replace(
            knowledge,
            whole_losses=knowledge.whole_losses * decay + len(lost) - partial,
            partial_losses=knowledge.partial_losses * decay + partial,
            joint_losses=knowledge.joint_losses * decay + joint,
            single_losses=knowledge.single_losses * decay + single,
        )


def _with_launches(knowledge: Knowledge, observation: Observation) -> Knowledge:
    """Returns the knowledge with the records of all replicas, and with the times of answers and cold starts."""
    now_s = observation.now_s
    # What is new in an observation was launched by the decision before.
    asked_at_s = now_s if knowledge.now_s is None else knowledge.now_s
    target = observation.target if knowledge.now_s is None else knowledge.target
    answers_s: list[float] = []
    colds_s: list[float] = []
    records: dict[int, LaunchRecord] = {}
    for one in observation.replicas:
        before = knowledge.launches.get(one.number)
        record = before or LaunchRecord(asked_at_s, target, one.zone)
        if one.is_granted and record.granted_at_s is None:
            record = replace(record, granted_at_s=now_s)
            answers_s.append(now_s - record.asked_at_s)
        if one.is_ready and not record.is_ready:
            record = replace(record, is_ready=True)
            if before is not None and before.granted_at_s is not None:
                colds_s.append(now_s - before.granted_at_s)
        records[one.number] = record
    gone = [one for number, one in knowledge.launches.items() if number not in records and one.granted_at_s is None]
    for event in observation.events:
        if event.kind is ZoneEventKind.REFUSED:
            seen = next((one for one in gone if one.zone == event.zone), None)
            if seen is not None:
                gone.remove(seen)
            answers_s.append(now_s - (asked_at_s if seen is None else seen.asked_at_s))
    new = (one for number, one in records.items() if number not in knowledge.launches)
    launched_s = [one.asked_at_s for one in new if one.zone is not None]
    launched_s += [now_s for event in observation.events if event.kind is ZoneEventKind.REFUSED]
    answer_s, answers = _mean(knowledge.answer_s, knowledge.answers, answers_s)
    cold_start_s, cold_starts = _mean(knowledge.cold_start_s, knowledge.cold_starts, colds_s)
    return replace(
        knowledge, now_s=now_s, target=observation.target, launches=records,
        launched_at_s=max(launched_s, default=knowledge.launched_at_s),
        answer_s=answer_s, answers=answers, cold_start_s=cold_start_s, cold_starts=cold_starts,
    )  # fmt: skip


def _mean(mean_s: float | None, count: int, times_s: list[float]) -> tuple[float | None, int]:
    """Returns the mean with further times, and the number of times in it."""
    for time_s in times_s:
        count = min(count + 1, _MOST_TIMES)
        before_s = 0.0 if mean_s is None else mean_s
        mean_s = before_s + (time_s - before_s) / count
    return mean_s, count
