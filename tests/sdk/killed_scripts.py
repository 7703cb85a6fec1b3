"""Runs a script in this process, and ends it after some steps. Also used by `tests_integrations`."""

import linecache
import logging
import warnings
from pathlib import Path

import pytest

from mizzen.checkpoint import CheckpointWarning


class Killed(BaseException):
    """Ends a script at once."""


def run_until_killed(text: str, folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[str]]:
    """Runs a script in a folder until it has called `killed()` `steps` times.

    Returns whether it has ended before, and its warnings about checkpoints.
    """
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    path = folder / "script.py"
    path.write_text(text)
    linecache.checkcache(str(path))
    left = steps

    def killed() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Killed

    has_ended = True
    unread: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = unread.append  # type: ignore[assignment, method-assign]
    log = logging.getLogger("mizzen.checkpoint.lost_positions")
    log.addHandler(handler)
    monkeypatch.setattr(log, "level", logging.DEBUG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(compile(text, str(path), "exec"), {"__name__": "__main__", "killed": killed})
        except Killed:
            has_ended = False
    log.removeHandler(handler)
    assert not unread, logging.Formatter().format(unread[0])
    return has_ended, [str(one.message) for one in caught if issubclass(one.category, CheckpointWarning)]
