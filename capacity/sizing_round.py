"""One sizing round over all pools: the launches and ends for the pool's size, for waiting workloads and for its buffer.

Both the keeper of a live installation and the simulator carry out exactly these decisions.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from capacity.offers import Offer, OfferKey
from capacity.pools import Changes, Instance, Pool, PoolKey, changes, launches
from capacity.scaling import Claims, Idle, Shortage, grow, shrink
from domain.reasons import Reason, ReasonCode


@dataclass(frozen=True)
class MachineLaunch:
    """One machine to be requested."""

    offer: Offer
    claims: Claims = field(default_factory=dict)
    """The workloads that wait for this machine."""


@dataclass
class PoolRound:
    """The decisions of one sizing round."""

    launch: dict[PoolKey, list[MachineLaunch]] = field(default_factory=dict)
    end: dict[str, Reason] = field(default_factory=dict)
    """The instances to end, each with the reason."""
    claims: dict[str, Claims] = field(default_factory=dict)
    """For each existing instance that workloads wait for, those workloads. Other instances have no claims."""
    lacks: dict[PoolKey, Changes] = field(default_factory=dict)
    """The pools that stay below their size or buffer because no offer can supply the rest now."""


def plan_round(
    pools: Mapping[PoolKey, Pool],
    instances: Mapping[PoolKey, Sequence[Instance]],
    shortages: Sequence[Shortage],
    offers: Sequence[Offer],
    refused: Collection[OfferKey] = (),
) -> PoolRound:
    """Returns the launches and ends of all pools.

    Args:
        pools: the pools by region and name. Instances of a pool that is not in this mapping are ended.
        instances: for each pool, its instances that are neither gone nor marked to end.
        shortages: workloads for which no region has room, in queue order.
        offers: the offers of all providers.
        refused: keys of offers that were refused recently; they are not used now.
    """
    out = PoolRound()
    every = dict(pools) | {key: Pool(*key, 0) for key in instances.keys() - pools.keys()}
    kept: dict[PoolKey, list[Instance]] = {}
    had: dict[PoolKey, int] = {}
    for key, pool in sorted(every.items()):
        there = instances.get(key, ())
        sized = changes(pool, there, offers, refused)
        out.end |= dict.fromkeys(sized.end, Reason(ReasonCode.POOL_SHRINKS, {"pool": pool.name, "size": pool.size}))
        kept[key] = [one for one in there if one.id not in out.end]
        _launch(out, key, sized)
        had[key] = len(kept[key]) + len(out.launch.get(key, ()))
    growing = {key: pool for key, pool in sorted(every.items()) if pool.max_size is not None}
    if not growing:
        return out
    _grow(out, every, kept, had, shortages, offers, refused)
    for key, pool in growing.items():
        idle_s = {one.id: one.idle_s for one in kept[key] if one.idle_s is not None}
        spare = [one for one in kept[key] if one.usable and not one.busy and one.id not in out.claims]
        to_come = [launch for launch in out.launch.get(key, ()) if not launch.claims]
        missing = min(pool.buffer - len(spare) - len(to_come), pool.most - had[key])
        if missing > 0:
            _launch(out, key, launches(pool, missing, offers, refused))
        elif key not in out.launch:
            for instance in shrink(pool, had[key], idle_s, out.claims):
                waited_s = round(idle_s[instance])
                reason = Reason(ReasonCode.IDLE, {"pool": pool.name, "idle_s": waited_s})
                if claims := out.claims.pop(instance, None):
                    detail = {"idle_s": waited_s, "workloads": ", ".join(sorted(claims))}
                    reason = Reason(ReasonCode.GANG_INCOMPLETE, detail)
                out.end[instance] = reason
    return out


def _launch(out: PoolRound, key: PoolKey, wanted: Changes) -> None:
    if wanted.launch:
        out.launch.setdefault(key, []).extend(map(MachineLaunch, wanted.launch))
    if wanted.missing:
        out.lacks[key] = wanted


def _grow(
    out: PoolRound,
    pools: Mapping[PoolKey, Pool],
    kept: Mapping[PoolKey, Sequence[Instance]],
    had: dict[PoolKey, int],
    shortages: Sequence[Shortage],
    offers: Sequence[Offer],
    refused: Collection[OfferKey],
) -> None:
    """Adds launches for waiting workloads. Machines that are launched for a pool's size are also assigned to them."""
    idle = [
        Idle(one.id, key, one.offer, one.claims)
        for key, all_ in kept.items()
        for one in all_
        if one.usable and not one.busy
    ]
    sized = {f"{key} {n}": (key, n) for key, all_ in out.launch.items() for n in range(len(all_))}
    idle += [Idle(name, key, out.launch[key][n].offer) for name, (key, n) in sized.items()]
    growth = grow(pools, had, shortages, idle, offers, refused)
    for name, claims in growth.claims.items():
        if name in sized:
            key, n = sized[name]
            out.launch[key][n] = MachineLaunch(out.launch[key][n].offer, claims)
        else:
            out.claims[name] = claims
    for key, launched in growth.launch.items():
        out.launch.setdefault(key, []).extend(MachineLaunch(offer, claims) for offer, claims in launched)
        had[key] += len(launched)
