"""Checkpoints that survive being killed at any instant, on files, S3 and Google Cloud Storage.

A root has the same form on every store, and needs nothing of it but that an object can be created if it is not there:

    <root>/
      log/0000000007.json                    a record: the claim of an attempt, or the manifest of a checkpoint
      parts/a0002/step-0000000123.r0000.5f0c11e2/
        part-model.safetensors               tensors and arrays
        part-progress.json                   JSON values
        part-tokens.bin                      bytes
      shards/a0002/step-0000000123.s000004/
        r0001.json                           what rank 1 has written, until rank 0 commits it
      .staging/                              files that are being written; on files only

A checkpoint is committed when its manifest is a record of the log (`mizzen.checkpoint.log`). The manifest has its step,
attempt and number of the save, and each part's key, size and checksum; parts that have not changed are those of an
earlier checkpoint. It is valid if its record is whole and all parts of all ranks have their size and checksum. The
newest is the one with the greatest (attempt, save), whatever its step.

Fencing: an attempt that was given a number claims the root before it loads, another one at its first save. From then on
no older attempt can commit; its `save` raises `StaleAttemptError`. Reading claims nothing.
"""

from mizzen.checkpoint.checkpointer import Checkpointer
from mizzen.checkpoint.errors import (
    CheckpointError,
    CheckpointWarning,
    CorruptCheckpointError,
    MissingCheckpointError,
    StaleAttemptError,
    StateError,
)
from mizzen.checkpoint.looking import Checkpoints, Problem, open_checkpoints
from mizzen.checkpoint.manifest import CheckpointId, Manifest, Part
from mizzen.checkpoint.parts import Pickled
from mizzen.checkpoint.reading import Checkpoint, Skipped, list_committed
from mizzen.checkpoint.resuming import ResumeError, verify_resume
from mizzen.checkpoint.tracking import Tracked
from mizzen.notices import exit_preempted

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointId",
    "CheckpointWarning",
    "Checkpointer",
    "Checkpoints",
    "CorruptCheckpointError",
    "Manifest",
    "MissingCheckpointError",
    "Part",
    "Pickled",
    "Problem",
    "ResumeError",
    "Skipped",
    "StaleAttemptError",
    "StateError",
    "Tracked",
    "exit_preempted",
    "list_committed",
    "open_checkpoints",
    "verify_resume",
]
