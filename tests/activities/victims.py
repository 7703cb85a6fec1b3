"""Workers that tests run for a while and then kill; see `tests.activities.killable`."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from infra.config.settings import Settings

PATIENCE_S = 600.0


@contextmanager
def victim(settings: Settings, regions: Sequence[str], checkout: Path, **more: Any) -> Iterator[Callable[..., None]]:
    """Yields a function that runs a worker of all roles for `run_s` seconds, or until a condition holds, and kills it.

    `more` is added to the first line of `tests.activities.killable`. All processes end with the context.
    """
    paths = os.pathsep.join(map(str, (checkout, checkout / "sdk")))
    with tempfile.TemporaryFile() as complaints, subprocess.Popen(
        [sys.executable, "-m", "tests.activities.killable"], cwd=checkout, env={**os.environ, "PYTHONPATH": paths},
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        given = {"settings": settings.model_dump(mode="json"), "regions": list(regions), **more}
        print(json.dumps(given), file=process.stdin, flush=True)
        assert process.stdout.readline() == "ready\n"

        def run(run_s: float | None, until: Callable[[], bool] = lambda: True, patience_s: float = PATIENCE_S) -> None:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps({"run_s": run_s}), file=process.stdin, flush=True)
            if run_s is None:
                give_up_s = time.monotonic() + patience_s
                while not until():
                    assert time.monotonic() < give_up_s, "timed out waiting for the condition"
                    time.sleep(0.1)
                print("stop", file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer == "-9\n", f"the worker ended with {answer!r}: {_end_of(complaints)}"

        try:
            yield run
        finally:
            # Any line kills a worker that is still running; the end of the input ends its parent process.
            with suppress(BrokenPipeError):
                print("stop", file=process.stdin, flush=True)
                process.stdin.close()


def _end_of(complaints: IO[bytes]) -> str:
    """Returns the last 4000 bytes of a file as text."""
    size_bytes = os.fstat(complaints.fileno()).st_size
    return os.pread(complaints.fileno(), 4000, max(0, size_bytes - 4000)).decode(errors="replace")
