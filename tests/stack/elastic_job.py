"""A training of an elastic gang for stack tests: `elastic_job.py JOURNAL GATE`.

Each task writes `RANK TASKS SAVED CHANGED STEP WORLD_SIZE` when it starts: STEP is the step from which it resumes. Then
it counts steps until GATE exists. Task 0 saves checkpoints.
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
while not gate.exists():
    time.sleep(0.1)
    step += 1
    mizzen.progress(step)
    if saver.writer and saver.should_save(step):
        saver.save(step, {"step": step})
    if mizzen.preempted():
        mizzen.exit_preempted()
