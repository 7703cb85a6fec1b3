"""The frontier of availability against cost: what each outage price of `spothedge+` would have cost on a trace."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from infra.reports.tables import ReportTable
from research.spot.runs import CaseResult, PolicyCase
from research.spot.windows import Mean

PRICES_S = (0.0, 480.0, 960.0, 1920.0, 2880.0, 3840.0, 4800.0, 7680.0, 15360.0)
"""The outage prices that are tried by default."""
_SURE = 2.0
"""A difference is significant if it exceeds this number of standard errors."""
_COLUMNS = ("SETTING", "AVAILABILITY %", "COST %", "AGAINST N_EXTRA 0", "AGAINST N_EXTRA 1", "REMARK")
_NOTE = """means over windows ± standard errors; cost relative to all on-demand
AGAINST N_EXTRA 0 and 1: points of availability, and cost, over SpotHedge without and with a spare replica"""


@dataclass(frozen=True)
class FrontierPoint:
    """A policy with one setting, and its results in the windows that all points share."""

    case: PolicyCase
    result: CaseResult

    @property
    def name(self) -> str:
        """The setting as text."""
        if self.is_priced:
            return f"outage price {self.case.outage_price_s:g} s"
        return f"SpotHedge, N_extra {self.case.extra}"

    @property
    def is_priced(self) -> bool:
        """Whether it is a setting of `spothedge+`."""
        return self.case.policy == "spothedge+"

    def values(self, measured: str) -> list[float]:
        """Returns `availability` or `cost` in each window."""
        return [float(getattr(one, measured)) for one in self.result.windows]

    def mean(self, measured: str) -> float:
        """Returns the mean of `values`."""
        return self.result.means()[measured].mean

    def gain(self, than: "FrontierPoint") -> Mean:
        """Returns the mean over windows of the difference in availability between this setting and `than`."""
        both = zip(self.values("availability"), than.values("availability"), strict=True)
        return Mean.of([own - other for own, other in both])

    def has_gain(self, than: "FrontierPoint") -> bool:
        """Returns whether this setting is more available than `than`, by more than the standard error explains."""
        gain = self.gain(than)
        return gain.mean > 0 and gain.mean >= _SURE * gain.standard_error

    def is_dominated_by(self, other: "FrontierPoint") -> bool:
        """Returns whether the other setting is at least as available for less, or more available for the same."""
        mine, theirs = ((one.mean("availability"), -one.mean("cost")) for one in (self, other))
        return theirs != mine and all(their >= own for own, their in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Frontier:
    """Results of the policy `spothedge+` for each outage price, and of SpotHedge without and with a spare replica."""

    priced: tuple[FrontierPoint, ...]
    plain: FrontierPoint
    spare: FrontierPoint

    def dominated(self) -> dict[str, FrontierPoint]:
        """Returns for each setting that another one beats the cheapest of these."""
        found: dict[str, FrontierPoint] = {}
        for one in (*self.priced, self.plain, self.spare):
            better = [other for other in self.priced if one.is_dominated_by(other)]
            if better:
                found[one.name] = min(better, key=lambda other: other.mean("cost"))
        return found

    def useful(self) -> FrontierPoint:
        """Returns the cheapest setting whose availability no more expensive setting exceeds."""
        return next(
            one for at, one in enumerate(self.priced) if not any(o.has_gain(one) for o in self.priced[at + 1 :])
        )

    def matching(self, other: FrontierPoint) -> FrontierPoint | None:
        """Returns the cheapest setting that is at least as available as `other`; None: there is none."""
        enough = (one for one in self.priced if one.mean("availability") >= other.mean("availability"))
        return min(enough, key=lambda one: one.mean("cost"), default=None)

    def sentences(self) -> list[str]:
        """Returns what the table shows, as sentences."""
        found = [f"{self.spare.name} {_bought(self.spare, self.plain)} {self.plain.name}."]
        for other in (self.plain, self.spare):
            match = self.matching(other)
            said = "No outage price that was tried has"
            if match is not None:
                ratio = match.mean("cost") / other.mean("cost") if other.mean("cost") else 1.0
                said = f"An {match.name} has, for {ratio:.2f} of the cost,"
            found.append(f"{said} at least the availability of {other.name}.")
        useful = self.useful()
        if useful is not self.priced[-1]:
            found.append(f"A price above {useful.case.outage_price_s:g} s buys nothing here: the spares only cost.")
        return found

    def table(self) -> ReportTable:
        """Returns the table with a row for each setting."""
        dominated = self.dominated()
        rows = []
        for one in (*self.priced, self.plain, self.spare):
            means, beaten = one.result.means(), dominated.get(one.name)
            rows.append([
                one.name, _percent(means["availability"], 2), _percent(means["cost"], 1), _against(one, self.plain),
                _against(one, self.spare), "" if beaten is None else f"dominated by {beaten.name}",
            ])  # fmt: skip
        return ReportTable(_COLUMNS, rows, "\n".join([*self.sentences(), _NOTE]))

    def to_json(self) -> dict[str, Any]:
        """Returns the points and the sentences as values of JSON."""
        dominated = self.dominated()
        return {
            "points": [_point(one, dominated.get(one.name)) for one in (*self.priced, self.plain, self.spare)],
            "sentences": self.sentences(),
        }


def frontier_of(points: Iterable[FrontierPoint]) -> Frontier:
    """Returns the frontier of points, of which SpotHedge with N_extra 0 and with 1 are the last two."""
    *priced, plain, spare = points
    return Frontier(tuple(sorted(priced, key=lambda one: one.case.outage_price_s)), plain, spare)


def _point(one: FrontierPoint, beaten: FrontierPoint | None) -> dict[str, Any]:
    return {
        "policy": one.case.policy,
        "outage_price_s": one.case.outage_price_s if one.is_priced else None,
        "overprovision": None if one.is_priced else one.case.extra,
        "means": {name: vars(mean) for name, mean in one.result.means().items()},
        "dominated_by_s": None if beaten is None else beaten.case.outage_price_s,
        "windows": [window.to_json() for window in one.result.windows],
    }


def _bought(one: FrontierPoint, than: FrontierPoint) -> str:
    """Returns the gain of a setting over another one and its price, as the middle of a sentence."""
    gain, more = 100 * one.gain(than).mean, 100 * (one.mean("cost") - than.mean("cost"))
    if not one.has_gain(than):
        return f"buys nothing here: it costs {more:.1f} points more, without a sure gain in availability over"
    return f"buys {gain:.2f} points of availability for {more:.1f} points of cost over"


def _percent(value: Mean, digits: int) -> str:
    return f"{100 * value.mean:.{digits}f} ± {100 * value.standard_error:.{digits}f}"


def _against(one: FrontierPoint, other: FrontierPoint) -> str:
    if one is other or not other.mean("cost"):
        return ""
    return f"{100 * one.gain(other).mean:+.2f}, {one.mean('cost') / other.mean('cost'):.2f}"
