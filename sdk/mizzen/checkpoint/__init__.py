"""Crash-safe checkpoints of a training, in a folder, in S3 or in Google Cloud Storage.

A root is the folder or prefix that holds the checkpoints of one training. Its layout is the same on every store. Beyond
reads and writes, a store must only support an atomic "create this object if it does not exist":

    <root>/
      log/0000000007.json                    a record: an attempt's claim, or a checkpoint's manifest
      parts/a0002/step-0000000123.r0000.5f0c11e2/
        part-model.safetensors               tensors and arrays
        part-progress.json                   JSON values
        part-tokens.bin                      bytes
        manifest.json                        a copy of the record, written after the commit
      shards/a0002/step-0000000123.s000004/
        r0001.json                           the parts that rank 1 has written; removed after the commit
      .staging/                              unfinished files; only on a file system

A checkpoint is committed when its manifest is a record of the log (`mizzen.checkpoint.log`). The manifest stores the
step, the attempt, the save number, and the key, size and checksum of each part. A part that has not changed since the
previous checkpoint is not written again; the manifest names the existing object. A checkpoint is valid if its record is
intact and all parts of all ranks exist with the right size and checksum. The newest checkpoint is the one with the
greatest (attempt, save), whatever its step.

Fencing: a process that is given an attempt number claims the root before it loads. A process without one claims the
root at its first save. After a claim no older attempt can commit; its `save` raises `StaleAttemptError`. Reading needs
no claim.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mizzen.checkpoint.checkpointer import Checkpointer
    from mizzen.checkpoint.errors import (
        CheckpointError,
        CheckpointWarning,
        CorruptCheckpointError,
        MissingCheckpointError,
        StaleAttemptError,
        StateError,
    )
    from mizzen.checkpoint.first_run import Verification
    from mizzen.checkpoint.manifest import CheckpointId, Manifest, Part
    from mizzen.checkpoint.parts import Pickled
    from mizzen.checkpoint.place import CheckpointSettings
    from mizzen.checkpoint.reader import Checkpoint, Skipped
    from mizzen.checkpoint.resume_check import ResumeError, verify_resume
    from mizzen.checkpoint.root_view import Checkpoints, Problem, list_committed, open_checkpoints
    from mizzen.checkpoint.save_failures import StepStatus
    from mizzen.checkpoint.tier_cadence import Tiers
    from mizzen.checkpoint.tracked_objects import Tracked
    from mizzen.notices import exit_preempted

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointId",
    "CheckpointSettings",
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
    "StepStatus",
    "Tiers",
    "Tracked",
    "Verification",
    "exit_preempted",
    "list_committed",
    "open_checkpoints",
    "verify_resume",
]

_HOMES = {
    "Checkpoint": "mizzen.checkpoint.reader",
    "CheckpointError": "mizzen.checkpoint.errors",
    "CheckpointId": "mizzen.checkpoint.manifest",
    "CheckpointSettings": "mizzen.checkpoint.place",
    "CheckpointWarning": "mizzen.checkpoint.errors",
    "Checkpointer": "mizzen.checkpoint.checkpointer",
    "Checkpoints": "mizzen.checkpoint.root_view",
    "CorruptCheckpointError": "mizzen.checkpoint.errors",
    "Manifest": "mizzen.checkpoint.manifest",
    "MissingCheckpointError": "mizzen.checkpoint.errors",
    "Part": "mizzen.checkpoint.manifest",
    "Pickled": "mizzen.checkpoint.parts",
    "Problem": "mizzen.checkpoint.root_view",
    "ResumeError": "mizzen.checkpoint.resume_check",
    "Skipped": "mizzen.checkpoint.reader",
    "StaleAttemptError": "mizzen.checkpoint.errors",
    "StateError": "mizzen.checkpoint.errors",
    "StepStatus": "mizzen.checkpoint.save_failures",
    "Tiers": "mizzen.checkpoint.tier_cadence",
    "Tracked": "mizzen.checkpoint.tracked_objects",
    "Verification": "mizzen.checkpoint.first_run",
    "exit_preempted": "mizzen.notices",
    "list_committed": "mizzen.checkpoint.root_view",
    "open_checkpoints": "mizzen.checkpoint.root_view",
    "verify_resume": "mizzen.checkpoint.resume_check",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
