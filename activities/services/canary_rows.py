"""Canaries of services: their rules, their answers, and the events about them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from domain.service import CanarySpec
from infra.db.services import ServiceRequests
from services.values import CanaryAnswers, CanaryRules, CanaryState
from services.zones import ZoneOffer


def canary_rules(spec: CanarySpec, zones: Sequence[ZoneOffer]) -> CanaryRules:
    """Returns how a version is judged that may have spot replicas in `zones`."""
    names = frozenset(one.zone.name for one in zones)
    return CanaryRules(spec.share, spec.for_s, spec.error_rate, spec.p90_s, names)


def canary_answers(session: Session, service: str, canary: CanaryState | None) -> CanaryAnswers:
    """Returns the answers since the canary of a service began, as far as balancers have reported them."""
    if canary is None or canary.since_s is None or canary.verdict is not None:
        return CanaryAnswers()
    counted = ServiceRequests.canary
    sums = (func.coalesce(func.sum(counted[one.name].as_integer()), 0) for one in fields(CanaryAnswers))
    found = session.execute(
        select(*sums).where(
            ServiceRequests.service == service,
            ServiceRequests.second >= int(canary.since_s),
            counted["version"].as_integer() == canary.version,
        )
    ).one()
    return CanaryAnswers(*(int(count) for count in found))


def canary_change(before: CanaryState | None, after: CanaryState | None) -> tuple[str, dict[str, Any]] | None:
    """Returns the kind and the detail of the event that a canary began to get requests, passed or failed."""
    if after is None:
        return None
    if before is None or before.version != after.version:
        before = CanaryState(after.version)
    if after.verdict is not before.verdict:
        return f"service.canary_{after.verdict}", {"version": after.version, "why": after.why}
    if after.since_s is not None and before.since_s is None:
        return "service.canary_began", {"version": after.version}
    return None
