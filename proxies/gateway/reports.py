"""Checks what an agent reports about a task that it polled: results, heartbeats and failures."""

from dataclasses import dataclass
from typing import Any

from temporalio.api.common.v1 import Payloads
from temporalio.api.enums.v1 import ApplicationErrorCategory
from temporalio.api.failure.v1 import Failure

from domain.protocol.activities import Activity
from domain.protocol.bundles import BundleRun
from domain.protocol.leases import ElementsRun
from domain.protocol.machines import NodeHeartbeat, NodeOutcome, NodePrepared
from proxies.gateway.refusals import denied, malformed
from proxies.gateway.values import encoded, named, value

_NULL = b"binary/null"
_MAX_MESSAGE = 2000
_MAX_TRACE = 16_000
_MAX_NAME = 200
_MAX_CAUSES = 4
_MAX_RETRY_DELAY_S = 60
"""Longest delay before the next try of an activity that an agent can choose. The agent's own delay is one second."""


@dataclass(frozen=True)
class _Kind:
    """The types of an activity's result and heartbeats; None: it returns None, or its heartbeats have no value."""

    result: type[Any] | None = None
    heartbeat: type[Any] | None = None


_KINDS = {
    Activity.PREPARE_NODE: _Kind(NodePrepared, NodeHeartbeat),
    Activity.RUN_NODE: _Kind(NodeOutcome, NodeHeartbeat),
    Activity.RUN_BUNDLE: _Kind(BundleRun, NodeHeartbeat),
    Activity.STOP_NODE: _Kind(NodeOutcome),
    Activity.RUN_ELEMENTS: _Kind(ElementsRun, ElementsRun),
    Activity.CANCEL_ELEMENTS: _Kind(),
    Activity.PACE_NODE: _Kind(),
    Activity.OPEN_SESSION: _Kind(),
    Activity.PROVE_KEY: _Kind(str),
    Activity.ATTEND: _Kind(heartbeat=str),
}


def result(machine: str, activity: str, payloads: Payloads) -> Payloads:
    """Returns the result of a task to forward.

    Raises:
        Refused: it is not a result of this activity, or it names another machine.
    """
    kind = _kind(activity).result
    if kind is None:
        if any(payload.metadata.get("encoding") != _NULL or payload.data for payload in payloads.payloads):
            raise malformed(f"result: has a value; activity {activity} returns none")
        return encoded(None)
    given = value("result", payloads, kind)
    if kind in (NodePrepared, NodeOutcome) and given.machine != machine:
        raise denied(f"result.machine: {named(given.machine)}: the key allows only {machine}")
    if isinstance(given, BundleRun):
        for outcome in given.outcomes.values():
            if outcome.machine != machine:
                raise denied(f"result.outcomes: {named(outcome.machine)}: the key allows only {machine}")
    return encoded(given)


def heartbeat(field: str, activity: str, payloads: Payloads) -> Payloads:
    """Returns the details of a heartbeat to forward; each activity may also send heartbeats without details.

    Raises:
        Refused: the details are not those of this activity.
    """
    kind = _kind(activity).heartbeat
    if not payloads.payloads:
        return Payloads()
    if kind is None:
        raise malformed(f"{field}: has a value; heartbeats of activity {activity} have none")
    return encoded(value(field, payloads, kind))


def failure(given: Failure) -> Failure:
    """Returns a failure to forward: an application failure without details, whose texts and delay are limited.

    It is never refused, because then the task would only end at its timeout.
    """
    return _failure(given, _MAX_CAUSES)


def _failure(given: Failure, causes: int) -> Failure:
    kept = Failure(
        message=_text(given.message, _MAX_MESSAGE),
        source=_text(given.source, _MAX_NAME),
        stack_trace=_text(given.stack_trace, _MAX_TRACE),
    )
    info, info_kept = given.application_failure_info, kept.application_failure_info
    info_kept.type, info_kept.non_retryable = _text(info.type, _MAX_NAME), info.non_retryable
    benign = ApplicationErrorCategory.APPLICATION_ERROR_CATEGORY_BENIGN
    if info.category == benign:
        info_kept.category = benign
    if info.next_retry_delay.seconds > 0:
        info_kept.next_retry_delay.seconds = min(info.next_retry_delay.seconds, _MAX_RETRY_DELAY_S)
    if causes and given.HasField("cause"):
        kept.cause.CopyFrom(_failure(given.cause, causes - 1))
    return kept


def _text(text: str, most: int) -> str:
    """Returns a text for Temporal's history, from where it also gets into JSONB."""
    return text[:most].replace("\0", "\N{REPLACEMENT CHARACTER}")


def _kind(activity: str) -> _Kind:
    try:
        return _KINDS[Activity(activity)]
    except (KeyError, ValueError):
        raise denied(f"activity {named(activity)}: an agent may not run it; allowed are {', '.join(_KINDS)}") from None
