"""A small resumable job for stack tests: `job.py STEPS STEP_S [GATE]`.

It counts to STEPS, takes STEP_S seconds per step, and saves checkpoints. If GATE is given, it waits for that file
before its last step.
"""

import sys
import time
from pathlib import Path

import mizzen
from mizzen.checkpoint import Checkpointer

steps, step_s = int(sys.argv[1]), float(sys.argv[2])
gate = Path(sys.argv[3]) if len(sys.argv) > 3 else None
saver = Checkpointer()
found = saver.load_latest()
step = found.state["step"] if found else 0
print(f"starting at step {step} of {steps}", flush=True)
saved = step
while step < steps:
    time.sleep(step_s)
    if step < steps - 1 or not gate or gate.exists():
        step += 1
        mizzen.progress(step)
    leaving = step < steps and mizzen.preempted()
    if saver.writer and step > saved and (leaving or step == steps or saver.should_save(step)):
        saver.save(step, {"step": step})
        saved = step
    if leaving:
        print(f"stopped at step {step}", flush=True)
        mizzen.exit_preempted()
print(f"done at step {step}", flush=True)
