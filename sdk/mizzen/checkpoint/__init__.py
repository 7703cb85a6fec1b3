"""Checkpoints that survive being killed at any instant. Standard library only; numpy where the state has arrays.

A folder of checkpoints:

    <root>/
      fence                                  {"attempt": 2, ...}: the attempt that may write here
      step-0000000123.a0002.n0007/           one committed checkpoint: step, attempt, number of the save
        part-model.safetensors               a part with arrays
        part-rng.json                        a part of JSON values
        part-tokens.bin                      a part of bytes
        manifest.json
      .lock                                  taken for each claim and commit
      .draft-a0002-5f0c11e2/                 being written: no reader looks at it
      .trash-9b2e77d0/                       being removed

`manifest.json` holds `format`, `step`, `attempt`, `save`, `created_at_s` (epoch seconds), `bytes` (of all parts), for
each part its `name`, `file`, `kind`, `bytes` and `sha256`, and as `manifest_sha256` the checksum of all that: of the
same object without this key, as JSON with sorted keys and no spaces (separators `,` and `:`). A checkpoint is valid if
its manifest is whole and every part has its size and checksum. The newest is the one with the greatest (attempt, save),
whatever its step.

On a file system a draft is renamed into place when all of it is on the disk. A checkpoint may also be copied object by
object into another root: its files under the same names, the manifest last (`Manifest.files` is that order), and
nothing else of the folder. Until its manifest is there, it is not a checkpoint.

Fencing: an attempt claims the folder before it loads. From then on no older attempt can commit; its `save` raises
`StaleAttemptError` and leaves nothing that a reader would see. The file system must support `flock` between the
machines that share the folder.
"""

from mizzen.checkpoint.checkpointer import Checkpointer
from mizzen.checkpoint.errors import (
    CheckpointError,
    CheckpointWarning,
    CorruptCheckpointError,
    StaleAttemptError,
    StateError,
)
from mizzen.checkpoint.manifest import CheckpointId, Manifest, Part
from mizzen.checkpoint.reading import Checkpoint, Skipped, list_committed
from mizzen.notices import exit_preempted

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointId",
    "CheckpointWarning",
    "Checkpointer",
    "CorruptCheckpointError",
    "Manifest",
    "Part",
    "Skipped",
    "StaleAttemptError",
    "StateError",
    "exit_preempted",
    "list_committed",
]
