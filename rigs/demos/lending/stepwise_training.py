"""A data-parallel training that writes each of its steps to a file: `training.py FILE TABLE SEED STEP_S UNTIL`.

The network, its data and its all-reduce are those of `examples/digits`. Each rank appends lines of JSON to
`FILE.RANK`: `begun` with the step from which it continues, `step` after each step with the digest of the weights, and
`saved` after each checkpoint. It ends after UNTIL steps, or, if UNTIL is a path, when that file exists.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import mizzen
import model
import train
from allreduce import GangError, join
from mizzen.checkpoint import Checkpointer

HIDDEN, BATCH = 64, 128
file, table, seed, step_s, until = sys.argv[1:]
told = mizzen.TaskEnvironment.from_environ()
lines = os.open(f"{file}.{told.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def write(event: str, **more: object) -> None:
    """Appends a line."""
    where = {"machine": os.environ.get("MIZZEN_MACHINE"), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
    line = {"at_s": time.time(), "event": event, "step": training.step, "attempt": told.attempt, "pid": os.getpid()}
    os.write(lines, json.dumps({**line, **where, **more}).encode() + b"\n")


def ends() -> bool:
    """Returns whether this rank finds that the training is complete."""
    return training.step >= int(until) if until.isdigit() else Path(until).exists()


def save() -> None:
    """Saves the complete state."""
    saver.save(training.step, training.state())
    write("saved")


data = train.Data.read(Path(table))
saver = Checkpointer()
found = saver.load_latest()
start = model.Training.start(int(seed), HIDDEN, len(data.labels))
training = model.Training.restore(found.state) if found else start
write("begun")
address = (told.master_addr or "127.0.0.1", told.master_port or 0)
try:
    with join(
        told.rank, told.world_size, address, f"{told.workload}.{told.attempt}", stop=mizzen.preempted,
        deadline_s=60, silence_s=60,
    ) as gang:  # fmt: skip
        while True:
            began_s = time.monotonic()
            _, leaving = train.train_step(training, data, gang, told.world_size, BATCH)
            mizzen.progress(training.step)
            write("step", digest=model.digest(training.weights))
            complete = gang.sum(np.array([float(ends())]))[0] > 0
            if saver.writer and (leaving or complete or saver.should_save(training.step)):
                save()
            if leaving or complete:
                gang.barrier()
                break
            time.sleep(max(0.0, began_s + float(step_s) - time.monotonic()))
except GangError as error:
    print(f"the gang is broken at step {training.step}: {error}", flush=True)
    if not mizzen.preempted():
        sys.exit(1)
    mizzen.exit_preempted()
if not complete:
    mizzen.exit_preempted()
