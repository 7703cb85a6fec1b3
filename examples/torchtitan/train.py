"""torchtitan's trainer with checkpoints in a root of mizzen: see README.md beside this file."""

import os
import sys
from typing import Any

import torch
from torch.distributed import checkpoint
from torchtitan import train
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager

from mizzen import notices, report
from mizzen.checkpoint import MissingCheckpointError
from mizzen.integrations import dcp, ddp


class RootCheckpoints(CheckpointManager):
    """Saves and loads torchtitan's checkpoints in the root, and saves a last time after a notice."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """See `CheckpointManager`; the root is `MIZZEN_CHECKPOINT_URI`."""
        super().__init__(*arguments, **options)
        if not self.enable:
            return
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            raise ValueError("checkpoint.async_mode=async_with_pinned_mem: must be disabled or async")
        self._uri = os.environ["MIZZEN_CHECKPOINT_URI"]
        self._root = dcp.RootWriter(self._uri, keep=self.keep_latest_k or 2)
        self._agree = ddp.agreement()
        self._leaves = False
        # The last checkpoint, too, is one from which a training can go on.
        self.keep_latest_k, self.last_save_model_only = 0, self.last_save_in_hf
        notices.watch()

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save if the interval or a notice asks for it; exit with 143 after a notice."""
        report.progress(curr_step)
        self._leaves = self.enable and bool(self._agree(int(notices.preempted())))
        super().save(curr_step, last_step)
        if self._leaves:
            self._async_wait()
            sys.exit(143)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return super()._should_save(curr_step, last_step) or (self._leaves and not self.load_only)

    def _save_last_step(self, curr_step: int) -> None:
        self.dcp_save(self._flattened_model_states_sd(), self._create_checkpoint_id(curr_step), AsyncMode.DISABLED)
        if self.last_save_in_hf:
            super()._save_last_step(curr_step)

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *rest: Any, **how: Any
    ) -> Any:
        """Save to the root; exports for Hugging Face go to torchtitan's folder."""
        if how.get("to_hf"):
            return super().dcp_save(state_dict, checkpoint_id, async_mode, *rest, **how)
        root = self._root.at(int(checkpoint_id.rpartition("-")[2]))
        if async_mode == AsyncMode.ASYNC:
            return checkpoint.async_save(state_dict, storage_writer=root, process_group=self.pg)
        return checkpoint.save(state_dict, storage_writer=root)

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load a step from the root; if the root has none, what torchtitan's options name."""
        try:
            found = dcp.RootReader(self._uri, None if step == -1 else step) if self.enable else None
        except MissingCheckpointError:
            found = None
        if found is None:
            return super().load(step)
        states = self._states_to_load(model_only=False)
        checkpoint.load(states, storage_reader=found)
        self.states[MODEL].load_state_dict(states)
        return True


train.CheckpointManager = RootCheckpoints

if __name__ == "__main__":
    train.main(train.Trainer)
