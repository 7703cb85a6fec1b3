"""Reads `--sweep FIELD=VALUE,VALUE,...` of `mizzen spot replay`, and replays its cases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from infra.errors import ConfigurationError
from research.spot.runs import SWEPT, USED_BY, CaseResult, OptimumResult, PolicyCase, ReplayBench, Sweep
from server.progress import Shown

_VALID: dict[str, tuple[str, Callable[[float], bool]]] = {
    "overprovision": ("whole numbers, 0 or more", lambda value: value >= 0 and value.is_integer()),
    "outage-price-s": ("numbers of seconds, 0 or more", lambda value: value >= 0),
    "cold-start-s": ("numbers of seconds, 0 or more", lambda value: value >= 0),
    "refused-after-s": ("numbers of seconds, 0 or more", lambda value: value >= 0),
    "od-price-ratio": ("numbers above 0", lambda value: value > 0),
}


@dataclass(frozen=True)
class SweepResult:
    """The results of a sweep that are complete, by policy and value.

    The value of a policy that does not use the setting is None.
    """

    sweep: Sweep
    results: dict[tuple[str, float | None], CaseResult]

    def optimum(self, found: OptimumResult | None) -> OptimumResult | None:
        """Returns the optimum of the main table if it is also that of this sweep, otherwise None."""
        return found if self.sweep.field in USED_BY else None


def parse_sweeps(texts: Sequence[str]) -> list[Sweep]:
    """Reads the sweeps. A value that is given twice counts once.

    Raises:
        ConfigurationError: a field is unknown or given twice, or a value is not valid.
    """
    sweeps: list[Sweep] = []
    for text in texts:
        field, _, listed = text.partition("=")
        if field not in SWEPT:
            known = ", ".join(SWEPT)
            raise ConfigurationError(f"--sweep: {field}: no such field: give FIELD=VALUE,... with one of {known}")
        if any(one.field == field for one in sweeps):
            raise ConfigurationError(f"--sweep: {field}: is given twice: give all values in one list")
        sweeps.append(Sweep(field, read_values(f"--sweep: {field}", field, listed)))
    return sweeps


def read_values(flag: str, field: str, listed: str) -> tuple[float, ...]:
    """Reads the values of a setting, separated by commas. A value that is given twice counts once.

    Raises:
        ConfigurationError: a value is not valid; the message begins with `flag`.
    """
    return tuple(dict.fromkeys(_value(flag, field, one) for one in listed.split(",")))


def run_sweep(bench: ReplayBench, sweep: Sweep, bases: Sequence[PolicyCase], show: Shown) -> SweepResult:
    """Replays each policy with each value; stops if the user interrupts."""
    found: dict[tuple[str, float | None], CaseResult] = {}
    cases = [(base.policy, value, case) for base in bases for value, case in sweep.cases(base)]
    count = bench.windows.count * len(cases)
    for number, (policy, value, case) in enumerate(cases):

        def progress(done: int, before: int = number * bench.windows.count, what: str = policy) -> None:
            show((before + done) / count, f"{before + done:,} of {count:,} windows replayed ({what})")

        result = bench.run(case, progress)
        if result is None:
            break
        found[policy, value] = result
    return SweepResult(sweep, found)


def _value(flag: str, field: str, text: str) -> float:
    said, valid = _VALID[field]
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (isfinite(value) and valid(value)):
        raise ConfigurationError(f"{flag}: {text or 'no value'}: give {said}, separated by commas")
    return value
