"""Writes a checkpoint as a folder of torch's distributed checkpoints, which `torch.distributed.checkpoint` loads."""

import tempfile
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from mizzen.checkpoint.errors import CheckpointError, CorruptCheckpointError
from mizzen.checkpoint.manifest import Manifest
from mizzen.checkpoint.root_view import Checkpoints
from mizzen.integrations.dcp import PLAN, RootReader


def export(found: Checkpoints, manifest: Manifest, folder: Path, rank: int | None = None) -> list[Path]:
    """Write a checkpoint into `folder`, which is empty, and return its files. The whole state is held in memory.

    A checkpoint of `RootWriter` keeps its names, with whole tensors. In another one, each part is an entry of the
    state: `model.0.weight` is the tensor `0.weight` of the part `model`.

    Args:
        found: the root.
        manifest: the checkpoint.
        folder: the target folder. If an error is raised, it stays empty.
        rank: the rank whose parts are written, 0 by default; not used for a checkpoint of `RootWriter`.

    Raises:
        CheckpointError: a part is damaged or cannot be read.
        OSError: a file cannot be written.
    """
    state: dict[str, Any] = {}
    if any(part.name == PLAN for part in manifest.parts):
        planner: Any = _EmptyStateDictLoadPlanner()
        reader = RootReader(found.root, manifest.step, no_dist=True)
        try:
            _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # torch wraps the error of the reader, or quotes it.
            causes = [one for one, _ in error.failures.values() if isinstance(one, CheckpointError)]
            raise (causes or [CorruptCheckpointError(str(*error.failures.values()))])[0] from error
    else:
        state = found.load(manifest, rank=rank or 0).state
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.unfinished.", dir=folder.parent) as parent:
        written = Path(parent) / folder.name
        save(state, storage_writer=FileSystemWriter(written), no_dist=True)
        written.replace(folder)
    return sorted(folder.iterdir())
