"""What checkpoints of transformers' Trainer lack: attributes, optimizers that it does not know, and the logged loss."""

from typing import Any

from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from mizzen.checkpoint.attribute_holders import watched
from mizzen.checkpoint.own_names import is_of_script
from mizzen.integrations.files import by_kind
from mizzen.integrations.held_states import held_objects
from mizzen.integrations.trainer_position import trainer_of

_CALLED = ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics")
"""What a Trainer calls: functions, or objects of the script, whose attributes are saved."""


def with_attributes(state: TrainerState, given: dict[str, Any]) -> dict[str, Any]:
    """Return the objects whose plain attributes are saved: also the script's own callbacks and its own Trainer.

    Also callbacks of which the Trainer saves a state, because by default it does not load that state.
    """
    optimizer = getattr(given.get("optimizer"), "optimizer", given.get("optimizer"))
    objects = watched({"model": given.get("model"), "optimizer": optimizer, "loader": given.get("train_dataloader")})
    if (trainer := trainer_of(state)) is None:
        return objects
    callbacks = trainer.callback_handler.callbacks
    objects |= by_kind(one for one in callbacks if is_of_script(type(one)) or isinstance(one, ExportableState))
    objects |= watched({name: getattr(trainer, name, None) for name in _CALLED})
    return objects | ({"trainer": trainer} if is_of_script(type(trainer)) else {})


def held(state: TrainerState) -> dict[str, Any]:
    """Return what the script keeps beside the optimizer and schedule of the Trainer; see `held_objects`."""
    if (trainer := trainer_of(state)) is None:
        return {}
    owners = by_kind([trainer, trainer.model, *trainer.callback_handler.callbacks])
    return held_objects(owners, [trainer.optimizer, trainer.lr_scheduler])


def loss_since_log(state: TrainerState) -> dict[str, Any]:
    """Return the sum of the losses since the Trainer's last log entry, with its step; {} before transformers 5."""
    found: Any = trainer_of(state)
    if not hasattr(found, "_tr_loss"):
        return {}
    return {"sum": found._tr_loss.detach().clone(), "step": found._globalstep_last_logged}


def set_loss_since_log(state: TrainerState, saved: dict[str, Any]) -> None:
    """Set what `loss_since_log` has returned. The loss of this call of `train` remains that of its own steps."""
    found: Any = trainer_of(state)
    if saved and hasattr(found, "_tr_loss"):
        found._tr_loss += saved["sum"].to(found._tr_loss.device)
        found._total_loss_scalar -= saved["sum"].item()
        found._globalstep_last_logged = saved["step"]
