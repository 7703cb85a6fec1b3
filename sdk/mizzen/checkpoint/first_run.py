"""`Checkpointer(verify=True)`: starts the script once more from its first checkpoint, and compares both runs.

Data that the saved state omits is missing in a new process, so the second run soon differs from the first one.
`FirstRun` runs in the training: after the first save it starts a process that copies that checkpoint to a temporary
folder and then runs the script with the same command. `SecondRun` runs in that process, whose `Checkpointer` uses the
copy.

Both take a picture (a summary) of the tracked state at the same steps, and at their ends: the values of small entries,
and a digest of a sample of each tensor. Taking pictures stalls the training for at most the time of `STALL_STEPS`
steps.
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from mizzen.checkpoint import rng
from mizzen.checkpoint.differences import Difference
from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.pictures import Picture, differing, picture
from mizzen.checkpoint.place import Gang
from mizzen.checkpoint.second_run import AFTER, COPIED, PICTURES, VARIABLE
from mizzen.checkpoint.tensors import loaded
from mizzen.checkpoint.tracked_objects import Tracked

STALL_STEPS = 1.8
"""The pictures stall the training for at most the time of this many steps."""

_EXIT_S = 120.0
"""How long the end of the training waits for the second run."""
_POLL_S = 0.05
_KEPT_OUT = ("MIZZEN_REPORT", "MIZZEN_ATTEMPT", "MIZZEN_NOTICE_FILE")
"""Variables of the environment with which the second run would act on the first one."""
_LAUNCH = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mizzen.checkpoint.second_run import launch
launch()
"""


@dataclass(frozen=True)
class Verification:
    """The result of `verify=True`."""

    step: int
    """The step of the checkpoint from which the second run started."""
    steps: tuple[int, ...] = ()
    """The steps at which both runs were compared."""
    path: str | None = None
    """The first entry that differs, such as `optimizer/state/0/exp_avg`; None if none does."""
    cpu_s: float = 0.0
    """CPU time of the second run, in seconds."""
    memory_bytes: int = 0
    """Greatest memory of the second run."""
    stall_s: float = 0.0
    """How long the pictures have stalled the training, in seconds."""
    message: str = ""
    """The result in a sentence."""

    @property
    def exact(self) -> bool | None:
        """Whether the second run equals the first one; None if they could not be compared."""
        return False if self.path is not None else True if any(at > self.step for at in self.steps) else None


class FirstRun:
    """Implements `verify=True` in the training process: starts the second run and compares."""

    def __init__(self, where: str, gang: Gang, held: set[int], tracked: Tracked) -> None:
        """`where`: URI of the root; `held`: steps whose checkpoints are not removed (`Retention.held`)."""
        self.result: Verification | None = None
        self._where, self._gang, self._held, self._tracked = where, gang, held, tracked
        self._untracked: list[str] = []
        self._folder = Path.cwd()
        self._told = self._begun = False
        self._step = self._last = -1
        self._due: list[int] = []
        self._pictures: dict[int, Picture] = {}
        self._others: list[Difference] = []
        self._stall_s = self._step_s = self._stepped_s = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mizzen-verify", daemon=True)

    def saved(self, step: int, durable: Callable[[], object]) -> None:
        """Start the second run after the first save. `durable` waits until the save of `step` has ended."""
        self._stepped_s = time.monotonic()  # The save is not a part of the next step.
        if self._begun:
            return
        self._begun = True
        if why := self._obstacle():
            self.result = Verification(step, message=f"the script cannot be started once more: {why}")
            self._tell()
            return
        self._step, self._due, self._durable = step, [step + after for after in AFTER], durable
        self._untracked = _untracked(self._tracked)
        self._held.add(step)
        atexit.register(self._at_exit)
        self._thread.start()

    def stepped(self, step: int) -> None:
        """Take a picture if one is due after this step. Warn of the result when it is known."""
        if self.result is not None:
            self._tell()
            return
        now_s = time.monotonic()
        if self._stepped_s:
            took_s = now_s - self._stepped_s
            self._step_s = min(self._step_s or took_s, took_s)
        if self._due and step >= self._due[0]:
            self._due = [due for due in self._due if due > step]
            self._take(step)
        self._last = step
        self._stepped_s = time.monotonic()

    def _take(self, step: int) -> None:
        began_s = time.monotonic()
        self._pictures[step] = picture(self._tracked.state(step), STALL_STEPS * self._step_s - self._stall_s)
        took_s = time.monotonic() - began_s
        self._stall_s += took_s
        # The last pictures matter most, because differences persist. If not all can be taken, leave out earlier ones.
        more = int((STALL_STEPS * self._step_s - self._stall_s) / max(took_s, 1e-6))
        self._due = self._due[-more:] if more > 0 else []

    def _obstacle(self) -> str | None:
        """Return why the script cannot be started again; None if it can."""
        main = sys.modules.get("__main__")
        file = getattr(main, "__file__", None)
        if self._gang.world_size > 1:
            return f"it is one of {self._gang.world_size} ranks, and a rank cannot run alone; verify it with one rank"
        is_typed = hasattr(sys, "ps1") or file == "<stdin>" or (file is None and "-c" not in sys.orig_argv)
        if "ipykernel" in sys.modules or is_typed:
            return "it is a notebook, or was typed in or read from standard input; verify a script in a file"
        if file is not None and not Path(file).exists():
            return f"{file} does not exist"
        if "--multiprocessing-fork" in sys.orig_argv:
            return "it is a process of multiprocessing; create the Checkpointer in the main process"
        return None

    def _run(self) -> None:
        """Run the script again from the checkpoint, and compare. Runs in a thread."""
        folder = Path(tempfile.mkdtemp(prefix="mizzen-verify-"))
        try:
            self._durable()
            self.result = self._compared(folder)
        except Exception as error:
            self.result = Verification(self._step, message=f"the second run failed: {error!r}")
        finally:
            self._held.discard(self._step)
            shutil.rmtree(folder, ignore_errors=True)

    def _compared(self, folder: Path) -> Verification:
        alive, held = os.pipe()
        try:
            process = self._started(folder, alive)
        finally:
            os.close(alive)
        result, theirs = Verification(self._step), dict[int, Picture]()
        try:
            with (folder / PICTURES).open("a+") as lines:
                lines.seek(0)
                while result.path is None:
                    # Asked before the pictures are read and compared, so that none is left out.
                    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    ending, last = self._ending.is_set(), self._last
                    if (folder / COPIED).exists():
                        self._held.discard(self._step)
                    self._read(lines, theirs)
                    result = self._judged(result, theirs)
                    newest = max(theirs, default=-1)
                    is_compared = last > newest or newest in result.steps
                    if (ended and (ending or is_compared)) or (ending and last <= newest):
                        break
                    time.sleep(_POLL_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            os.close(held)
        cpu_s = usage.ru_utime + usage.ru_stime
        result = replace(result, cpu_s=cpu_s, memory_bytes=usage.ru_maxrss * 1024, stall_s=self._stall_s)
        return replace(result, message=self._sentence(result, (folder / "errors").read_text(errors="replace")))

    def _started(self, folder: Path, alive: int) -> "subprocess.Popen[bytes]":
        """Start the second run. It ends when the write end of the pipe `alive` is closed, as at this process's end."""
        told = {
            "folder": str(folder),
            "where": self._where,
            "step": self._step,
            "alive": alive,
            "command": [sys.executable, *sys.orig_argv[1:]],
        }
        environment = {name: value for name, value in os.environ.items() if name not in _KEPT_OUT}
        with (folder / "errors").open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-I", "-c", _LAUNCH, json.dumps(sys.path)],
                env={**environment, VARIABLE: json.dumps(told)},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[alive],
                start_new_session=True,
            )

    def _read(self, lines: TextIO, theirs: dict[int, Picture]) -> None:
        """Read the pictures that the second run has added."""
        while True:
            at = lines.tell()
            line = lines.readline()
            if not line.endswith("\n"):
                lines.seek(at)
                return
            taken = json.loads(line)
            theirs[taken["step"]] = taken["picture"]
            if "saved" in taken:
                self._pictures[taken["step"]] = taken["saved"]

    def _judged(self, result: Verification, theirs: Mapping[int, Picture]) -> Verification:
        """Compare the pictures that both runs have taken and that were not compared before."""
        for step in sorted(theirs.keys() & self._pictures.keys()):
            if step in result.steps:
                continue
            found = differing(self._pictures[step], theirs[step])
            result = replace(result, steps=(*result.steps, step))
            self._others = found
            if found:
                return replace(result, path=found[0].path)
        return result

    def _tell(self) -> None:
        if self.result is None or self._told:
            return
        self._told = True
        message = f"verify: {self.result.message}"
        if self.result.exact:
            print(f"mizzen: {message}", file=sys.stderr)
        else:
            warnings.warn(message, CheckpointWarning, stacklevel=4)

    def _at_exit(self) -> None:
        """Unless the script has failed or was told to stop, take a last picture and wait for the second run."""
        from mizzen import notices

        if self.result is None and not hasattr(sys, "last_type") and not notices.preempted():
            with suppress(Exception):
                self._pictures.setdefault(self._last, picture(self._tracked.state(self._last)))
            self._ending.set()
            self._thread.join(_EXIT_S)
        self._tell()

    def _sentence(self, result: Verification, errors: str) -> str:
        used = (
            f"The second run has used {result.cpu_s:.1f} s of CPU and {result.memory_bytes / 2**20:.0f} MiB; "
            f"the comparison has stalled the training for {result.stall_s * 1e3:.1f} ms"
        )
        if result.path is not None:
            return f"{self._difference(result.steps[-1])}. {used}"
        if result.exact is None:
            tail = errors.strip().splitlines()[-1:] or ["it has called step() at no step that the training reached"]
            return f"the script was started once more, but the runs could not be compared: {tail[0]}. {used}"
        steps = ", ".join(str(step) for step in result.steps)
        return f"the script, started once more from step {self._step}, is equal at the steps {steps}. {used}"

    def _difference(self, at: int) -> str:
        first, *others = self._others
        if at == self._step:
            when = f"right after the restore of step {at}"
            why = "check that load_state_dict restores all that state_dict returns"
        else:
            when = f"at step {at}, {at - self._step} after the checkpoint from which it started"
            why = "the training depends on something that is not in the state, such as a position, gradients, a counter"
        names = dict.fromkeys(one.path.split("/")[0] for one in others)
        more = f" (and {len(others)} more, in {', '.join(names)})" if others else ""
        hint = f"; not tracked: {', '.join(self._untracked)}" if self._untracked else ""
        return f"the script, started once more, differs {when}, first at {first.path}: {first.how}{more}; {why}{hint}"


def _untracked(tracked: Tracked) -> list[str]:
    """Return the variables of the function that called the SDK, and of its module, that hold a state.

    Each as `name (class)`: random generators, and objects with `state_dict` and `load_state_dict`.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("mizzen."):
        frame = frame.f_back
    if frame is None:
        return []
    variables = {**frame.f_globals, **frame.f_locals}
    known = {id(part) for one in tracked.objects for part in _modules(one)}
    return [
        f"{name} ({type(value).__name__})"
        for name, value in variables.items()
        if id(value) not in known and not isinstance(value, type) and _has_state(value)
    ]


def _modules(value: Any) -> list[Any]:
    """Return an object, and the modules inside if it is a torch module."""
    torch = loaded("torch")
    return list(value.modules()) if torch is not None and isinstance(value, torch.nn.Module) else [value]


def _has_state(value: Any) -> bool:
    try:
        if rng.generator(value) is not None:
            return True
        return callable(getattr(value, "load_state_dict", None)) and bool(value.state_dict())
    except Exception:
        return False
