"""Platforms that tell by a file: a hook of the platform, or its owner, writes when the machine goes.

The file is a JSON object, all of it optional: `kind` (of `Kind`; `preempt` by default), `ends_at` (seconds since the
epoch) and `words`. It must appear whole: write another one, and rename it.
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
    """A file says that the machine goes. While it is not there, nothing was said."""

    platform = "file"

    def __init__(self, environ: Mapping[str, str] | None = None, *, clock: Callable[[], float] = time.time) -> None:
        """Nothing is read yet.

        Args:
            environ: variables to read; `os.environ` by default.
            clock: seconds since the epoch.

        Raises:
            ValueError: `MIZZEN_NOTICE_FILE` is not set, or `MIZZEN_NOTICE_WINDOW_S` is not in its form.
        """
        environ = os.environ if environ is None else environ
        path = environ.get(VARIABLE)
        if not path:
            raise ValueError(f"{VARIABLE}: must be the file's path where MIZZEN_PLATFORM is file")
        window = Window.told(environ, WINDOW_S, "a file that names no end")
        super().__init__(window, period_s=PERIOD_S, clock=clock)
        self._path = Path(path)

    def poll(self) -> Notice | None:
        """What the file says; None: it is not there.

        Raises:
            MetadataError: it cannot be read, or is not in its form.
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
            raise MetadataError(f"{self._path}: kind: {kind!r} must be one of {', '.join(Kind)}")
        if ends_at is not None and (isinstance(ends_at, bool) or number(str(ends_at)) is None):
            raise MetadataError(f"{self._path}: ends_at: {ends_at!r} must be seconds since the epoch")
        return self._notice(Kind(kind), str(body.get("words", "")), None if ends_at is None else float(ends_at))
