"""What an agent can report about a task that it polled: only what the workload's workflow can decode and store."""

import math
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.failure.v1 import Failure
from temporalio.api.workflowservice import v1 as service
from temporalio.exceptions import ApplicationError

from domain.protocol.activities import Activity
from domain.protocol.machines import NodeHeartbeat, NodeOutcome, RunNode, TaskExit
from domain.task_reports import CadenceReport, LoadReport, NoticeReport, TaskProgress
from infra.payloads import DATA_CONVERTER
from tests.agent.harness import Pending
from tests.proxies.gateway.site import Caller, Site

MALFORMED = grpc.StatusCode.INVALID_ARGUMENT


def _payloads(*values: Any) -> Payloads:
    return Payloads(payloads=DATA_CONVERTER.payload_converter.to_payloads(values))


def _raw(encoding: bytes, data: bytes = b"") -> Payloads:
    return Payloads(payloads=[Payload(metadata={"encoding": encoding}, data=data)])


def _progress(**fields: Any) -> TaskProgress:
    return TaskProgress("main", 0, **fields)


BAD_PROGRESS = {
    "a text with a zero character": (_progress(load=LoadReport("failed", "a\0b")), "progress[0].load.error"),
    "a long text": (_progress(cadence=CadenceReport(1.0, source="x" * 9000)), "9000 characters"),
    "an unknown state": (_progress(load=LoadReport("bored")), "load.state: bored"),
    "a time before 1970": (_progress(active_at_s=-1e300), "active_at_s"),
    "a time after 9999": (_progress(notice=NoticeReport("aws", "stop", True, 1e300)), "notice.at_s"),
    "a number that JSON does not have": (_progress(checkpoint_s=math.inf), "checkpoint_s: inf"),
    "a negative size": (_progress(checkpoint_bytes=-1), "progress[0].checkpoint_bytes: -1; must be 0 or more"),
    "a negative step": (_progress(checkpoint_step=-5), "progress[0].checkpoint_step: -5"),
    "a negative duration": (_progress(checkpoint_write_s=-0.5), "progress[0].checkpoint_write_s: -0.5"),
    "a negative interval": (_progress(cadence=CadenceReport(-60.0)), "progress[0].cadence.interval_s: -60"),
    "a negative number": (_progress(load=LoadReport("loaded", skipped=-1)), "progress[0].load.skipped: -1"),
    "a number that no column holds": (_progress(step=1 << 63), "progress[0].step"),
}


@pytest.fixture
def own(site: Site) -> str:
    """Returns the id of the machine whose key the caller has."""
    return site.machine("m1")


async def _task(site: Site, caller: Caller, machine: str, attempts: int = 1) -> tuple[Pending, bytes]:
    """Starts `node.run` on a machine; returns it with the task token that its agent gets."""
    request = RunNode("wl-1", 1, machine, "key", "file:///bucket", {}, "0" * 64)
    running = await site.lab.start(Activity.RUN_NODE, machine, request, attempts, heartbeat_timeout_s=60.0)
    return running, (await caller.poll(machine)).task_token


def _completed(token: bytes, result: Payloads | None) -> service.RespondActivityTaskCompletedRequest:
    return service.RespondActivityTaskCompletedRequest(namespace="default", task_token=token, result=result)


def _beat(token: bytes, details: Payloads) -> service.RecordActivityTaskHeartbeatRequest:
    return service.RecordActivityTaskHeartbeatRequest(namespace="default", task_token=token, details=details)


async def test_results(site: Site, own: str) -> None:
    """A result that the workflow could not decode or store is refused with the field; a valid one is forwarded."""
    good = NodeOutcome(own, [TaskExit("main", 0, 3)], [_progress(step=5)])
    bad: list[tuple[Payloads | None, str]] = [
        (None, "result: has 0 values"),
        (_payloads(good, good), "result: has 2 values"),
        (_payloads(None), "encoding b'binary/null'"),
        (_raw(b"binary/unheard", b"x"), "encoding b'binary/unheard'"),
        (_raw(b"json/plain", b"null"), "must be a NodeOutcome"),
        (_raw(b"json/plain", b'{"machine": "' + b"\xff" + b'"}'), "must be a NodeOutcome"),
        (_payloads("done"), "must be a NodeOutcome"),
        (_payloads(replace(good, machine=site.machine("m2"))), "result.machine"),
        (_payloads(replace(good, exits=[TaskExit("a/b", 0, 1)])), "exits[0]: task a/b/0; must be the name of a job"),
        (_payloads(replace(good, exits=[TaskExit("main", -1, 1)])), "exits[0]: task main/-1"),
        *((_payloads(replace(good, progress=[one])), words) for one, words in BAD_PROGRESS.values()),
    ]
    async with site.caller(site.key(own)) as caller:
        running, token = await _task(site, caller, own)
        for result, words in bad:
            code, message = await caller.refusal(_completed(token, result))
            assert code is (grpc.StatusCode.PERMISSION_DENIED if words == "result.machine" else MALFORMED), message
            assert words in message
        await caller.call(_completed(token, _payloads(good)))
        assert await running.result(NodeOutcome) == good


async def test_heartbeats(site: Site, own: str) -> None:
    """Heartbeats are checked like results."""
    good = NodeHeartbeat([_progress(step=5)], 1)
    async with site.caller(site.key(own)) as caller:
        running, token = await _task(site, caller, own)
        await caller.call(_beat(token, Payloads()))
        for details, words in [
            (_raw(b"binary/unheard"), "details: encoding"),
            (_payloads("ready"), "details: must be a NodeHeartbeat"),
            *((_payloads(NodeHeartbeat([one], 1)), words) for one, words in BAD_PROGRESS.values()),
        ]:
            code, message = await caller.refusal(_beat(token, details))
            assert (code, words in message) == (MALFORMED, True), message
        await caller.call(_beat(token, _payloads(good)))
        assert (await running.heartbeat())["progress"][0]["step"] == 5
        last = service.RespondActivityTaskFailedRequest(
            namespace="default", task_token=token, last_heartbeat_details=_raw(b"binary/unheard")
        )
        assert (await caller.refusal(last))[0] is MALFORMED


async def test_failures(site: Site, own: str) -> None:
    """The texts, causes and delay of a failure are limited, and what a workflow could not decode is dropped."""
    given = Failure(message="m\0" * 50_000, stack_trace="s" * 200_000, encoded_attributes=_raw(b"x").payloads[0])
    info = given.application_failure_info
    info.type, info.category = "t" * 1000, 99  # type: ignore[assignment]
    info.next_retry_delay.FromSeconds(10 * 365 * 86_400)
    info.details.CopyFrom(_raw(b"binary/unheard"))
    deepest = given
    for _ in range(20):
        deepest.cause.message = "c" * 10_000
        deepest = deepest.cause
    deepest.canceled_failure_info.details.CopyFrom(_raw(b"binary/unheard"))
    async with site.caller(site.key(own)) as caller:
        running, token = await _task(site, caller, own, attempts=2)
        failed = service.RespondActivityTaskFailedRequest(namespace="default", task_token=token, failure=given)
        await caller.call(failed)
        pending = await running.state()
        assert pending.next_attempt_schedule_time.ToSeconds() - time.time() <= 61
        info.ClearField("next_retry_delay")
        running, token = await _task(site, caller, own)
        failed = service.RespondActivityTaskFailedRequest(namespace="default", task_token=token, failure=given)
        await caller.call(failed)
        error = await running.failure()
        assert isinstance(error, ApplicationError)
        assert error.message == "c" * 2000, "the deepest cause that is kept"
    (kept,) = [
        event.activity_task_failed_event_attributes.failure
        async for event in running.handle.fetch_history_events()
        if event.HasField("activity_task_failed_event_attributes")
    ]
    assert (len(kept.message), "\0" in kept.message, len(kept.stack_trace)) == (2000, False, 16_000)
    assert len(kept.application_failure_info.type) == 200
    assert kept.ByteSize() < 40_000
