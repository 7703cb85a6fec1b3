"""The end of an installation: threads of the API that outlive their event loop leave no connection to Postgres."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.api.world import make_world


def test_an_audit_that_begins_after_the_end_opens_no_connection(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that records a refused login still runs when its event loop and the installation have ended."""
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()
    with make_world(database_url, tmp_path) as world:
        state = world.app.state.mizzen
        write = state.refusals._write

        def late(due: Any) -> Any:
            begun.set()
            gate.wait(60)
            try:
                return write(due)
            finally:
                ended.set()

        monkeypatch.setattr(state.refusals, "_write", late)

        async def refused() -> None:
            async with world.client(None) as client:
                assert (await client.get("/v1/workloads")).status_code == 401
            await asyncio.to_thread(begun.wait, 60)

        asyncio.run(refused())
    gate.set()
    assert ended.wait(60)
    assert state.authentication_engine.pool.checkedin() == 0
