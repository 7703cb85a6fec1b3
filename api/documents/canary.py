"""The section `service.update` of the service document: the canary phase of a new version, and when it is aborted."""

from fractions import Fraction
from typing import Any

from api.documents.forms import Field, Form, duration, number, section, text
from api.documents.position import At
from domain.patterns import decimals
from domain.service import CanarySpec

_LIMITED = "abort_if has error_rate, p90_ms or both"
_MOST_FOR_S, _MOST_MS = 12 * 3600, 3_600_000
_REFUSED = {
    "shadow": "HAProxy cannot send a request to two replicas; canary gives the new version a share of the requests"
}


def _percentage(low: str, high: str) -> Form:
    """Returns the form of a percentage, such as `0.5%`, which becomes a fraction."""
    message = f"must be a percentage from {low}% to {high}%, such as 5%"
    pattern = f"^{decimals(Fraction(low), Fraction(high))}%$"
    return text("a percentage such as 5%", 20, pattern, message).to(lambda given: float(given.rstrip("%")) / 100)


_ABORT_IF = section({
    "error_rate": Field(_percentage("0", "99"), "Largest share of failed answers"),
    "p90_ms": Field(number(1, _MOST_MS).to(lambda ms: ms / 1000), "Longest 90th percentile of the total time of"
                    " answers, in milliseconds", "p90_s"),
}, _LIMITED)  # fmt: skip


def _limits(at: At, values: dict[str, Any]) -> dict[str, Any]:
    if all(at.get(key).value is None for key in ("error_rate", "p90_ms")):
        at.wrong("must have error_rate, p90_ms or both", rule=_LIMITED)
    return values


def _spec(values: dict[str, Any]) -> CanarySpec | None:
    limits = values.pop("abort_if", {})
    return CanarySpec(**values, **limits) if "share" in values else None


UPDATE = section({
    "canary": Field(_percentage("0.1", "99"), "Share of the requests, and of the replicas rounded up, that a new"
                    " version gets until it is judged", "share", missing="the share of the new version, such as 10%"),
    "for": Field(duration(1, _MOST_FOR_S), "Time until the new version is judged", "for_s",
                 default=CanarySpec.model_fields["for_s"].default),
    "abort_if": Field(_ABORT_IF.checked(_limits), "Limits of the new version's answers; if it breaks one, the update is"
                      " given up", "abort_if", missing="the limits error_rate, p90_ms or both"),
}, refused=_REFUSED).to(_spec)  # fmt: skip
"""Becomes a `CanarySpec`."""
