"""The task of chaos tests: counts steps, saves checkpoints, and writes a journal that no part of mizzen touches.

Run as `task.py JOURNALS STEPS STEP_S EXIT_CODE`. Each process has its own journal in the folder JOURNALS: JSON lines,
each written with one system call and stamped with CLOCK_BOOTTIME, which all processes of the machine share. A thread
adds a line every tenth of a second, so that the journal shows when a killed task was last alive.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

BEAT_S = 0.1


class Journal:
    """The journal of one process."""

    def __init__(self, folder: Path) -> None:
        who = ("MIZZEN_WORKLOAD", "MIZZEN_ATTEMPT", "MIZZEN_JOB", "MIZZEN_TASK")
        name = ".".join([*(os.environ[v] for v in who), str(os.getpid()), str(time.monotonic_ns())])
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def write(self, what: str, **more: object) -> None:
        """Appends a line."""
        at_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        os.write(self._file, json.dumps({"at_s": at_s, "what": what, **more}).encode() + b"\n")


def _beat(journal: Journal) -> None:
    while True:
        time.sleep(BEAT_S)
        journal.write("beat")


def main() -> None:
    """Runs the task."""
    folder, steps, step_s, code = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    journal = Journal(folder)
    slots = [int(slot) for slot in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if slot]
    journal.write(
        "start",
        pid=os.getpid(),
        machine=os.environ["MIZZEN_MACHINE"],
        slots=slots,
        tasks=int(os.environ["MIZZEN_TASKS"]),
        run_id=os.environ["MIZZEN_RUN_ID"],
    )
    threading.Thread(target=_beat, args=(journal,), daemon=True).start()
    try:
        _count(journal, steps, step_s)
    except Exception:  # For example, saves failed up to their limit: the task itself fails.
        journal.write("end", exit_code=1)
        raise
    import mizzen

    journal.write("end", exit_code=code, told=mizzen.preempted())
    os._exit(code)


def _count(journal: Journal, steps: int, step_s: float) -> None:
    import mizzen
    from mizzen.checkpoint import Checkpointer

    # The elements of runners have no checkpoints.
    saver = Checkpointer() if "MIZZEN_CHECKPOINT_URI" in os.environ else None
    found = saver.load_latest() if saver else None
    step = found.state["step"] if found else 0
    journal.write("loaded", step=step)
    while step < steps:
        time.sleep(step_s)
        step += 1
        mizzen.progress(step)
        if saver and saver.writer and step == steps:
            saver.save(step, {"step": step})
            journal.write("saved", step=step)
        elif saver and saver.writer and saver.should_save(step) and saver.try_save(step, {"step": step}):
            journal.write("saved", step=step)
        if mizzen.preempted() and step < steps:
            journal.write("preempted", step=step)
            mizzen.exit_preempted()


if __name__ == "__main__":
    main()
