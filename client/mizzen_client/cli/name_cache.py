"""Names for completion. They are kept for some seconds, so that pressing Tab again does not ask the API again."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mizzen_client.contexts import Context

NamedItem = tuple[str, str | None]
"""A name and its description."""
_KEPT_S = 10.0
_WAIT_S = 3.0


def kept_names(context: Context, kind: str, fetch: Callable[[], list[NamedItem]]) -> list[NamedItem]:
    """Return the names of a kind that the API of a context lists, as they were at most ten seconds ago.

    Without an answer within a few seconds there are none, and the next call asks again.
    """
    identity = f"{context.api}\n{context.key}\n{context.login}\n{kind}".encode()
    path = _folder() / f"{hashlib.sha256(identity).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError):
        if 0 <= time.time() - path.stat().st_mtime < _KEPT_S:
            return [(str(name), what) for name, what in json.loads(path.read_bytes())]
    answers: list[list[NamedItem]] = []

    def ask() -> None:
        with suppress(Exception):  # A failed completion must not print to the user's prompt.
            answers.append(fetch())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_WAIT_S)
    if not answers:
        return []
    with suppress(OSError):
        _keep(path, json.dumps(answers[0]))
    return answers[0]


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mizzen" / "names"


def _keep(path: Path, text: str) -> None:
    """Write a file that only its owner can read, and delete those that are too old."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.touch(0o600)
    draft.write_text(text)
    draft.replace(path)
    for other in path.parent.iterdir():
        if time.time() - other.stat().st_mtime > _KEPT_S:
            other.unlink(missing_ok=True)
