"""The loop that keeps pools, as the live keeper does, and the clouds that give machines and take them, on one clock."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, isinf

from capacity.offers import OfferKey
from capacity.pools import PoolKey
from capacity.rounds import Launch, plan_round
from capacity.scaling import Shortage
from lifecycle.instances import InstanceEvent, InstanceStep
from providers.trace.market import Instance, Market
from providers.trace.settings import TraceSettings
from simulation.meter import Meter
from simulation.supply.instances import Bought
from simulation.supply.sources import Sources, machine_of
from simulation.transitions import Transitions


@dataclass
class Counts:
    """What came of pools."""

    launched: int = 0
    refused: int = 0
    """Launches for which a cloud had no machine."""
    taken: int = 0
    """Machines that their clouds took."""
    ended: int = 0
    """Machines that their pools ended."""


class Keeper:
    """Pools, their instances and their clouds.

    A live keeper looks every `interval_s`. Here it looks at the next multiple of that only where something may have
    changed since: another look finds nothing to do.
    """

    def __init__(
        self, sources: Sources, transitions: Transitions, meter: Meter, waiting: Callable[[], list[Shortage]], seed: int
    ) -> None:
        """`waiting`: workloads that no region has room for, in the order of the queue."""
        self._sources, self._transitions, self._meter = sources, transitions, meter
        self._waiting, self._seed = waiting, seed
        self._offers = sources.offers()
        self._markets = {name: Market(settings, 0.0) for name, settings in sources.clouds.items()}
        self._period_s = max(map(_period_s, sources.clouds.values()), default=0.0) + sources.keeper.refused_pause_s
        self._bought: dict[str, Bought] = {}
        """By id, those that are not gone."""
        self._refused_s: dict[OfferKey, float] = {}
        self._last_round_s = -inf
        self._round_s = 0.0 if sources.pools else inf
        self._hopeful_until_s = self._period_s
        """Until then launches that were refused are asked for again: by then the traces have been through once."""
        self._number = 0
        self.counts = Counts()
        self.due_s = self._round_s
        """When something happens next; infinity: nothing does by itself."""

    def hope(self, at_s: float) -> None:
        """A workload came, or gave up what it held: refused launches are asked for again for another while."""
        self._hopeful_until_s = at_s + self._period_s
        self.look(at_s)

    def look(self, at_s: float) -> None:
        """Something has changed, so the next round is soon."""
        if self._sources.pools:
            self._look_again(at_s)
            self.due_s = min(self.due_s, self._round_s)

    def happen(self, at_s: float) -> bool:
        """What is due at a moment; whether machines came or went."""
        changed = self._take(at_s)
        for one in list(self._bought.values()):
            changed |= self._advance(at_s, one)
        if self._round_s <= at_s:
            self._round(at_s)
        self.due_s = min(self._round_s, self._next_s(at_s))
        return changed

    # ----------------------------------------------------------------------------------------------------- the clouds

    def _take(self, at_s: float) -> bool:
        """Clouds say which machines they take."""
        changed = False
        for name, market in self._markets.items():
            for taken in market.taken(self._of_cloud(name), at_s):
                one = self._bought[taken.token]
                one.launched = taken
                self.counts.taken += 1
                if one.step is InstanceStep.SERVE:
                    one.go_on(InstanceEvent.TOLD)
                    self._transitions.interrupt(at_s, *one.place)
                changed = True
        if changed:
            self._look_again(at_s)
        return changed

    def _of_cloud(self, name: str) -> list[Instance]:
        return [
            one.launched for one in self._bought.values() if one.offer.provider == name and one.launched is not None
        ]

    def _advance(self, at_s: float, one: Bought) -> bool:
        """One machine comes, goes, or is empty at last; whether it did."""
        assert one.launched is not None
        if one.launched.ends_at_s <= at_s:
            one.go_on(InstanceEvent.LOST)
            self._gone(at_s, one)
        elif one.step is InstanceStep.DRAIN and self._transitions.is_idle(*one.place):
            one.go_on(InstanceEvent.DONE)
            self._gone(at_s, one)
        elif one.step is InstanceStep.AWAIT_AGENT and one.launched.starts_at_s <= at_s and not one.is_noticed:
            one.go_on(InstanceEvent.DONE)
            self._transitions.join(one.pool[0], one.machine)
            self._look_again(at_s)
        else:
            return False
        return True

    def _gone(self, at_s: float, one: Bought) -> None:
        """It is ended, and paid for no more."""
        one.go_on(InstanceEvent.DONE)
        del self._bought[one.id]
        self._meter.usd_per_h[one.offer.kind.value] -= one.offer.usd_per_h
        self._look_again(at_s)

    # ------------------------------------------------------------------------------------------------------- the pools

    def _look_again(self, at_s: float) -> None:
        interval_s = self._sources.keeper.interval_s
        soonest_s = ceil(at_s / interval_s) * interval_s
        self._round_s = min(self._round_s, max(soonest_s, self._last_round_s + interval_s))

    def _round(self, at_s: float) -> None:
        self._last_round_s, self._round_s = at_s, inf
        seen: dict[PoolKey, list[Bought]] = {}
        for one in self._bought.values():
            is_idle = one.step is InstanceStep.SERVE and self._transitions.is_idle(*one.place)
            one.idle_since_s = min(one.idle_since_s, at_s) if is_idle else inf
            if one.is_counted:
                seen.setdefault(one.pool, []).append(one)
        pause_s = self._sources.keeper.refused_pause_s
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
            self._look_again(timer_s)

    def _launch(self, at_s: float, pool: PoolKey, launch: Launch) -> None:
        offer = launch.offer
        market = self._markets[offer.provider]
        self._number += 1
        id_ = f"in-{self._seed}-{self._number:07d}"
        one = Bought(id_, pool, offer, machine_of(id_, pool[1], offer), claims=launch.claims)
        if not market.has_room(offer.zone, self._of_cloud(offer.provider), at_s):
            one.go_on(InstanceEvent.REFUSED)
            self.counts.refused += 1
            self._refused_s[offer.key] = at_s
            self._look_again(at_s)  # For another offer.
            return
        one.launched = Instance(id_, id_, offer.zone, at_s, at_s + market.start_s(id_))
        one.go_on(InstanceEvent.DONE)
        self._bought[id_] = one
        self.counts.launched += 1
        self._meter.usd_per_h[offer.kind.value] += offer.usd_per_h

    def _end(self, at_s: float, one: Bought) -> None:
        """Its pool has too many: it is drained, and ended when it is empty."""
        was_ready = one.step is InstanceStep.SERVE
        one.go_on(InstanceEvent.TOLD)
        self.counts.ended += 1
        if was_ready:
            self._transitions.interrupt(at_s, *one.place)
        if not was_ready or self._transitions.is_idle(*one.place):
            one.go_on(InstanceEvent.DONE)
            self._gone(at_s, one)

    def _timer_s(self, at_s: float) -> float:
        """When a round may find something to do although nothing has changed."""
        out = [
            one.idle_since_s + self._sources.pools[one.pool].idle_s
            for one in self._bought.values()
            if one.idle_since_s < inf
        ]
        out = [idle_until_s for idle_until_s in out if idle_until_s > at_s]
        if self._refused_s:
            retry_s = min(self._refused_s.values()) + self._sources.keeper.refused_pause_s
            out += [retry_s] if at_s < retry_s <= self._hopeful_until_s else []
        return min(out, default=inf)

    def _next_s(self, at_s: float) -> float:
        """When a machine comes or goes next."""
        out = [inf]
        for one in self._bought.values():
            assert one.launched is not None
            out.append(one.launched.ends_at_s)
            if one.step is InstanceStep.AWAIT_AGENT and not one.is_noticed:
                out.append(one.launched.starts_at_s)
        if any(not one.is_noticed for one in self._bought.values()):
            out += [market.next_change_s(at_s) for market in self._markets.values()]
        return min(out)


def _period_s(cloud: TraceSettings) -> float:
    """After so long its traces repeat."""
    spans_s = [gap_s * len(counts) / cloud.speed for gap_s, counts in (zone.followed for zone in cloud.zones.values())]
    return max((span_s for span_s in spans_s if not isinf(span_s)), default=0.0)
