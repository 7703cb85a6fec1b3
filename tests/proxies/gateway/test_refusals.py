"""What a key of one machine cannot do: everything that concerns another machine, queue, workflow or namespace."""

import asyncio
import json
import uuid
from collections.abc import Callable
from typing import Any

import grpc
import psycopg
import pytest
from google.protobuf.message import Message
from temporalio.api.common.v1 import Payload, Payloads, WorkflowExecution, WorkflowType
from temporalio.api.enums.v1 import TaskQueueKind, WorkflowIdConflictPolicy
from temporalio.api.failure.v1 import Failure
from temporalio.api.operatorservice import v1 as operator
from temporalio.api.operatorservice.v1 import service_pb2 as operator_service
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice import v1 as service
from temporalio.api.workflowservice.v1 import service_pb2

from domain.ids import CONTROL_QUEUE, agent_queue, machine_workflow_id, workload_workflow_id
from domain.protocol.activities import Activity
from domain.protocol.machines import NodeOutcome, StopNode
from infra.payloads import DATA_CONVERTER
from proxies.gateway.methods import METHODS, SERVICE
from tests.activities.world import key
from tests.agent.harness import HelloWorkflow
from tests.proxies.gateway.site import Caller, Site

DENIED = grpc.StatusCode.PERMISSION_DENIED
MALFORMED = grpc.StatusCode.INVALID_ARGUMENT
OTHER = "other/c/m2"


def _payloads(*values: Any) -> Payloads:
    return Payloads(payloads=DATA_CONVERTER.payload_converter.to_payloads(values))


def _hello(machine: str, **fields: Any) -> dict[str, Any]:
    region, cluster, _ = machine.split("/")
    return {
        "machine": machine, "region": region, "cluster": cluster, "rack": "r", "gpu_type": None, "gpus": 0,
        "cpus_milli": 1000, "memory_bytes": 1 << 30, "address": "127.0.0.1", "incarnation": "i", "public_key": key(),
        **fields,
    }  # fmt: skip


def _notice(machine: str) -> dict[str, Any]:
    told = {"platform": "aws", "kind": "preempt", "certain": True, "at_s": 1.0, "ends_at_s": None, "words": "gone"}
    return {"machine": machine, "incarnation": "i", "notice": told}


def hello(machine: str, **changes: Any) -> service.SignalWithStartWorkflowExecutionRequest:
    """Returns the registration of a machine as its agent sends it, with some fields changed."""
    fields: dict[str, Any] = {
        "namespace": "default",
        "workflow_id": machine_workflow_id(machine),
        "workflow_type": WorkflowType(name="MachineWorkflow"),
        "task_queue": TaskQueue(name=CONTROL_QUEUE),
        "input": _payloads(machine),
        "signal_name": "hello",
        "signal_input": _payloads(_hello(machine)),
        "request_id": uuid.uuid4().hex,
    }
    return service.SignalWithStartWorkflowExecutionRequest(**{**fields, **changes})


def noticed(machine: str, **changes: Any) -> service.SignalWorkflowExecutionRequest:
    """Returns the notice of a machine as its agent sends it, with some fields changed."""
    fields: dict[str, Any] = {
        "namespace": "default",
        "workflow_execution": WorkflowExecution(workflow_id=machine_workflow_id(machine)),
        "signal_name": "noticed",
        "input": _payloads(_notice(machine)),
    }
    return service.SignalWorkflowExecutionRequest(**{**fields, **changes})


def poll(queue: str, namespace: str = "default", **more: Any) -> service.PollActivityTaskQueueRequest:
    """Returns a poll for activities."""
    return service.PollActivityTaskQueueRequest(
        namespace=namespace, task_queue=TaskQueue(name=queue, **more), identity="an agent"
    )


REFUSED: dict[str, tuple[Callable[[str], Message], grpc.StatusCode, str]] = {
    "poll another machine's queue": (lambda m: poll(agent_queue(OTHER)), DENIED, f"task_queue: agent/{OTHER}"),
    "poll the control queue": (lambda m: poll(CONTROL_QUEUE), DENIED, "task_queue: control"),
    "poll a queue that begins like its own": (lambda m: poll(agent_queue(f"{m}2")), DENIED, "task_queue"),
    "poll a partition": (lambda m: poll(f"/_sys/{agent_queue(m)}/1"), DENIED, "task_queue"),
    "poll a sticky queue": (
        lambda m: poll(agent_queue(m), kind=TaskQueueKind.TASK_QUEUE_KIND_STICKY, normal_name=CONTROL_QUEUE),
        DENIED,
        "task_queue.kind",
    ),
    "poll in another namespace": (lambda m: poll(agent_queue(m), "temporal-system"), DENIED, "namespace"),
    "poll without a namespace": (lambda m: poll(agent_queue(m), ""), DENIED, "namespace"),
    "describe another namespace": (
        lambda m: service.DescribeNamespaceRequest(namespace="temporal-system"), DENIED, "namespace"
    ),
    "describe a namespace by id": (lambda m: service.DescribeNamespaceRequest(id="1"), DENIED, "namespace"),
    "register another machine": (lambda m: hello(OTHER), DENIED, f"workflow_id: machine/{OTHER}"),
    "start a workload's workflow": (
        lambda m: hello(m, workflow_id=workload_workflow_id("wl-1"), workflow_type=WorkflowType(name="Workload")),
        DENIED,
        "workflow_id: workload/wl-1",
    ),
    "start another type": (lambda m: hello(m, workflow_type=WorkflowType(name="Scrub")), DENIED, "workflow_type"),
    "start on another queue": (lambda m: hello(m, task_queue=TaskQueue(name="region/r")), DENIED, "task_queue"),
    "send another signal": (lambda m: hello(m, signal_name="unconfirmed"), DENIED, "signal_name: unconfirmed"),
    "start with another machine": (lambda m: hello(m, input=_payloads(OTHER)), DENIED, f"input: {OTHER}"),
    "start with an unheard hello": (lambda m: hello(m, input=_payloads(m, _hello(OTHER))), MALFORMED, "input: has 2"),
    "a hello of another machine": (lambda m: hello(m, signal_input=_payloads(_hello(OTHER))), DENIED, "hello.machine"),
    "a hello in another region": (
        lambda m: hello(m, signal_input=_payloads(_hello(m, region="other"))), DENIED, "hello.region: other"
    ),
    "a hello in another cluster": (
        lambda m: hello(m, signal_input=_payloads(_hello(m, cluster="reserved"))), DENIED, "hello.cluster: reserved"
    ),
    "a hello with a run without a number": (
        lambda m: hello(m, signal_input=_payloads(_hello(m, runs=["wl-1.1", "wl-1.x"]))),
        MALFORMED,
        "hello.runs: 'wl-1.x'",
    ),
    "a hello with too many runs": (
        lambda m: hello(m, signal_input=_payloads(_hello(m, runs=["wl-1.1"] * 1001))), MALFORMED, "1001 entries"
    ),
    "a hello with a negative amount": (
        lambda m: hello(m, signal_input=_payloads(_hello(m, memory_bytes=-1))), MALFORMED, "hello.memory_bytes: -1"
    ),
    "a hello with a text that Postgres cannot store": (
        lambda m: hello(m, signal_input=_payloads(_hello(m, rack="r\0"))), MALFORMED, "signal_input.rack"
    ),
    "a notice for a run without a number": (
        lambda m: noticed(m, input=_payloads({**_notice(m), "run": "wl-1."})), MALFORMED, "notice.run: wl-1."
    ),
    "a hello that is none": (lambda m: hello(m, signal_input=_payloads({"machine": m})), MALFORMED, "signal_input"),
    "a hello in another encoding": (
        lambda m: hello(
            m, signal_input=Payloads(payloads=[Payload(metadata={"encoding": b"json/protobuf"}, data=b"{}")])
        ),
        MALFORMED,
        "encoding",
    ),
    "a notice of another machine": (lambda m: noticed(m, input=_payloads(_notice(OTHER))), DENIED, "notice.machine"),
    "a notice to another machine": (lambda m: noticed(OTHER), DENIED, "workflow_id"),
    "a signal to a workload": (
        lambda m: noticed(m, workflow_execution=WorkflowExecution(workflow_id=workload_workflow_id("wl-1"))),
        DENIED,
        "workflow_id: workload/wl-1",
    ),
    "another signal": (lambda m: noticed(m, signal_name="unconfirmed"), DENIED, "signal_name"),
    "a task token of its own making": (
        lambda m: service.RespondActivityTaskCompletedRequest(namespace="default", task_token=b"\x0a\x24"),
        DENIED,
        "task_token",
    ),
    "no task token": (
        lambda m: service.RecordActivityTaskHeartbeatRequest(namespace="default"), DENIED, "task_token"
    ),
}  # fmt: skip


@pytest.fixture
def own(site: Site) -> str:
    """Returns the id of the machine whose key the caller has."""
    return site.machine("m1")


@pytest.mark.parametrize("name", REFUSED)
async def test_refused(site: Site, own: str, name: str) -> None:
    """A request that concerns anything else than the own machine is refused, with the field and the value."""
    request, code, words = REFUSED[name]
    async with site.caller(site.key(own)) as caller:
        refused = await caller.refusal(request(own))
    assert refused[0] is code
    assert words in refused[1]


async def test_no_other_method(site: Site, own: str) -> None:
    """Every other method of Temporal's services, and any other path, is refused by name."""
    workflow_service = service_pb2.DESCRIPTOR.services_by_name["WorkflowService"]
    others = [f"/{SERVICE}/{method.name}" for method in workflow_service.methods if method.name not in METHODS]
    operators = operator_service.DESCRIPTOR.services_by_name["OperatorService"]
    others += [f"/{operators.full_name}/{method.name}" for method in operators.methods]
    others += [f"/{operators.full_name}/GetSystemInfo", "/grpc.health.v1.Health/Check", f"/x{SERVICE}/GetSystemInfo"]
    assert {f"/{SERVICE}/{name}" for name in ("StartWorkflowExecution", "PollWorkflowTaskQueue")} < set(others)
    assert operator.ListSearchAttributesRequest.DESCRIPTOR.name.removesuffix("Request") in str(others)
    async with site.caller(site.key(own)) as caller:
        for path in others:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await caller.send(path, b"")
            assert refused.value.code() is DENIED
            assert path in (refused.value.details() or "")


async def test_a_task_of_another_machine(site: Site, own: str) -> None:
    """A real task token of one machine is refused with another machine's key, and without the gateway's seal."""
    other = site.machine("m2")
    running = await site.lab.start(Activity.STOP_NODE, other, StopNode("wl-1", 1, 0.0), 1, heartbeat_timeout_s=60.0)
    async with site.caller(site.key(own)) as thief, site.caller(site.key(other)) as owner:
        task = await owner.poll(other)
        assert task.activity_type.name == Activity.STOP_NODE.value
        token = task.task_token
        (described,) = (await running.handle.describe()).raw_description.pending_activities
        assert described.last_worker_identity.startswith(f"agent {other} key ")
        result = _payloads(NodeOutcome(other, [], []))
        attempts = [
            service.RecordActivityTaskHeartbeatRequest(namespace="default", task_token=token, details=result),
            service.RespondActivityTaskCompletedRequest(namespace="default", task_token=token, result=result),
            service.RespondActivityTaskFailedRequest(
                namespace="default", task_token=token, failure=Failure(message="stolen")
            ),
            service.RespondActivityTaskCanceledRequest(namespace="default", task_token=token, details=result),
        ]
        for request in attempts:
            code, words = await thief.refusal(request)
            assert (code, own in words) == (DENIED, True)
        stop, pace = Activity.STOP_NODE.value.encode(), Activity.PACE_NODE.value.encode()
        assert stop in token
        for forged in (
            token[33:],
            token[:1] + bytes(32) + token[33:],
            token[:-1],
            b"\x01" + token[1:],
            token.replace(stop, pace),
        ):
            request = service.RespondActivityTaskCompletedRequest(namespace="default", task_token=forged, result=result)
            assert (await owner.refusal(request))[0] is DENIED
            assert (await thief.refusal(request))[0] is DENIED
        await owner.call(
            service.RespondActivityTaskCompletedRequest(
                namespace="default", task_token=token, result=result, identity="me"
            )
        )
        assert await running.result(NodeOutcome) == NodeOutcome(other, [], [])
        again = service.RespondActivityTaskCompletedRequest(namespace="default", task_token=token, result=result)
        assert (await owner.refusal(again))[0] is grpc.StatusCode.NOT_FOUND, "Temporal's own errors pass"


async def test_only_checked_fields_are_forwarded(site: Site, own: str) -> None:
    """Other fields of a registration have no effect, and what was checked is what the workflow receives."""
    signal = json.dumps(_hello(own)).replace("{", f'{{"machine": "{OTHER}", "more": 1, ', 1)
    request = hello(
        own,
        cron_schedule="* * * * *",
        workflow_id_conflict_policy=WorkflowIdConflictPolicy.WORKFLOW_ID_CONFLICT_POLICY_TERMINATE_EXISTING,
        identity="scheduler",
        signal_input=Payloads(payloads=[Payload(metadata={"encoding": b"json/plain"}, data=signal.encode())]),
    )
    request.memo.fields["a"].CopyFrom(_payloads("memo").payloads[0])
    request.search_attributes.indexed_fields["CustomStringField"].CopyFrom(_payloads("x").payloads[0])
    request.workflow_run_timeout.FromSeconds(1)
    async with site.caller(site.key(own)) as caller:
        first = await caller.call(request)
        request.request_id = uuid.uuid4().hex
        assert (await caller.call(request)).run_id == first.run_id, "the running workflow was not terminated"
    handle = site.lab.client.get_workflow_handle(machine_workflow_id(own))
    async with asyncio.timeout(20):
        while len(heard := await handle.query(HelloWorkflow.hellos)) < 2:
            await asyncio.sleep(0.05)
    assert [(one["machine"], "more" in one) for one in heard] == [(own, False)] * 2
    events = (await handle.fetch_history()).events
    started = events[0].workflow_execution_started_event_attributes
    assert started.cron_schedule == ""
    assert not started.memo.fields
    assert not started.search_attributes.indexed_fields
    assert not started.workflow_run_timeout.ToSeconds()
    assert started.identity == f"agent {own} key {next(iter(site.keys.values()))}"


BAD_KEYS: dict[str, tuple[Callable[[Site, str], str | None], grpc.StatusCode, str]] = {
    "none": (lambda site, own: None, grpc.StatusCode.UNAUTHENTICATED, "send the API key"),
    "empty": (lambda site, own: "", grpc.StatusCode.UNAUTHENTICATED, "send the API key"),
    "unknown": (lambda site, own: "mzn_0123_unknown", grpc.StatusCode.UNAUTHENTICATED, "unknown"),
    "expired": (lambda site, own: site.expired(own), grpc.StatusCode.UNAUTHENTICATED, "expired"),
    "operator": (lambda site, own: site.key(None, "operator"), DENIED, "role operator"),
    "submitter": (lambda site, own: site.key(None, "submitter", tenant="vision"), DENIED, "role submitter"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
async def test_bad_keys(site: Site, own: str, name: str) -> None:
    """Without a valid key of a machine, no method can be called, not even one that is not allowed."""
    make, code, words = BAD_KEYS[name]
    async with site.caller(make(site, own)) as caller:
        for request in (
            service.GetSystemInfoRequest(),
            poll(agent_queue(own)),
            service.ListWorkflowExecutionsRequest(),
        ):
            refused = await caller.refusal(request)
            assert (refused[0], words in refused[1]) == (code, True), refused


async def test_requests_that_cannot_be_read(site: Site, own: str) -> None:
    """Bytes that are no message, and messages over the limits, are refused."""
    async with site.caller(site.key(own)) as caller:
        for body, code in ((b"\xff\xff\xff", MALFORMED), (bytes(5 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await caller.send(f"/{SERVICE}/PollActivityTaskQueue", body)
            assert refused.value.code() is code
        large = Caller(caller.channel, (*caller.metadata, ("large", "x" * (32 << 10))))
        assert (await large.refusal(service.GetSystemInfoRequest()))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await caller.call(service.GetSystemInfoRequest())).server_version


async def test_a_machine_over_its_limits(site: Site, own: str) -> None:
    """Too many polls at a time, and too many signals, are refused; other calls and other machines go on."""
    other = site.machine("m2")
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    async with site.caller(site.key(own)) as caller, site.caller(site.key(other)) as another:
        polls = [asyncio.create_task(caller.poll(own, timeout_s=5)) for _ in range(5)]
        done, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        (over,) = (task.exception() for task in done)
        assert isinstance(over, grpc.aio.AioRpcError)
        assert (over.code(), "4 concurrent polls" in (over.details() or "")) == (exhausted, True)
        refused: list[str] = []
        for _ in range(30):  # In batches, because the number of concurrent calls is limited, too.
            signals = await asyncio.gather(*(caller.call(noticed(own)) for _ in range(10)), return_exceptions=True)
            errors = [one for one in signals if isinstance(one, grpc.aio.AioRpcError) and one.code() is exhausted]
            refused += [one.details() or "" for one in errors]
            if any("1 signals per second" in one for one in refused):
                break
        else:
            raise AssertionError(f"no signal was refused for its rate: {refused}")
        assert (await caller.call(service.GetSystemInfoRequest())).server_version
        assert (await another.call(hello(other))).run_id
        await asyncio.gather(*polls, return_exceptions=True)


async def test_without_postgres(site: Site, own: str) -> None:
    """While Postgres is unavailable, agents whose keys are in use go on; other keys cannot be looked up."""
    database = site.settings.database
    assert database is not None
    server, _, name = database.rpartition("/")
    async with site.caller(site.key(own)) as known, site.caller(site.key(own)) as new:
        assert (await known.call(service.GetSystemInfoRequest())).server_version
        site.engine.dispose()
        with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
            connection.execute(f"alter database {name} allow_connections false")  # type: ignore[call-overload]
            connection.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
            try:
                assert (await new.refusal(service.GetSystemInfoRequest()))[0] is grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(3)  # At least one check of the keys fails.
                assert (await known.call(service.GetSystemInfoRequest())).server_version
            finally:
                connection.execute(f"alter database {name} allow_connections true")  # type: ignore[call-overload]
        assert (await new.call(service.GetSystemInfoRequest())).server_version
