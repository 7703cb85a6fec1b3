"""Trains a small network on handwritten digits, data-parallel over the processes of its gang.

The final weights depend only on the options and the number of processes. Interruptions, kills and moves do not change
them, because each checkpoint contains the complete state on which the next step depends.

The training needs the table `digits`, which `make_table.py` writes. It also runs without mizzen's scheduler:

    python make_table.py table/
    MIZZEN_TABLE_DIGITS=table MIZZEN_CHECKPOINT_URI=checkpoints python train.py --steps 300
"""

import os

# One thread: several processes share the cores, and sums must not depend on the number of cores.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"

import argparse  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

import mizzen  # noqa: E402
import model  # noqa: E402
from allreduce import Gang, GangError, join  # noqa: E402
from mizzen.checkpoint import Checkpointer  # noqa: E402

PRINT_EVERY = 20


@dataclass(frozen=True)
class Data:
    """The pixels, in 0..1, and the labels of the training samples and of the test samples."""

    images: model.Array
    labels: model.Labels
    test_images: model.Array
    test_labels: model.Labels

    @classmethod
    def read(cls, folder: Path) -> "Data":
        """Reads `digits.npz`. Its last samples are the test samples."""
        with np.load(folder / "digits.npz", allow_pickle=False) as arrays:
            images, labels = arrays["images"].astype(np.float64), arrays["labels"].astype(np.int64)
        split = len(labels) - model.TEST_SAMPLES
        return cls(images[:split], labels[:split], images[split:], labels[split:])


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits.")
    parser.add_argument("--table", default="digits", help="name of the input table (digits)")
    parser.add_argument("--steps", type=int, default=300, help="steps to train (300)")
    parser.add_argument("--step-s", type=float, default=0.02, help="least seconds for each step (0.02)")
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden layer (64)")
    parser.add_argument("--batch", type=int, default=128, help="samples per step over all processes (128)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and noise (0)")
    parser.add_argument("--join-s", type=float, default=120.0, help="seconds to wait for the other processes (120)")
    parser.add_argument(
        "--silence-s", type=float, default=60.0, help="seconds without data after which a peer counts as dead (60)"
    )
    return parser.parse_args(argv)


def say(line: str) -> None:
    """Prints a line and flushes it, so that the log is complete if the process is killed."""
    print(line, flush=True)


def train_step(training: model.Training, data: Data, gang: Gang, world_size: int, batch: int) -> tuple[float, bool]:
    """Makes one step together with all ranks. Returns the mean loss, and whether any rank received a notice."""
    indices = training.sampler.take(batch, training.rng)
    # Every rank draws the noise of the whole batch and uses its own rows, so that all generators stay equal.
    noise = training.rng.standard_normal((batch, model.PIXELS)) * model.NOISE
    mine = slice(gang.rank, None, world_size)
    images, labels = data.images[indices[mine]] + noise[mine], data.labels[indices[mine]]
    loss, gradients = model.loss_and_gradients(training.weights, images, labels)
    total = gang.sum(model.flatten(gradients, loss, float(mizzen.preempted())))
    means, (loss_sum, notices) = model.unflatten(total, training.weights)
    model.update(training.weights, training.momentum, {name: array / batch for name, array in means.items()})
    training.step += 1
    return float(loss_sum) / batch, notices > 0


def run(training: model.Training, settings: dict[str, Any], data: Data, gang: Gang, saver: Checkpointer) -> bool:
    """Trains up to the last step. Returns False if it saved and stopped earlier because of a notice."""
    world_size, steps, batch = settings["world_size"], settings["steps"], settings["batch"]
    while training.step < steps:
        began_s = time.monotonic()
        loss, stopping = train_step(training, data, gang, world_size, batch)
        mizzen.progress(training.step, loss=loss)
        if gang.rank == 0 and training.step % PRINT_EVERY == 0:
            say(f"step {training.step} loss={loss:.4f}")
        if stopping and training.step < steps:
            if gang.rank == 0:
                saver.save(training.step, training.state() | {"settings": settings})
                say(f"preempted: saved at step {training.step}")
            gang.barrier()
            return False
        if saver.writer and training.step < steps and saver.should_save(training.step):
            # If the store fails, the training continues, and the save is tried again soon.
            saver.try_save(training.step, training.state() | {"settings": settings})
        time.sleep(max(0.0, began_s + settings["step_s"] - time.monotonic()))
    return True


def main(argv: list[str] | None = None) -> int:
    """Trains to the end. Returns the exit code."""
    given = options(argv)
    told = mizzen.TaskEnvironment.from_environ()
    data = Data.read(told.table(given.table))
    saver = Checkpointer()
    settings = {name: getattr(given, name) for name in ("steps", "step_s", "hidden", "batch", "seed")}
    settings["world_size"] = told.world_size

    found = saver.load_latest()
    if found:
        for name in ("hidden", "batch", "seed", "world_size"):
            if found.state["settings"][name] != settings[name]:
                say(f"{name} is {settings[name]} but was {found.state['settings'][name]} in the checkpoint")
                return 2
        training = model.Training.restore(found.state)
        say(f"resumed from step {training.step}")
    else:
        training = model.Training.start(given.seed, given.hidden, len(data.labels))
        say("starting from step 0")

    if training.step < given.steps:
        address = (told.master_addr or "127.0.0.1", told.master_port or 0)
        token = f"{told.workload}.{told.attempt}.{told.job}"
        limits = {"deadline_s": given.join_s, "silence_s": given.silence_s}
        try:
            with join(told.rank, told.world_size, address, token, stop=mizzen.preempted, **limits) as gang:
                starts = gang.sum(np.eye(told.world_size)[told.rank] * training.step)
                if len(set(starts.tolist())) > 1:
                    raise GangError(f"the ranks loaded different steps: {starts.tolist()}")
                finished = run(training, settings, data, gang, saver)
        except GangError as error:
            say(f"the gang is broken at step {training.step}: {error}")
            finished = False
            if not mizzen.preempted():
                return 1
        if not finished:
            mizzen.exit_preempted()

    if told.rank == 0:
        final = {
            "weights_sha256": model.digest(training.weights),
            "step": training.step,
            "accuracy": model.accuracy(training.weights, data.test_images, data.test_labels),
        }
        if not found or found.state.get("final") != final:
            saver.save(training.step, training.state() | {"settings": settings, "final": final})
        say(f"final weights sha256={final['weights_sha256']} step={final['step']} accuracy={final['accuracy']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
