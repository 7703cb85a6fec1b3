"""Notices from a file, for platforms without a watcher: a hook writes the file when the machine will be stopped.

The file is a JSON object with these optional fields: `kind` (a `Kind`, `preempt` by default), `ends_at` (seconds since
the epoch) and `words`. Create it atomically: write another file, then rename it.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mizzen.notices.metadata import MetadataError
from mizzen.notices.notice import Kind, Notice, Watcher, Window, number

VARIABLE = "MIZZEN_NOTICE_FILE"
WINDOW_S = 30.0
PERIOD_S = 1.0
_MAX_BYTES = 65536


class FileWatcher(Watcher):
    """Reads notices from the file at `MIZZEN_NOTICE_FILE`. There is no notice while the file does not exist."""

    platform = "file"

    def __init__(self, environ: Mapping[str, str] | None = None, *, clock: Callable[[], float] = time.time) -> None:
        """Create the watcher without reading the file.

        Args:
            environ: variables to read; `os.environ` by default.
            clock: seconds since the epoch.

        Raises:
            ValueError: `MIZZEN_NOTICE_FILE` is not set, or `MIZZEN_NOTICE_WINDOW_S` is invalid.
        """
        environ = os.environ if environ is None else environ
        path = environ.get(VARIABLE)
        if not path:
            raise ValueError(f"{VARIABLE}: must be the path of the notice file if MIZZEN_PLATFORM is file")
        window = Window(WINDOW_S, "the default for a notice file without ends_at").or_told(environ)
        super().__init__(window, period_s=PERIOD_S, clock=clock)
        self._path = Path(path)

    def poll(self) -> Notice | None:
        """Read the notice from the file; None if the file does not exist.

        Raises:
            MetadataError: the file cannot be read, or its content is invalid.
        """
        try:
            with self._path.open("rb") as file:
                body = json.loads(file.read(_MAX_BYTES) or b"{}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise MetadataError(f"{self._path}: {error}") from None
        if not isinstance(body, dict):
            raise MetadataError(f"{self._path}: must be a JSON object")
        kind, ends_at = body.get("kind", Kind.PREEMPT), body.get("ends_at")
        if kind not in tuple(Kind):
            raise MetadataError(f"{self._path}: kind={kind!r}: must be one of {', '.join(Kind)}")
        if ends_at is not None and (isinstance(ends_at, bool) or number(str(ends_at)) is None):
            raise MetadataError(f"{self._path}: ends_at={ends_at!r}: must be seconds since the epoch")
        return self._notice(Kind(kind), str(body.get("words", "")), None if ends_at is None else float(ends_at))
