"""A lower bound of what any plan costs, by CP-SAT: exact about homes and jobs, from below about the curved terms.

Whole numbers only, and every rounding is downwards for what costs or uses, upwards for what a limit allows: each plan
of the branch and bound is one here too, and costs no more. With D <= D_max, (D_r/D - s_r)^2 is at least e^2 for
e = (D_r - s_r D) / D_max, which is linear in the jobs, and e^2 is at least each of its tangents. The overload is
concave above the supply: a chord between two points lies below it.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from tetris.columns import Columns, Floats, Ints
from tetris.exact.prepare import Group, Keys, groups_of, keys_of
from tetris.excess import Amounts

_HOURS = 1_000_000
"""Whole numbers that a channel's whole amount is divided into."""
_COST = 1_000_000
"""Whole numbers that the best total is divided into; or parts of all weights, if those are more (`lower_bound`)."""
_FINE = 1_000_000
"""Slopes are kept in parts of this."""
_TANGENTS = 24
_CHORDS = 8
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class _Model:
    cp: cp_model.CpModel
    at: list[list[cp_model.IntVar]]
    """[T][R] whether a table's home is there."""
    runs: list[list[cp_model.IntVar]]
    """[N][R] whether a group runs there."""
    unit: float
    """What a whole number of cost is worth."""


def lower_bound(
    columns: Columns,
    home: Ints,
    total: float,
    may_use: Amounts,
    *,
    seed: int,
    workers: int,
    is_over: Callable[[float], bool],
) -> float:
    """No plan within `may_use` costs less than this.

    `home` ([T]) and `total` are the best plan known. `is_over` is told the bound so far some times a second, and says
    whether to end.
    """
    if total <= 0:
        return 0.0
    keys = keys_of(columns)
    groups = groups_of(columns, keys)
    weights = float(keys.weight.sum() * (1 + columns.weights.overload)) + columns.weights.storage
    reads = sum(group.per_byte * float(columns.size_bytes[list(group.tables)].sum()) for group in groups)
    # No cost is more than 10^15 units, so that their sums are whole numbers of 64 bits.
    model = _model(columns, groups, max(total, weights / 1e3, reads / 1e9) / _COST)
    costs = _reads(model, columns, groups)
    for key in range(len(keys.supply)):
        costs += _key_costs(model, columns, groups, keys, key)
    costs += _storage_costs(model, columns)
    _limit(model, columns, groups, keys, may_use)
    model.cp.minimize(sum(costs))
    for table, region in enumerate(home):
        for other, there in enumerate(model.at[table]):
            model.cp.add_hint(there, int(other == region))
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed & 0x7FFFFFFF
    solver.parameters.num_workers = workers
    solver.parameters.catch_sigint_signal = False
    always = _always(groups, keys)
    found = _run(solver, model, lambda bound: is_over(min(total, always + bound)))
    return min(total, (always + max(0.0, found)) * (1 - 1e-9))


def _always(groups: Sequence[Group], keys: Keys) -> float:
    """What the keys cost of which no job can have hours anywhere: the squares of their shares."""
    used = {channel for group in groups for channel, _ in group.hours}
    unused = [key for key in range(len(keys.supply)) if key not in used]
    return float(sum(keys.weight[key] * (keys.share[key] ** 2).sum() for key in unused))


def _run(solver: cp_model.CpSolver, model: _Model, is_over: Callable[[float], bool]) -> float:
    """Solve in a thread, so that Ctrl-C and `is_over` end it."""
    known = [0.0]
    ended = threading.Event()

    def keep(bound: float) -> None:
        known[0] = max(known[0], bound)

    def work() -> None:
        try:
            if solver.solve(model.cp) in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
                keep(solver.best_objective_bound)
        finally:
            ended.set()

    solver.best_bound_callback = keep
    thread = threading.Thread(target=work, name="bound", daemon=True)
    thread.start()
    try:
        while not ended.wait(_LOOK_S):
            if is_over(known[0] * model.unit):
                break
    finally:
        while not ended.wait(_LOOK_S / 4):
            solver.stop_search()
        thread.join()
    return known[0] * model.unit


def _model(columns: Columns, groups: Sequence[Group], unit: float) -> _Model:
    """Homes, and which groups run where that makes."""
    cp = cp_model.CpModel()
    regions = range(len(columns.regions))
    at = [[cp.new_bool_var("") for _ in regions] for _ in columns.home]
    for table in at:
        cp.add_exactly_one(table)
    runs = []
    for group in groups:
        if len(group.tables) == 1:
            runs.append(at[group.tables[0]])
            continue
        there = [cp.new_bool_var("") for _ in regions]
        runs.append(there)
        counts = [sum(at[t][r] for t in group.tables) for r in regions]
        if group.is_ml:
            for r in regions:
                for t in group.tables:
                    cp.add_implication(there[r], at[t][r])
                cp.add(there[r] >= counts[r] - (len(group.tables) - 1))
            continue
        cp.add_exactly_one(there)
        for r in regions:
            # A tie is left open: that can only cost less.
            for other in regions:
                if other != r:
                    cp.add(counts[r] >= counts[other]).only_enforce_if(there[r])
    return _Model(cp, at, runs, unit)


def _reads(model: _Model, columns: Columns, groups: Sequence[Group]) -> list[cp_model.LinearExprT]:
    costs: list[cp_model.LinearExprT] = []
    for group, there in zip(groups, model.runs, strict=True):
        if group.per_byte == 0 or len(group.tables) == 1:
            continue
        cost = [math.floor(group.per_byte * float(columns.size_bytes[t]) / model.unit) for t in group.tables]
        if group.is_ml:
            costs.append(sum(cost) * (1 - sum(there)))
            continue
        for table, worth in zip(group.tables, cost, strict=True):
            for r, runs in enumerate(there):
                # Read from afar: it is at home here, and the group does not run here.
                away = model.cp.new_bool_var("")
                model.cp.add(away >= model.at[table][r] - runs)
                costs.append(worth * away)
    return costs


def _key_costs(
    model: _Model, columns: Columns, groups: Sequence[Group], keys: Keys, key: int
) -> list[cp_model.LinearExprT]:
    """Both parts of a key's GPU term."""
    flows = [(there, h) for g, there in zip(groups, model.runs, strict=True) for c, h in g.hours if c == key]
    whole = sum(h for _, h in flows)
    weight = float(keys.weight[key])
    if weight == 0 or whole == 0:
        return []
    costs = _apart(model, flows, np.zeros(len(columns.regions)), keys.share[key], weight)
    overload = weight * columns.weights.overload
    if overload == 0:
        return costs
    for region in range(len(columns.regions)):
        hours = sum(math.floor(h / whole * _HOURS) * there[region] for there, h in flows)
        supply, mean = float(keys.supply[key, region]), float(keys.mean[key])
        if mean > 0:
            costs += _overload(model, hours, whole, supply, mean, overload)
        else:
            any_here = model.cp.new_bool_var("")
            for there, _ in flows:
                model.cp.add_implication(there[region], any_here)
            costs.append(math.floor(overload / 2 / model.unit) * any_here)
    return costs


def _storage_costs(model: _Model, columns: Columns) -> list[cp_model.LinearExprT]:
    if columns.weights.storage == 0:
        return []
    capacity = columns.capacity_bytes
    share = capacity / capacity.sum() if capacity.sum() > 0 else np.zeros_like(capacity)
    base = np.zeros(len(capacity))
    np.add.at(base, columns.replica, np.repeat(columns.size_bytes, np.diff(columns.replica_start)))
    flows = _storing(model, columns)
    if base.sum() + sum(size for _, size in flows) == 0:
        return []
    return _apart(model, flows, base, share, columns.weights.storage)


def _storing(model: _Model, columns: Columns) -> list[tuple[Sequence[cp_model.LinearExprT], float]]:
    """By table: whether its home takes room in each region (not where it has a replica), and how much."""
    flows: list[tuple[Sequence[cp_model.LinearExprT], float]] = []
    for table, at in enumerate(model.at):
        replicas = columns.replica[columns.replica_start[table] : columns.replica_start[table + 1]].tolist()
        flows.append(([0 if r in replicas else there for r, there in enumerate(at)], float(columns.size_bytes[table])))
    return flows


def _apart(
    model: _Model,
    flows: Sequence[tuple[Sequence[cp_model.LinearExprT], float]],
    base: Floats,
    share: Floats,
    weight: float,
) -> list[cp_model.LinearExprT]:
    """At least weight * sum over regions of (D_r/D - s_r)^2."""
    whole = float(base.sum()) + sum(amount for _, amount in flows)
    regions = range(len(share))
    costs: list[cp_model.LinearExprT] = []
    for r in regions:
        terms, rounded = [], 1
        for there, amount in flows:
            for other in regions:
                part = amount / whole * ((other == r) - float(share[r]))
                terms.append(round(part * _HOURS) * there[other])
            rounded += 1
        constant = round((float(base[r]) - float(share[r]) * float(base.sum())) / whole * _HOURS)
        off = model.cp.new_int_var(-2 * _HOURS, 2 * _HOURS, "")
        model.cp.add(off == sum(terms) + constant)
        cost = model.cp.new_int_var(0, math.ceil(weight / model.unit) + 1, "")
        costs.append(cost)
        # Each flow goes to one region at most, so that its rounding counts once.
        unsure = rounded / 2 / _HOURS
        for step in range(-_TANGENTS, _TANGENTS + 1):
            # Closer to one another around zero, where good plans are.
            point = math.copysign((abs(step) / _TANGENTS) ** 2, step)
            slope = weight * 2 * point / model.unit / _HOURS * _FINE
            free = weight * (point**2 + 2 * abs(point) * unsure) / model.unit * _FINE
            # The last term: a cost is rounded down.
            known = round(slope) * off - math.ceil(free + 0.5 * 2 * _HOURS) - (_FINE - 1)
            model.cp.add(_FINE * cost >= known)
    return costs


def _overload(
    model: _Model, hours: cp_model.LinearExprT, whole: float, supply: float, mean: float, weight: float
) -> list[cp_model.LinearExprT]:
    """At least weight * (sigmoid(max(0, D_r - S_r) / m) - 1/2), for D_r = hours / _HOURS * whole."""
    if whole <= supply:
        return []
    # Geometric steps: the curve bends most at its beginning.
    points = [supply + (whole - supply) * (2**i - 1) / (2**_CHORDS - 1) for i in range(_CHORDS + 1)]
    values = [weight * (1 / (1 + math.exp(-(p - supply) / mean)) - 0.5) / model.unit for p in points]
    cost = model.cp.new_int_var(0, math.ceil(values[-1]) + 1, "")
    inside = [model.cp.new_bool_var("") for _ in range(_CHORDS + 1)]
    model.cp.add_exactly_one(inside)
    model.cp.add(hours <= math.ceil(supply / whole * _HOURS)).only_enforce_if(inside[_CHORDS])
    for i in range(_CHORDS):
        first, last = points[i] / whole * _HOURS, points[i + 1] / whole * _HOURS
        model.cp.add(hours <= math.ceil(last)).only_enforce_if(inside[i])
        model.cp.add(hours >= math.floor(first)).only_enforce_if(inside[i])
        # Rounding the slope down, and the beginning up, keeps the chord below the curve.
        slope = math.floor((values[i + 1] - values[i]) / (last - first) * _FINE)
        start = math.floor(values[i] * _FINE) - slope * math.ceil(first) - (_FINE - 1)
        model.cp.add(_FINE * cost >= slope * hours + start).only_enforce_if(inside[i])
    return [cost]


def _limit(model: _Model, columns: Columns, groups: Sequence[Group], keys: Keys, may_use: Amounts) -> None:
    """The hard constraints."""
    regions = range(len(columns.regions))
    cp = model.cp
    base = np.zeros(len(columns.regions))
    np.add.at(base, columns.replica, np.repeat(columns.size_bytes, np.diff(columns.replica_start)))
    stored = _storing(model, columns)
    for r in regions:
        limit = float(may_use.storage_bytes[r]) - float(base[r])
        _at_most(cp, [(there[r], size) for there, size in stored], limit)
        for app in range(len(columns.apps)):
            channel = len(keys.supply) + 1 + app
            used = [
                (there[r], h) for g, there in zip(groups, model.runs, strict=True) for c, h in g.hours if c == channel
            ]
            _at_most(cp, used, float(may_use.cpu_h[app, r]))
    moved = []
    for table, (there, size) in enumerate(stored):
        moved += [(there[r], size) for r in regions if r != columns.home[table]]
    _at_most(cp, moved, may_use.moved_bytes)
    elsewhere = []
    hours = 0.0
    for group, there in zip(groups, model.runs, strict=True):
        for channel, amount in group.hours:
            if channel < len(keys.supply) and keys.is_high[channel]:
                hours += amount
                has = [there[r] for r in regions if keys.supply[channel, r] > 0]
                elsewhere.append((1 - sum(has), amount))
    _at_most(cp, elsewhere, hours - may_use.home_h)


def _at_most(cp: cp_model.CpModel, amounts: Sequence[tuple[cp_model.LinearExprT, float]], limit: float) -> None:
    """Amounts keep a limit; by rounding, ones that are a little over may too."""
    whole = sum(amount for _, amount in amounts)
    if whole <= limit or whole == 0:
        return
    terms = [math.floor(amount / whole * _HOURS) * chosen for chosen, amount in amounts]
    cp.add(sum(terms) <= max(0, math.ceil(limit / whole * _HOURS * (1 + 1e-6)) + 1))
