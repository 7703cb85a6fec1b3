"""A plain replay, second by second: the reference for `research.spot.replay`. Ticks and cold starts are whole seconds.

The policy decides at each tick, after each refusal, whenever a cold start ends, and when a zone that refused may be
tried again, as in `research.spot.replay`. Launches are answered at once. The decisions of `spothedge+` depend on the
time, so further decisions could change its replicas.
"""

from domain.capacity import CapacityKind
from research.spot.replay import ReplaySettings
from research.spot.traces import SpotTrace
from services.spot.values import Launch, Observation, ReplicaState, SpotPolicy, SpotReplica, ZoneEvent, ZoneEventKind


def plain_replay(
    trace: SpotTrace, policy: SpotPolicy, settings: ReplaySettings, first_tick: int, ticks: int
) -> tuple[float, float]:
    """Returns availability and cost."""
    state = policy.start()
    born: list[tuple[int, str | None, int]] = []  # The number, the zone and the second of the launch of each replica.
    ready: set[int] = set()
    number = 0
    good = spot_seconds = on_demand_seconds = 0
    gap = int(trace.gap_s)
    for second in range(ticks * gap):
        events: list[ZoneEvent] = []
        free = {zone.name: counts[first_tick + second // gap]
                for zone, counts in zip(trace.zones, trace.capacity, strict=True)}  # fmt: skip
        if second % gap == 0:
            for zone in trace.zones:
                while sum(where == zone.name for _, where, _ in born) > free[zone.name]:
                    born.remove(max(one for one in born if one[1] == zone.name))
                    events.append(ZoneEvent(ZoneEventKind.PREEMPTED, zone.name))
        ready_now = any(who not in ready and second - since >= settings.cold_start_s for who, _, since in born)
        retried = any(at_s == second for _, at_s in state.retry_at_s)
        acted = second % gap == 0 or ready_now or retried
        while acted:
            for who, where, since in born:
                if who not in ready and second - since >= settings.cold_start_s:
                    ready.add(who)
                    if where is not None:
                        events.append(ZoneEvent(ZoneEventKind.READY, where))
                        acted = True
            seen = tuple(
                SpotReplica(
                    who,
                    CapacityKind.ON_DEMAND if where is None else CapacityKind.SPOT,
                    where,
                    ReplicaState.READY if who in ready else ReplicaState.PROVISIONING,
                )
                for who, where, _ in born
            )
            state, actions = policy.decide(state, Observation(float(second), settings.target, seen, tuple(events)))
            events = []
            acted = bool(actions)
            for action in actions:
                if not isinstance(action, Launch):
                    born = [one for one in born if one[0] != action.number]
                elif action.zone is None or sum(one[1] == action.zone for one in born) < free[action.zone]:
                    born.append((number, action.zone, second))
                    number += 1
                else:
                    events.append(ZoneEvent(ZoneEventKind.REFUSED, action.zone))
        good += sum(who in ready for who, _, _ in born) >= settings.target
        spot_seconds += sum(where is not None for _, where, _ in born)
        on_demand_seconds += sum(where is None for _, where, _ in born)
    k, seconds = settings.od_price_ratio, ticks * gap
    return good / seconds, (spot_seconds + k * on_demand_seconds) / (k * settings.target * seconds)
