"""The activity that joins a session, and the sessions of a machine.

The agent opens one connection to the API for each session, and no port. A session belongs to the process of the agent:
it ends with it, and `agent.sessions.session_shim` then ends the processes of the session.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from agent import tasks
from agent.config import AgentConfig
from agent.sealed import CannotUnseal, open_sealed
from agent.sessions.exec_session import ExecSession
from agent.sessions.forward_session import ForwardSession
from agent.sessions.shim_client import CannotStart, ShimClient
from agent.shim import boot_time_s
from agent.staged import StagedAttempt
from agent.staging import Stager
from agent.state import StateFolder
from agent.tasks import RunFolder, Stop, TaskState
from agent.zygote_client import NoZygote, start_session
from domain.protocol.activities import Activity
from domain.protocol.sessions import OpenSession
from mizzen_client.tunnel import BadFrame, control, unpack
from mizzen_client.tunnel.dial import CannotConnect, dial

MOST = 64
"""Maximum number of open sessions of a machine."""
_BEGIN_S = 20.0
_LOOK_S = 0.25
_KILLED = 128 + 9
_RECORDED_S = 1.0
_log = logging.getLogger(__name__)


class TaskSessions:
    """The sessions in the tasks of one machine."""

    def __init__(self, config: AgentConfig, state: StateFolder, stager: Stager) -> None:
        self._config = config
        self._state = state
        self._stager = stager
        self._open: set[asyncio.Task[None]] = set()

    def all(self) -> Sequence[Callable[..., Awaitable[Any]]]:
        """Returns the activities that the worker registers."""
        return [self.open]

    @activity.defn(name=Activity.OPEN_SESSION.value)
    async def open(self, request: OpenSession) -> None:
        """Connects to the API for a session in a running task. The session continues after the activity.

        Raises:
            ApplicationError: the task does not run here, there are too many sessions, or the API cannot be reached.
        """
        if request.machine != self._config.machine:
            raise _refusal(f"this is the agent of {self._config.machine}, not of {request.machine}")
        if len(self._open) >= MOST:
            raise _refusal(f"machine {request.machine} has {MOST} sessions, the maximum")
        folder = self._state.attempt(request.workload_id, request.attempt)
        run = folder.run(request.job, request.task)
        staged = await asyncio.to_thread(self._stager.load, folder)
        if staged is None or tasks.inspect(run) is not TaskState.RUNNING:
            raise _refusal(f"task {request.task} of job {request.job} does not run on {request.machine}")
        try:
            token = open_sealed(self._state.private_keys(), request.sealed_token).decode()
        except CannotUnseal as error:
            raise _refusal(str(error)) from None
        try:
            connection = await dial(request.url, f"/v1/sessions/{request.session}/agent", token)
        except CannotConnect as error:
            raise _refusal(
                f"machine {request.machine} cannot connect to the API at {request.url} for the session: {error}"
            ) from None
        serving = asyncio.create_task(self._serve(connection, staged, run), name=request.session)
        self._open.add(serving)
        serving.add_done_callback(self._open.discard)

    async def close(self) -> None:
        """Ends all sessions, because the agent ends."""
        for serving in self._open:
            serving.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=2.0)

    async def _serve(self, connection: ClientConnection, staged: StagedAttempt, run: RunFolder) -> None:
        """Serves a session to its end."""
        why = "the agent is being stopped or restarted; start the command again"
        try:
            why = await self._until_the_end(connection, staged, run)
        except (CannotStart, NoZygote, BadFrame, OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
        except ConnectionClosed:
            return
        except Exception:
            _log.exception("a session in %s has failed", run.run_id)
            why = "an unexpected error; see the log of the agent"
        finally:
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(2.0):
                    if why:
                        await connection.send(control("closed", because=why))
                    await connection.close()

    async def _until_the_end(self, connection: ClientConnection, staged: StagedAttempt, run: RunFolder) -> str:
        """Returns why the session has ended; empty: the client has already been informed."""
        async with asyncio.timeout(_BEGIN_S):
            begin = unpack(await connection.recv()).message()
        shim = ShimClient(await asyncio.to_thread(self._start, staged, run, begin))
        session = (
            ForwardSession(shim, connection.send)
            if begin["kind"] == "forward"
            else ExecSession(shim, connection.send, terminal=begin["terminal"])
        )
        works: list[asyncio.Task[Any]] = [
            asyncio.create_task(session.run()),
            asyncio.create_task(_listen(connection, session)),
            asyncio.create_task(_until_over(run, connection)),
        ]
        try:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            if works[0] in done and works[0].result() == _KILLED:
                # The end of the task kills the command before the task's end is recorded.
                await asyncio.wait(works[2:], timeout=_RECORDED_S)
            if works[2].done():
                return str(works[2].result())
            if works[0].done():
                await connection.send(control("exit", code=works[0].result()))
                return ""
            works[1].result()
            return ""
        finally:
            for work in works:
                work.cancel()
            await asyncio.wait(works)
            shim.close()

    def _start(self, staged: StagedAttempt, run: RunFolder, begin: dict[str, Any]) -> Any:
        wanted = {name: begin[name] for name in ("kind", "terminal", "rows", "columns", "term")}
        launch = self._stager.launches.session_launch(staged, run, begin["command"], **wanted)
        with open(run.path / "shim.log", "ab", opener=tasks.private) as log:
            body = json.dumps(launch).encode()
            return start_session(run.path, body, log.fileno(), sandboxed=launch["sandbox"] is not None)


async def _listen(connection: ClientConnection, session: ExecSession | ForwardSession) -> None:
    """Handles the client's messages until the connection is closed."""
    while True:
        await session.receive(unpack(await connection.recv()))


async def _until_over(run: RunFolder, connection: ClientConnection) -> str:
    """Waits until the task has ended, and informs the client of its notice. Returns the message for the user."""
    noticed = False
    while tasks.inspect(run) is TaskState.RUNNING:
        if not noticed and (stop := run.stop()) is not None:
            noticed = True
            left_s = max(0.0, stop.deadline_boot_s - boot_time_s())
            await connection.send(control("notice", text=f"{_stopped(stop)}; it ends within {left_s:.0f} s"))
        with contextlib.suppress(OSError):
            run.session_file.touch()
        await asyncio.sleep(_LOOK_S)
    stop = run.stop()
    return "the task has ended" if stop is None else _stopped(stop)


def _stopped(stop: Stop) -> str:
    return "the owner of the machine takes it back" if stop.owner else "the task is stopped"


def _refusal(message: str) -> ApplicationError:
    return ApplicationError(message, type="NoSession", non_retryable=True)
