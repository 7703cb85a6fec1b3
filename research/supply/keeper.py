"""The simulated capacity loop: sizes pools by the live rules, and replays the clouds that supply their machines."""

from collections.abc import Callable
from math import ceil, inf, isinf

from capacity.offers import OfferKey
from capacity.pools import PoolKey
from capacity.providers.trace.market import Market, MarketInstance
from capacity.providers.trace.settings import TraceProviderSettings
from capacity.scaling import Shortage
from capacity.sizing_round import MachineLaunch, plan_round
from domain.lifecycle.instances import InstanceEvent, InstanceStep
from research.supply.instances import PoolInstance
from research.supply.sources import Sources, machine_of
from simulation.meter import Meter
from simulation.supply import Counts, Keeper
from simulation.transitions import Transitions


class SimulatedKeeper(Keeper):
    """The pools with their instances and clouds.

    The live loop runs a round every `interval_s`. The simulation runs a round, at the next multiple of `interval_s`,
    only if something has changed since the last one: otherwise the round would have no effect.
    """

    def __init__(
        self, sources: Sources, transitions: Transitions, meter: Meter, waiting: Callable[[], list[Shortage]], seed: int
    ) -> None:
        """Creates the loop; `waiting` returns the workloads that fit in no region, in queue order."""
        self._sources, self._transitions, self._meter = sources, transitions, meter
        self._waiting, self._seed = waiting, seed
        self._offers = sources.offers()
        self._markets = {name: Market(settings, 0.0) for name, settings in sources.clouds.items()}
        self._period_s = max(map(_period_s, sources.clouds.values()), default=0.0) + sources.settings.refused_pause_s
        self._bought: dict[str, PoolInstance] = {}
        """Instances by id, without those that are gone."""
        self._refused_s: dict[OfferKey, float] = {}
        self._last_round_s = -inf
        self._round_s = 0.0 if sources.pools else inf
        self._hopeful_until_s = self._period_s
        """Refused launches are retried until this time, by which the clouds' traces have been replayed once."""
        self._number = 0
        self.counts = Counts()
        self.due_s = self._round_s
        """Time of the next round or cloud event; infinity: none."""

    def hope(self, at_s: float) -> None:
        """Extends the retries of refused launches by a period, after a workload arrived or released its slots."""
        self._hopeful_until_s = at_s + self._period_s
        self.changed(at_s)

    def changed(self, at_s: float) -> None:
        """Schedules a round after a change."""
        if self._sources.pools:
            self._schedule_round(at_s)
            self.due_s = min(self.due_s, self._round_s)

    def happen(self, at_s: float) -> bool:
        """Processes the events and the round that are due; returns whether machines were added or removed."""
        changed = self._take(at_s)
        for one in list(self._bought.values()):
            changed |= self._advance(at_s, one)
        if self._round_s <= at_s:
            self._round(at_s)
        self.due_s = min(self._round_s, self._next_s(at_s))
        return changed

    # ----------------------------------------------------------------------------------------------------- the clouds

    def _take(self, at_s: float) -> bool:
        """Processes the clouds' notices for reclaimed machines; returns whether there were any."""
        changed = False
        for name, market in self._markets.items():
            for taken in market.taken(self._of_cloud(name), at_s):
                one = self._bought[taken.token]
                one.launched = taken
                self.counts.taken += 1
                if one.step is InstanceStep.SERVE:
                    one.go_on(InstanceEvent.TOLD)
                    self._transitions.interrupt(at_s, *one.location)
                changed = True
        if changed:
            self._schedule_round(at_s)
        return changed

    def _of_cloud(self, name: str) -> list[MarketInstance]:
        return [
            one.launched for one in self._bought.values() if one.offer.provider == name and one.launched is not None
        ]

    def _advance(self, at_s: float, one: PoolInstance) -> bool:
        """Advances an instance that is ready, lost, or drained by now; returns whether it changed."""
        assert one.launched is not None
        if one.launched.ends_at_s <= at_s:
            one.go_on(InstanceEvent.LOST)
            self._gone(at_s, one)
        elif one.step is InstanceStep.DRAIN and self._transitions.is_idle(*one.location):
            one.go_on(InstanceEvent.DONE)
            self._gone(at_s, one)
        elif one.step is InstanceStep.AWAIT_AGENT and one.launched.starts_at_s <= at_s and not one.is_noticed:
            one.go_on(InstanceEvent.DONE)
            self._transitions.join(one.pool[0], one.machine)
            self._schedule_round(at_s)
        else:
            return False
        return True

    def _gone(self, at_s: float, one: PoolInstance) -> None:
        """Removes an instance that has ended, and its cost."""
        one.go_on(InstanceEvent.DONE)
        del self._bought[one.id]
        self._meter.usd_per_h[one.offer.kind.value] -= one.offer.usd_per_h
        self._schedule_round(at_s)

    # ------------------------------------------------------------------------------------------------------- the pools

    def _schedule_round(self, at_s: float) -> None:
        interval_s = self._sources.settings.interval_s
        soonest_s = ceil(at_s / interval_s) * interval_s
        self._round_s = min(self._round_s, max(soonest_s, self._last_round_s + interval_s))

    def _round(self, at_s: float) -> None:
        self._last_round_s, self._round_s = at_s, inf
        seen: dict[PoolKey, list[PoolInstance]] = {}
        for one in self._bought.values():
            is_idle = one.step is InstanceStep.SERVE and self._transitions.is_idle(*one.location)
            one.idle_since_s = min(one.idle_since_s, at_s) if is_idle else inf
            if one.is_counted:
                seen.setdefault(one.pool, []).append(one)
        pause_s = self._sources.settings.refused_pause_s
        self._refused_s = {key: since_s for key, since_s in self._refused_s.items() if at_s < since_s + pause_s}
        planned = plan_round(
            self._sources.pools,
            {pool: [one.seen(at_s) for one in all_] for pool, all_ in seen.items()},
            self._waiting(),
            self._offers,
            self._refused_s,
        )
        for one in self._bought.values():
            one.claims = planned.claims.get(one.id, {})
        for id_ in planned.end:
            self._end(at_s, self._bought[id_])
        for pool, launches in planned.launch.items():
            for launch in launches:
                self._launch(at_s, pool, launch)
        if (timer_s := self._timer_s(at_s)) < inf:
            self._schedule_round(timer_s)

    def _launch(self, at_s: float, pool: PoolKey, launch: MachineLaunch) -> None:
        offer = launch.offer
        market = self._markets[offer.provider]
        self._number += 1
        id_ = f"in-{self._seed}-{self._number:07d}"
        one = PoolInstance(id_, pool, offer, machine_of(id_, pool[1], offer), claims=launch.claims)
        if not market.has_room(offer.zone, self._of_cloud(offer.provider), at_s):
            one.go_on(InstanceEvent.REFUSED)
            self.counts.refused += 1
            self._refused_s[offer.key] = at_s
            self._schedule_round(at_s)  # The next round tries another offer.
            return
        one.launched = MarketInstance(id_, id_, offer.zone, at_s, at_s + market.start_s(id_))
        one.go_on(InstanceEvent.DONE)
        self._bought[id_] = one
        self.counts.launched += 1
        self._meter.usd_per_h[offer.kind.value] += offer.usd_per_h

    def _end(self, at_s: float, one: PoolInstance) -> None:
        """Ends a surplus instance of a pool: drains the machine, and terminates it once it is empty."""
        was_ready = one.step is InstanceStep.SERVE
        one.go_on(InstanceEvent.TOLD)
        self.counts.ended += 1
        if was_ready:
            self._transitions.interrupt(at_s, *one.location)
        if not was_ready or self._transitions.is_idle(*one.location):
            one.go_on(InstanceEvent.DONE)
            self._gone(at_s, one)

    def _timer_s(self, at_s: float) -> float:
        """Returns when a round is due without a change: at the end of an idle time, or of the pause after a refusal."""
        out = [
            one.idle_since_s + self._sources.pools[one.pool].idle_s
            for one in self._bought.values()
            if one.idle_since_s < inf
        ]
        out = [idle_until_s for idle_until_s in out if idle_until_s > at_s]
        if self._refused_s:
            retry_s = min(self._refused_s.values()) + self._sources.settings.refused_pause_s
            out += [retry_s] if at_s < retry_s <= self._hopeful_until_s else []
        return min(out, default=inf)

    def _next_s(self, at_s: float) -> float:
        """Returns the time of the next start, end or reclamation of a machine; infinity: none."""
        out = [inf]
        for one in self._bought.values():
            assert one.launched is not None
            out.append(one.launched.ends_at_s)
            if one.step is InstanceStep.AWAIT_AGENT and not one.is_noticed:
                out.append(one.launched.starts_at_s)
        if any(not one.is_noticed for one in self._bought.values()):
            out += [market.next_change_s(at_s) for market in self._markets.values()]
        return min(out)


def _period_s(cloud: TraceProviderSettings) -> float:
    """Returns the length of a cloud's longest trace, after which it repeats; 0 if no zone follows a trace."""
    spans_s = [gap_s * len(counts) / cloud.speed for gap_s, counts in (zone.followed for zone in cloud.zones.values())]
    return max((span_s for span_s in spans_s if not isinf(span_s)), default=0.0)
