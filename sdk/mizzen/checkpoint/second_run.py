"""Implements `verify=True` in the process of the second run (`mizzen.checkpoint.first_run`)."""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mizzen.checkpoint.log import Log
from mizzen.checkpoint.pictures import Picture, picture
from mizzen.checkpoint.place import Place
from mizzen.checkpoint.root_copy import copy_checkpoint
from mizzen.checkpoint.root_view import open_checkpoints
from mizzen.checkpoint.roots import open_root

VARIABLE = "MIZZEN_VERIFY"
"""The variable of the environment that tells a process that it is a second run."""
AFTER = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of steps after the checkpoint at which the runs are compared."""
LONGEST_S = 60.0
"""The second run ends this long after it was restored, or after its first step if that takes longer."""
COPIED = "copied"
"""A file in the folder of the second run, which exists once the checkpoint is copied."""
PICTURES = "pictures"
"""The file in that folder to which the second run adds a line for each picture."""


def launch() -> NoReturn:
    """Copy the checkpoint, then become the script: in a new process, so that the training is not slowed down."""
    told = json.loads(os.environ[VARIABLE])
    folder = Path(told["folder"])
    log = Log(open_root(told["where"]))
    log.refresh()
    manifest = next((one for _, one in log.checkpoints if one.step == told["step"]), None)
    if manifest is None:
        raise SystemExit(f"the checkpoint of step {told['step']} was not saved")
    copy_checkpoint(log.store, open_root(folder / "root"), manifest)
    (folder / COPIED).touch()
    os.execv(told["command"][0], told["command"])


class SecondRun:
    """The second run of `verify=True`, in the process that the training started."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._folder, self._where, self._step = Path(told["folder"]), str(told["where"]), int(told["step"])
        self._last = -1
        self._ends_s: float | None = None
        threading.Thread(target=_end_with, args=[int(told["alive"])], name="mizzen-verify", daemon=True).start()
        os.nice(10)

    @classmethod
    def from_environ(cls) -> "SecondRun | None":
        """Return the second run if this process is one, else None."""
        told = os.environ.get(VARIABLE)
        return cls(json.loads(told)) if told else None

    def redirected(self, place: Place) -> Place:
        """Return the place of the copy of the checkpoint, which this process uses instead of the root."""
        if open_root(place.uri).uri("").rstrip("/") != self._where:
            self._refuse(f"the script uses the root {place.uri} too; verify=True supports one root")
        return replace(place, uri=self._folder / "root", attempt=None)

    def restored(self, state: Callable[[int], Mapping[str, Any]]) -> None:
        """Take a picture of the restored state, and one of the saved state. `state` returns the tracked state."""
        self._ends_s = time.monotonic() + LONGEST_S
        self._state = state
        atexit.register(self._at_exit)
        with suppress(Exception):  # An object may have no state before the first step.
            saved = open_checkpoints(self._folder / "root").load(trusted=True).state
            self._write(self._step, saved=picture(saved))

    def stepped(self, step: int) -> None:
        """Take a picture if both runs do after this step, and end after the last one."""
        self._last = step
        if step - self._step in AFTER:
            self._write(step)
        late = self._ends_s is not None and time.monotonic() > self._ends_s
        if late or step - self._step >= AFTER[-1]:
            os._exit(0)

    def _write(self, step: int, **more: Picture) -> None:
        with (self._folder / PICTURES).open("a") as file:
            file.write(json.dumps({"step": step, "picture": picture(self._state(step)), **more}) + "\n")

    def _at_exit(self) -> None:
        if self._last > self._step:
            with suppress(Exception):
                self._write(self._last)
        os._exit(0)

    def _refuse(self, why: str) -> NoReturn:
        print(why, file=sys.stderr, flush=True)
        os._exit(1)


def _end_with(alive: int) -> None:
    """End this process when the training, which holds the other end of the pipe, ends."""
    os.read(alive, 1)
    os._exit(0)
