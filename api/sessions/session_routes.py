"""Endpoints of sessions in running tasks: a request, and the connections of its client and of its agent."""

import asyncio
import contextlib
import time

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.exceptions import ConnectionClosed

from api.auth import Submitter
from api.bodies import Body, JsonOnly, Name
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType, invalid, over_limit
from api.routing import Router
from api.sessions import session_rows as records
from api.sessions.first_message import read_begin
from api.sessions.relay import Relay, SessionEnd, close, say_closed
from api.state import ApiState, StateOf
from api.views import View
from api.workloads.workload_queries import find
from domain.phases import Phase
from domain.spec import WorkloadSpec
from infra.db.models import Allocation, Attempt, Workload
from infra.db.session import in_db
from infra.db.task_sessions import SessionKind, TaskSession
from infra.db.tasks import tasks_of
from mizzen_client.tunnel.dial import CannotConnect, dial
from mizzen_client.tunnel.frames import BadFrame

router = Router(tags=["workloads"])
_RETRY_S = 10
_RUNS = frozenset({Phase.RUNNING, Phase.CHECKPOINTING})


class SessionRequest(Body):
    """A session in a running task."""

    kind: SessionKind = Field(SessionKind.EXEC, description="`exec` runs a command, `forward` connects to ports")
    job: Name | None = Field(None, description="Default: the first job")
    task: int = Field(0, ge=0, le=1 << 31, strict=True, description="The index of the task in its job")


class SessionView(View):
    """A session to which the client connects with its token, once, within 30 seconds."""

    id: str
    path: str = Field(description="Path of the WebSocket", examples=["/v1/sessions/session-0123456789abcdef"])
    token: str = Field(description="The bearer token of the client's connection")
    workload: str
    attempt: int
    job: str
    task: int
    machine: str


@router.post(
    "/v1/workloads/{id}/sessions",
    status_code=201,
    summary="Request a session in a running task",
    dependencies=[JsonOnly],
    responses=refusals(404, 409),
)
def request_session(id: str, body: SessionRequest, state: StateOf, caller: Submitter) -> SessionView:
    """Prepares a session. It begins when the client connects to `path`. Protocol: `mizzen_client.tunnel`."""
    limits = state.settings.limits
    state.relays.require_room()
    with state.transaction() as session:
        row = find(session, caller, id)
        if row.runner:  # A leased array element has no slots of its own: it runs in the sandbox of its runner.
            row = session.get_one(Workload, row.runner)
        job, machine = _placed(session, row, body)
        if records.count_open(session, row.tenant) >= limits.sessions_per_tenant:
            detail = f"tenant {row.tenant} has {limits.sessions_per_tenant} open sessions; end some of them"
            raise over_limit("sessions_per_tenant", limits.sessions_per_tenant, detail, _RETRY_S)
        token, sha256 = records.new_token()
        made = TaskSession(
            id=records.new_id(), workload=row.id, tenant=row.tenant, attempt=row.attempt, job=job, task=body.task,
            machine=machine, actor=caller.id, kind=body.kind.value, client_sha256=sha256,
        )  # fmt: skip
        session.add(made)
        return SessionView.from_row(made, token=token, path=f"/v1/sessions/{made.id}")


def _placed(session: Session, row: Workload, body: SessionRequest) -> tuple[str, str]:
    """Returns the job and the machine of a running task."""
    jobs = {str(job["name"]): int(job.get("most_tasks") or job["tasks"]) for job in row.spec["jobs"]}
    name = body.job or next(iter(jobs))
    if name not in jobs:
        raise invalid("job", f"workload {row.id} has the jobs {', '.join(jobs)}", name)
    if body.task >= jobs[name]:
        raise invalid("task", f"must be at most {jobs[name] - 1}, the last task of job {name}", body.task)
    if Phase(row.phase) not in _RUNS:
        raise HttpProblem(ProblemType.WRONG_PHASE, f"workload {row.id} is {row.phase}: its tasks do not run")
    held = select(Allocation).where(Allocation.workload == row.id, Allocation.attempt == row.attempt)
    tasks = tasks_of(
        WorkloadSpec.model_validate(row.spec), session.get_one(Attempt, (row.id, row.attempt)), session.scalars(held)
    )
    machines = [task.machine for task in tasks if task.job == name]
    if body.task >= len(machines):
        raise invalid("task", f"must be at most {len(machines) - 1}, the last task of job {name} now", body.task)
    return name, machines[body.task]


def _token(websocket: WebSocket) -> str:
    scheme, _, token = websocket.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _refuse(websocket: WebSocket, problem: HttpProblem) -> None:
    # The connection must not be answered until the first message is read.
    await websocket.receive()
    await websocket.send_denial_response(problem.response())


@router.websocket("/v1/sessions/{id}")
async def client_connection(websocket: WebSocket, id: str) -> None:
    """The WebSocket of a session's client. The session ends when it is closed."""
    state: ApiState = websocket.app.state.mizzen
    try:
        state.relays.require_room()
        own = state.settings.api.own_url
        opened = await in_db(state.engine, records.claim, id, _token(websocket), own)
        if opened is None:
            raise _bad_token()
    except HttpProblem as problem:
        await _refuse(websocket, problem)
        return
    await websocket.accept()
    relay = Relay(state.engine, opened, websocket, state.settings.limits)
    began_s, why = time.monotonic(), "the API process is being stopped"
    try:
        with state.relays.registered(relay):
            why = await _serve(state, relay, websocket)
    finally:
        detail = {
            "because": why, "exit_code": relay.exit_code, "seconds": round(time.monotonic() - began_s, 1),
            "bytes_in": relay.from_client, "bytes_out": relay.from_agent,
        }  # fmt: skip
        await in_db(state.engine, records.end, opened, detail)
        await close(websocket)


async def _serve(state: ApiState, relay: Relay, client: WebSocket) -> str:
    """Serves a session to its end; returns why it has ended."""
    opened, settings = relay.opened, state.settings
    try:
        begin = read_begin(await relay.first(), opened.kind)
        url = settings.api.agents_url or settings.api.own_url

        def call(session: Session) -> str | None:
            shown = {}
            if begin.command:
                shown = {"command": records.masked(session, opened.tenant, settings.master_key_path, begin.command)}
            return records.call_agent(session, opened, url, shown)

        relay.agent_sha256 = await in_db(state.engine, call)
        if relay.agent_sha256 is None:
            raise SessionEnd(f"machine {opened.machine} or workload {opened.workload} was removed")
        return await relay.run(begin.for_agent(opened.kind))
    except (SessionEnd, BadFrame) as end:
        await say_closed(client, str(end))
        return str(end)


@router.websocket("/v1/sessions/{id}/agent")
async def agent_connection(websocket: WebSocket, id: str) -> None:
    """The WebSocket of a session's agent. Messages are forwarded if another API process has the client."""
    state: ApiState = websocket.app.state.mizzen
    token = _token(websocket)
    relay = state.relays.get(id)
    if relay is not None:
        if not relay.admits(token):
            await _refuse(websocket, _bad_token())
            return
        await websocket.accept()
        relay.join(websocket)
        await relay.ended.wait()
        await close(websocket)
        return
    url = await in_db(state.engine, records.process_of, id)
    if url is None or url == state.settings.api.own_url:
        await _refuse(websocket, _bad_token())
        return
    await _forward(websocket, url, id, token)


async def _forward(websocket: WebSocket, url: str, id_: str, token: str) -> None:
    """Forwards an agent's connection to the API process that has the client."""
    try:
        peer = await dial(url, f"/v1/sessions/{id_}/agent", token)
    except CannotConnect as error:
        detail = f"the API process at {url}, which has the session's client, refuses or does not answer: {error}"
        await _refuse(websocket, HttpProblem(ProblemType.NOT_READY, detail))
        return
    await websocket.accept()

    async def to_peer() -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, ConnectionClosed):
            while True:
                await peer.send(await websocket.receive_bytes())

    async def to_agent() -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, ConnectionClosed):
            async for message in peer:
                await websocket.send_bytes(message if isinstance(message, bytes) else message.encode())

    works = [asyncio.create_task(to_peer()), asyncio.create_task(to_agent())]
    try:
        await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for work in works:
            work.cancel()
        await peer.close()
        await close(websocket)


def _bad_token() -> HttpProblem:
    return HttpProblem(
        ProblemType.UNAUTHENTICATED, "there is no such session, or its token is wrong, used already or expired"
    )
