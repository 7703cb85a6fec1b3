"""Plain reference implementation of `rms.spread`, for tests only."""

from collections import defaultdict

from domain.scheduling import MachineState, RegionSnapshot
from domain.spread import SpreadLevel, SpreadRule


def crowding_of(snapshot: RegionSnapshot, rule: SpreadRule | None) -> dict[str, tuple[int, ...]]:
    """Returns how many others of the group share the places of each machine; empty if none is in the region."""
    if rule is None or not others_at(snapshot, rule):
        return {}
    others = {level: others_at(snapshot, rule, level) for level in SpreadLevel}
    return {m.id: tuple(len(others[level].get(_name(m, level), ())) for level in rule.order) for m in snapshot.machines}


def others_at(
    snapshot: RegionSnapshot, rule: SpreadRule, level: SpreadLevel | None = None
) -> dict[tuple[str, ...], set[str]]:
    """Returns the others of the group by the names of their places of a level, by default of that of the rule."""
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    machines = {m.id: m for m in snapshot.machines}
    for workload in snapshot.running:
        if workload.group == rule.group and workload.id != rule.beside:
            for machine in {h.machine for h in workload.holdings} & machines.keys():
                found[_name(machines[machine], level or rule.over)].add(workload.id)
    return dict(found)


def _name(machine: MachineState, level: SpreadLevel) -> tuple[str, ...]:
    names = {
        SpreadLevel.MACHINE: (machine.id,),
        SpreadLevel.RACK: (machine.cluster, machine.rack),
        SpreadLevel.CLUSTER: (machine.cluster,),
        SpreadLevel.ZONE: (machine.zone,),
    }
    return names[level]
