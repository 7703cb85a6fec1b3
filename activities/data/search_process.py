"""Runs a search in a separate process (`python -m tetris`) and stores its input and output in a bucket."""

import contextlib
import json
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from temporalio.exceptions import ApplicationError

from domain.instance import TetrisInstance
from domain.reads import Reads, reads_document
from infra import children
from infra.stack.supervisor import dies_with_parent
from mizzen.objects.store import ObjectStore
from tetris.columns import Columns
from tetris.folders import write_folder

_LOOK_S = 1.0
_LAST_LINES = 20
_SAID_CHARACTERS = 2000


@contextlib.contextmanager
def searched(
    instance: TetrisInstance,
    reads: Reads,
    request: Mapping[str, Any],
    store: ObjectStore,
    prefix: str,
    tell: Callable[[str], None],
) -> Iterator[Path]:
    """Runs the search and yields the folder with its result. All files are also stored under `prefix` in the store.

    `tell` is called with the progress of the search.

    Raises:
        ApplicationError: the search failed; the message contains the end of its error output.
    """
    with tempfile.TemporaryDirectory(prefix="mizzen-search-") as name:
        folder = Path(name)
        write_folder(Columns.of(instance), folder / "instance")
        (folder / "reads.json").write_text(json.dumps(reads_document(reads)))
        (folder / "request.json").write_text(json.dumps(request))
        _solve(folder, tell)
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            store.put(prefix + str(path.relative_to(folder)), path.read_bytes())
        yield folder


def _solve(folder: Path, tell: Callable[[str], None]) -> None:
    """Runs `python -m tetris` and reports its progress. Kills it if the activity is cancelled."""
    command = [*dies_with_parent("KILL"), *children.python("-m", "tetris", str(folder))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=children.environment()
    ) as process:
        far = ["starting"]
        told: deque[str] = deque(maxlen=_LAST_LINES)
        readers = [
            threading.Thread(target=take, args=(stream,), daemon=True)
            for take, stream in ((lambda lines: _newest(lines, far), process.stdout), (told.extend, process.stderr))
        ]
        for reader in readers:
            reader.start()
        try:
            while process.poll() is None:
                tell(far[0])
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        finally:
            process.kill()
            for reader in readers:
                reader.join()
    if process.returncode != 0:
        said = "".join(told).strip()[-_SAID_CHARACTERS:]
        raise ApplicationError(f"the search failed with exit code {process.returncode}: {said}", type="SearchFailed")


def _newest(lines: Iterable[str], far: list[str]) -> None:
    for line in lines:
        far[0] = line.strip()
