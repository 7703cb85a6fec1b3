"""Searches for the cheapest plan of a risk model: how many replicas to have in each zone, and on demand."""

from collections.abc import Iterator, Sequence

from services.spot.risk import Option, RiskModel

_STEPS = 4
"""The limit on the improvements by single replicas."""
_CHEAPER = 1e-9
"""A plan replaces another one only if it is cheaper by more than the errors of rounding."""


def cheapest_plan(model: RiskModel, most_spot: int) -> tuple[int, ...]:
    """Returns the cheapest plan that was found, with at least N_tar replicas and at most `most_spot` spot replicas.

    The candidates are the replicas there now, N_tar replicas in the best zones with on-demand replicas for the rest,
    and even spreads over the best zones, without spare replicas and with enough to survive the loss of any zone. The
    best candidate is then improved by single replicas: one more, one less, or one moved. Of equally cheap plans the
    first one is returned, so the result depends on the order of the options only. `model.options` ends with the
    on-demand option, which is always available. If the replicas there now are no valid plan, for example because the
    target changed, replicas may move although `model.is_still`.
    """
    search = _Search(model, most_spot)
    now = tuple(min(option.held, option.most) for option in model.options)
    search.consider(now)
    search.is_still = model.is_still and bool(search.best)
    spot = range(len(model.options) - 1)
    for order in _orders(model):
        for zones in range(len(order) + 1):
            search.consider(_filled(model, order[:zones], model.target, top_up=True))
        for zones in range(1, min(len(order), most_spot) + 1):
            for spare in (0, _survives(model.target - model.base, zones)):
                search.consider(_filled(model, order[:zones], model.target + spare))
    for one in spot:
        search.consider(_filled(model, [one], model.target, top_up=True))
    search.improve()
    return search.best


class _Search:
    def __init__(self, model: RiskModel, most_spot: int) -> None:
        self.model = model
        self.most_spot = most_spot
        self.is_still = False
        self.best: tuple[int, ...] = ()
        self.usd_per_h = float("inf")
        self.tried: set[tuple[int, ...]] = set()

    def consider(self, plan: tuple[int, ...] | None) -> None:
        """Keeps a plan if it is valid and cheaper than the best one."""
        if plan is None or plan in self.tried:
            return
        self.tried.add(plan)
        if sum(plan) < self.model.target or plan[-1] < self.model.base or (self.is_still and self._moves(plan)):
            return
        if not self.model.least_spot <= sum(plan[:-1]) <= self.most_spot:
            return
        cost = self.model.usd_per_h(plan)
        if cost < self.usd_per_h - _CHEAPER:
            self.best, self.usd_per_h = plan, cost

    def _moves(self, plan: tuple[int, ...]) -> bool:
        more = [count - one.held for one, count in zip(self.model.options[:-1], plan[:-1], strict=True)]
        return min(more, default=0) < 0 < max(more, default=0)

    def improve(self) -> None:
        for _ in range(_STEPS):
            before = self.best
            for plan in _neighbours(before, self.model.options):
                self.consider(plan)
            if self.best == before:
                return


def _neighbours(plan: tuple[int, ...], options: Sequence[Option]) -> Iterator[tuple[int, ...]]:
    def changed(*changes: tuple[int, int]) -> tuple[int, ...]:
        counts = list(plan)
        for at, by in changes:
            counts[at] += by
        return tuple(counts)

    ended = [at for at, option in enumerate(options) if plan[at] > option.least]
    for at, option in enumerate(options):
        if plan[at] > option.least:
            yield changed((at, -1))
        if plan[at] < option.most:
            yield changed((at, 1))
            yield from (changed((at, 1), (other, -1)) for other in ended if other != at)


def _orders(model: RiskModel) -> list[list[int]]:
    """Returns the zones by the cost of a replica with its risk; then with each group before a second zone of one."""
    outage_usd = model.outage_usd / max(1, model.target)

    def cost(at: int) -> tuple[float, int]:
        option = model.options[at]
        launch = option.usd_per_h * model.cold_start_h / model.horizon_h
        risk = option.losses_per_h * (outage_usd + option.usd_per_h * model.cold_start_h)
        return option.usd_per_h + risk - (launch if option.held else 0.0), at

    by_cost = sorted((at for at, one in enumerate(model.options[:-1]) if one.most), key=cost)
    seen: dict[int, int] = {}
    rank: dict[int, int] = {}
    for at in by_cost:
        group = model.options[at].group
        rank[at] = seen[group] = seen.get(group, -1) + 1
    return [by_cost, sorted(by_cost, key=lambda at: rank[at]), sorted(by_cost, key=lambda at: -model.options[at].held)]


def _survives(target: int, zones: int) -> int:
    """Returns the least number of spare replicas with which an even spread survives the loss of a zone; 0: none is.

    A single zone has no such spread.
    """
    if zones == 1:
        return 0
    # The zone with the most replicas has ceil((target + spare) / zones).
    spare = 1
    while -(-(target + spare) // zones) > spare:
        spare += 1
    return spare


def _filled(model: RiskModel, zones: Sequence[int], total: int, *, top_up: bool = False) -> tuple[int, ...] | None:
    """Returns `total` replicas, spread evenly over the zones; None if they cannot have them.

    The replicas that are not ended now are among them, also those in other zones.

    With `top_up`, each zone has as many replicas as it can have before the next one, and on-demand replicas fill the
    rest.
    """
    counts = [option.least for option in model.options]
    counts[-1] = model.base
    left = max(0, total - sum(counts))
    if top_up:
        for at in zones:
            more = min(left, model.options[at].most - counts[at])
            counts[at] += more
            left -= more
        counts[-1] += left
        return tuple(counts)
    for _ in range(left):
        free = [at for at in zones if counts[at] < model.options[at].most]
        if not free:
            return None
        counts[min(free, key=lambda at: counts[at])] += 1
    return tuple(counts)
