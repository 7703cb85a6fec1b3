"""Temporal servers for tests: the time-skipping test server, and the dev server where the first is inaccurate."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from domain.search_attributes import INTEGERS, KEYWORDS
from infra.payloads import DATA_CONVERTER
from infra.search_attributes import register
from infra.stack.temporal import DYNAMIC_CONFIG


def _binary(name: str) -> str:
    return str(Path(sys.executable).parent / name)


@contextlib.asynccontextmanager
async def skipping_server() -> AsyncIterator[tuple[WorkflowEnvironment, Client]]:
    """Yields a time-skipping test server and a client whose waiting does not skip time; `environment.sleep` does.

    The server skips no time while an activity runs, or after a workflow was terminated during an activity. It never
    times out a retry that no worker takes, so tests of machines that do not return need the dev server. If a workflow
    cancels an activity whose end it has not yet been told, it answers ACTIVITY_UNKNOWN and the workflow stands still
    (sdk-java issue 2391; the real server accepts it), so a test waits with `Life.handled` before such a cancellation.
    """
    environment = await _started(
        lambda: WorkflowEnvironment.start_time_skipping(
            test_server_existing_path=_binary("temporal-test-server"), data_converter=DATA_CONVERTER
        )
    )
    async with environment:
        client = await _client(environment)
        wanted = dict.fromkeys(KEYWORDS, IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD)
        wanted |= dict.fromkeys(INTEGERS, IndexedValueType.INDEXED_VALUE_TYPE_INT)
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=client.namespace, search_attributes=wanted)
        )
        yield environment, client


@contextlib.asynccontextmanager
async def dev_server() -> AsyncIterator[Client]:
    """Yields a client of the dev server that the embedded stack runs, with its state in memory."""
    environment = await _started(
        lambda: WorkflowEnvironment.start_local(
            dev_server_existing_path=_binary("temporal"),
            data_converter=DATA_CONVERTER,
            dev_server_log_level="error",
            dev_server_extra_args=DYNAMIC_CONFIG,
        )
    )
    async with environment:
        client = await _client(environment)
        await register(client)
        yield client
    await settled()


async def _started(start: Callable[[], Awaitable[WorkflowEnvironment]]) -> WorkflowEnvironment:
    """Starts a server. Temporal's SDK gives it five seconds, which a loaded machine may exceed."""
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            return await start()
    return await start()


async def settled() -> None:
    """Waits for calls that the server's end interrupted: the SDK aborts a process that exits before they return."""
    await asyncio.sleep(0.3)


async def _client(environment: WorkflowEnvironment) -> Client:
    return await environment.connect_client(data_converter=DATA_CONVERTER, identity="client")
