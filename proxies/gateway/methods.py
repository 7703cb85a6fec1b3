"""The methods of Temporal's workflow service that agents may call, and what the gateway forwards for each.

Each check returns the request to forward: it contains only fields that the check has examined or set. All other fields
are dropped, including fields that only a newer Temporal has, because a field can have effects outside the own machine.
For example, a callback of `StartWorkflowExecution` makes Temporal call any URL.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message
from temporalio.api.common.v1 import WorkflowType
from temporalio.api.enums.v1 import TaskQueueKind, WorkflowIdReusePolicy
from temporalio.api.sdk.v1 import UserMetadata
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice import v1 as service

from domain.ids import CONTROL_QUEUE, RUN_RULE, agent_queue, is_run, machine_workflow_id
from domain.protocol.machines import Hello, MachineNotice
from domain.registration import wrong_hello
from proxies.gateway import reports
from proxies.gateway.refusals import denied, malformed
from proxies.gateway.task_tokens import TaskTokens
from proxies.gateway.values import encoded, named, value

SERVICE = "temporal.api.workflowservice.v1.WorkflowService"
MACHINE_WORKFLOW = "MachineWorkflow"
HELLO_SIGNAL = "hello"
NOTICED_SIGNAL = "noticed"
_SMALL_BYTES, _REPORT_BYTES = 64 << 10, 512 << 10
_MAX_REQUEST_ID = 200


@dataclass(frozen=True)
class Scope:
    """The objects that one call may refer to."""

    machine: str
    key_id: str
    namespace: str
    tokens: TaskTokens

    @property
    def identity(self) -> str:
        """The identity in Temporal's records of the call. The caller does not choose it."""
        return f"agent {self.machine} key {self.key_id}"


@dataclass(frozen=True)
class Method:
    """A method that agents may call."""

    request: type[Message]
    check: Callable[[Scope, Any], Message]
    """Returns the request to forward. Raises `Refused`."""
    response: type[Message]
    answer: Callable[[Scope, Any], Message] | None = None
    """Returns the response for the caller from Temporal's; None: Temporal's response is passed on unchanged."""
    most_bytes: int = _SMALL_BYTES
    """The size of the largest request. Reports on tasks can be larger, because a machine can run many tasks."""
    is_local: bool = False
    """The call is not forwarded: `check` returns the response."""
    is_poll: bool = False
    """The call waits for a task, for up to a minute."""
    is_signal: bool = False
    """The call adds events to the history of the machine's workflow."""


def read(method: Method, body: bytes) -> Message:
    """Returns the request in `body`.

    Raises:
        Refused: the bytes are not such a request.
    """
    try:
        return method.request.FromString(body)
    except DecodeError as error:
        raise malformed(f"the body must be a {method.request.DESCRIPTOR.name}: {error}") from None


# ------------------------------------------------------------------------------------------------------------- checks


def _system_info(_: Scope, __: service.GetSystemInfoRequest) -> Message:
    return service.GetSystemInfoRequest()


def _describe_namespace(scope: Scope, request: service.DescribeNamespaceRequest) -> Message:
    _own_namespace(scope, request.namespace)
    return service.DescribeNamespaceRequest(namespace=scope.namespace)


def _described(_: Scope, response: service.DescribeNamespaceResponse) -> Message:
    """Removes the capabilities, so that the agent's SDK calls no optional method, and the namespace's description."""
    shown = service.DescribeNamespaceResponse()
    info = response.namespace_info
    shown.namespace_info.name, shown.namespace_info.state = info.name, info.state
    shown.namespace_info.limits.CopyFrom(info.limits)
    return shown


def _poll(scope: Scope, request: service.PollActivityTaskQueueRequest) -> Message:
    _own_namespace(scope, request.namespace)
    _own_queue(scope, request.task_queue)
    queue = TaskQueue(name=agent_queue(scope.machine), kind=TaskQueueKind.TASK_QUEUE_KIND_NORMAL)
    return service.PollActivityTaskQueueRequest(namespace=scope.namespace, task_queue=queue, identity=scope.identity)


def _polled(scope: Scope, response: service.PollActivityTaskQueueResponse) -> Message:
    if response.task_token:
        response.task_token = scope.tokens.seal(scope.machine, response.activity_type.name, response.task_token)
    return response


def _heartbeat(scope: Scope, request: service.RecordActivityTaskHeartbeatRequest) -> Message:
    activity, token = _own_task(scope, request)
    details = reports.heartbeat("details", activity, request.details)
    return _report(scope, type(request), token, details=details)


def _completed(scope: Scope, request: service.RespondActivityTaskCompletedRequest) -> Message:
    activity, token = _own_task(scope, request)
    return _report(scope, type(request), token, result=reports.result(scope.machine, activity, request.result))


def _failed(scope: Scope, request: service.RespondActivityTaskFailedRequest) -> Message:
    activity, token = _own_task(scope, request)
    failure = reports.failure(request.failure)
    last = reports.heartbeat("last_heartbeat_details", activity, request.last_heartbeat_details)
    return _report(scope, type(request), token, failure=failure, last_heartbeat_details=last)


def _canceled(scope: Scope, request: service.RespondActivityTaskCanceledRequest) -> Message:
    """Forwards the cancellation of an activity. The details of the request are dropped: agents send none."""
    return _report(scope, type(request), _own_task(scope, request)[1])


def _report(scope: Scope, kind: Callable[..., Message], token: bytes, **checked: Any) -> Message:
    return kind(namespace=scope.namespace, task_token=token, identity=scope.identity, **checked)


def _shutdown(scope: Scope, request: service.ShutdownWorkerRequest) -> Message:
    """The agent's poll ends with its call, so Temporal need not be told."""
    _own_namespace(scope, request.namespace)
    return service.ShutdownWorkerResponse()


def _hello(scope: Scope, request: service.SignalWithStartWorkflowExecutionRequest) -> Message:
    _own_namespace(scope, request.namespace)
    _own_workflow(scope, request.workflow_id)
    _must_be("workflow_type", request.workflow_type.name, MACHINE_WORKFLOW)
    _must_be("task_queue", request.task_queue.name, CONTROL_QUEUE)
    _must_be("signal_name", request.signal_name, HELLO_SIGNAL)
    _must_be("input", value("input", request.input, str), scope.machine)
    hello = value("signal_input", request.signal_input, Hello)
    region, cluster, _ = scope.machine.split("/")
    _must_be("hello.machine", hello.machine, scope.machine)
    _must_be("hello.region", hello.region, region)
    _must_be("hello.cluster", hello.cluster, cluster)
    if (wrong := wrong_hello(hello)) is not None:
        raise malformed(f"hello.{wrong}")
    return service.SignalWithStartWorkflowExecutionRequest(
        namespace=scope.namespace,
        workflow_id=machine_workflow_id(scope.machine),
        workflow_type=WorkflowType(name=MACHINE_WORKFLOW),
        task_queue=TaskQueue(name=CONTROL_QUEUE),
        input=encoded(scope.machine),
        identity=scope.identity,
        request_id=_request_id(request.request_id),
        workflow_id_reuse_policy=WorkflowIdReusePolicy.WORKFLOW_ID_REUSE_POLICY_ALLOW_DUPLICATE,
        signal_name=HELLO_SIGNAL,
        signal_input=encoded(hello),
        user_metadata=UserMetadata(summary=encoded(f"machine {scope.machine}").payloads[0]),
    )


def _noticed(scope: Scope, request: service.SignalWorkflowExecutionRequest) -> Message:
    _own_namespace(scope, request.namespace)
    _own_workflow(scope, request.workflow_execution.workflow_id)
    _must_be("signal_name", request.signal_name, NOTICED_SIGNAL)
    notice = value("input", request.input, MachineNotice)
    _must_be("notice.machine", notice.machine, scope.machine)
    if notice.run is not None and not is_run(notice.run):
        raise malformed(f"notice.run: {named(notice.run)}: must be {RUN_RULE}")
    checked = service.SignalWorkflowExecutionRequest(
        namespace=scope.namespace,
        signal_name=NOTICED_SIGNAL,
        input=encoded(notice),
        identity=scope.identity,
        request_id=_request_id(request.request_id),
    )
    checked.workflow_execution.workflow_id = machine_workflow_id(scope.machine)
    return checked


METHODS: Mapping[str, Method] = {
    "GetSystemInfo": Method(service.GetSystemInfoRequest, _system_info, service.GetSystemInfoResponse),
    "DescribeNamespace": Method(
        service.DescribeNamespaceRequest, _describe_namespace, service.DescribeNamespaceResponse, _described
    ),
    "PollActivityTaskQueue": Method(
        service.PollActivityTaskQueueRequest, _poll, service.PollActivityTaskQueueResponse, _polled, is_poll=True
    ),
    "RecordActivityTaskHeartbeat": Method(
        service.RecordActivityTaskHeartbeatRequest,
        _heartbeat,
        service.RecordActivityTaskHeartbeatResponse,
        most_bytes=_REPORT_BYTES,
    ),
    "RespondActivityTaskCompleted": Method(
        service.RespondActivityTaskCompletedRequest,
        _completed,
        service.RespondActivityTaskCompletedResponse,
        most_bytes=_REPORT_BYTES,
    ),
    "RespondActivityTaskFailed": Method(
        service.RespondActivityTaskFailedRequest,
        _failed,
        service.RespondActivityTaskFailedResponse,
        most_bytes=_REPORT_BYTES,
    ),
    "RespondActivityTaskCanceled": Method(
        service.RespondActivityTaskCanceledRequest, _canceled, service.RespondActivityTaskCanceledResponse
    ),
    "ShutdownWorker": Method(service.ShutdownWorkerRequest, _shutdown, service.ShutdownWorkerResponse, is_local=True),
    "SignalWithStartWorkflowExecution": Method(
        service.SignalWithStartWorkflowExecutionRequest,
        _hello,
        service.SignalWithStartWorkflowExecutionResponse,
        is_signal=True,
    ),
    "SignalWorkflowExecution": Method(
        service.SignalWorkflowExecutionRequest, _noticed, service.SignalWorkflowExecutionResponse, is_signal=True
    ),
}
"""The methods that an agent's client and worker call, by name. No other method is allowed."""


def method_of(path: str) -> tuple[str, Method]:
    """Returns the name and the method for the path of a call: `/service/name`.

    Raises:
        Refused: agents may not call the method.
    """
    called, _, name = path.removeprefix("/").rpartition("/")
    method = METHODS.get(name) if called == SERVICE else None
    if method is None:
        raise denied(f"method {named(path)}: an agent may not call it; allowed are {', '.join(METHODS)}")
    return name, method


# ------------------------------------------------------------------------------------------------------------ helpers


def _own_namespace(scope: Scope, namespace: str) -> None:
    _must_be("namespace", namespace, scope.namespace)


def _own_task(scope: Scope, request: Any) -> tuple[str, bytes]:
    """Returns the type of the activity and Temporal's token of the task that a request concerns."""
    _own_namespace(scope, request.namespace)
    return scope.tokens.open(scope.machine, request.task_token)


def _own_workflow(scope: Scope, workflow_id: str) -> None:
    _must_be("workflow_id", workflow_id, machine_workflow_id(scope.machine))


def _own_queue(scope: Scope, queue: TaskQueue) -> None:
    _must_be("task_queue", queue.name, agent_queue(scope.machine))
    normal = (TaskQueueKind.TASK_QUEUE_KIND_UNSPECIFIED, TaskQueueKind.TASK_QUEUE_KIND_NORMAL)
    if queue.kind not in normal:
        raise denied(f"task_queue.kind: {queue.kind}: must be {TaskQueueKind.TASK_QUEUE_KIND_NORMAL} (normal)")


def _must_be(field: str, value: str, wanted: str) -> None:
    if value != wanted:
        raise denied(f"{field}: {named(value)}: the key allows only {wanted}")


def _request_id(text: str) -> str:
    if len(text) > _MAX_REQUEST_ID:
        raise malformed(f"request_id: has {len(text)} characters; must be at most {_MAX_REQUEST_ID}")
    return text
