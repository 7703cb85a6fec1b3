"""The runtime of Temporal's SDK: one for each process."""

import subprocess
import sys

import pytest

_CONNECTS = """
import asyncio, sys
from temporalio.runtime import Runtime
from infra.config.services import TemporalSettings
from infra.process_exit import end_process
from infra.temporal_client import connect, use_quiet_runtime

async def main():
    if sys.argv[2] == "quiet":
        use_quiet_runtime()
        first = Runtime.default()
    else:
        await connect(TemporalSettings(address=sys.argv[1]))
        first = Runtime.default()
    for _ in range(2):
        await connect(TemporalSettings(address=sys.argv[1]))
        assert Runtime.default() is first

asyncio.run(main())
end_process(0)
"""


@pytest.mark.parametrize("kind", ["quiet", "usual"])
def test_connections_share_the_runtime(temporal_address: str, kind: str) -> None:
    """A further connection neither replaces the runtime that the process has chosen, nor starts another thread pool."""
    done = subprocess.run(
        [sys.executable, "-c", _CONNECTS, temporal_address, kind], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
