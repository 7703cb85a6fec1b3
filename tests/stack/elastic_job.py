"""A training of an elastic gang for stack tests: `elastic_job.py JOURNAL GATE`.

Each task writes `RANK TASKS SAVED CHANGED STEP WORLD_SIZE` when it starts: STEP is the step from which it resumes. When
all tasks of the attempt have done so, it counts steps until GATE exists. Task 0 saves checkpoints.
"""

import os
import sys
import time
from pathlib import Path

import mizzen
from mizzen.checkpoint import Checkpointer

journal, gate = Path(sys.argv[1]), Path(sys.argv[2])
world, rank = mizzen.world(), int(os.environ["RANK"])
assert (world.min_tasks, world.max_tasks) == (2, 4)
saver = Checkpointer()
found = saver.load_latest()
step = found.state["step"] if found else 0
with journal.open("a") as file:
    file.write(f"{rank} {world.tasks} {world.saved_tasks} {world.changed} {step} {os.environ['WORLD_SIZE']}\n")
started = f"{journal.name}.{os.environ['MIZZEN_ATTEMPT']}."
(journal.parent / f"{started}{rank}").touch()
while len(list(journal.parent.glob(f"{started}*"))) < world.tasks:
    time.sleep(0.02)  # A task that is late would load what task 0 has saved in this attempt.
while not gate.exists():
    time.sleep(0.1)
    step += 1
    mizzen.progress(step)
    if saver.writer and saver.should_save(step):
        saver.save(step, {"step": step})
    if mizzen.preempted():
        mizzen.exit_preempted()
