"""What checkpoints of Lightning lack: logged metrics, tuned attributes, other attributes and optimizers, and masks."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.prune import BasePruningMethod as _PRUNING
from torch.nn.utils.prune import custom_from_mask

try:
    from lightning.pytorch import Callback, LightningDataModule, Trainer
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning
    from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
except ImportError:
    from pytorch_lightning import Callback, LightningDataModule, Trainer
    from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning
    from pytorch_lightning.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

from mizzen.checkpoint.attribute_holders import watched
from mizzen.checkpoint.own_names import is_of_script
from mizzen.integrations.files import by_kind
from mizzen.integrations.held_states import held_objects

LOADER = "loader-"


def logged(trainer: Any) -> dict[str, Any]:
    """Return the logged metrics, and the sums of those whose epoch is not complete."""
    results = trainer.fit_loop.epoch_loop._results
    sums = {
        name: {"value": one.value, "count": getattr(one, "cumulated_batch_size", None)}
        for name, one in results.items()
        if one.is_tensor and one.meta.on_epoch
    }
    return {"metrics": dict(trainer.callback_metrics), "sums": sums}


def add_sums(trainer: Any, sums: dict[str, Any]) -> None:
    """Add the metrics that were logged before the interruption. Called after the first batch, which registers them."""
    results = trainer.fit_loop.epoch_loop._results
    for name in sums.keys() & results.keys():
        one, before = results[name], sums[name]
        if one.meta.is_mean_reduction:
            one.cumulated_batch_size = before["count"] + one.cumulated_batch_size
        if one.meta.is_max_reduction or one.meta.is_min_reduction:
            one.value = one.meta.reduce_fx(before["value"], one.value)
        elif one.meta.is_mean_reduction or one.meta.is_sum_reduction:
            one.value = before["value"] + one.value
        one._computed = None


def _tuners(trainer: Any) -> list[Any]:
    """Return the callbacks that search a learning rate or a batch size when a training begins."""
    return [one for one in trainer.callbacks if isinstance(one, LearningRateFinder | BatchSizeFinder)]


def tuned(trainer: Any) -> dict[str, Any]:
    """Return the attributes that callbacks tune when a training begins, with their values."""
    names: list[str] = []
    for one in _tuners(trainer):
        name = one._batch_arg_name if isinstance(one, BatchSizeFinder) else one._attr_name
        names += [name] if name else ["lr", "learning_rate"]
    module = trainer.lightning_module
    return {name: lightning_getattr(module, name) for name in names if lightning_hasattr(module, name)}


def set_tuned(trainer: Any, values: Mapping[str, Any]) -> None:
    """Set these attributes, and do not tune them again; a callback of a `Tuner` is not changed."""
    if any(one._early_exit for one in _tuners(trainer)):
        return
    for one in _tuners(trainer):
        vars(one)["on_fit_start"] = lambda *_: None
    for name, value in values.items():
        lightning_setattr(trainer.lightning_module, name, value)


def saves_state(one: Callback | LightningDataModule) -> bool:
    """Return whether Lightning saves a state of a callback or data module."""
    kind, plain = type(one), LightningDataModule if isinstance(one, LightningDataModule) else Callback
    return any(getattr(kind, name, None) != getattr(plain, name, None) for name in ("state_dict", "on_save_checkpoint"))


def with_attributes(trainer: Trainer) -> dict[str, Any]:
    """Return the objects whose plain attributes are saved: also callbacks and a data module of the script."""
    data = trainer.datamodule
    others = by_kind(one for one in (*trainer.callbacks, data) if is_of_script(type(one)) and not saves_state(one))
    taking = {f"{LOADER}{number}": one for number, one in enumerate(loaders(trainer))}
    optimizers = {f"optimizer-{number}": one for number, one in enumerate(trainer.optimizers)}
    # The data module is the last one: its datasets are those of the loaders.
    return watched({"module": trainer.lightning_module, **optimizers, **taking}) | others


def held(trainer: Trainer) -> dict[str, Any]:
    """Return what the script keeps beside the optimizers and schedules of Lightning; see `held_objects`."""
    known = [*trainer.optimizers, *(one.scheduler for one in trainer.lr_scheduler_configs)]
    return held_objects(by_kind([trainer.lightning_module, *trainer.callbacks]), known)


def loaders(trainer: Trainer) -> list[Any]:
    """Return the training's loaders."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def pruned(trainer: Trainer) -> dict[str, Any]:
    """Return the tensors of parameters that are pruned, with their masks, by the path of their module and their name.

    `ModelPruning` applies the masks to the weights in a checkpoint, and drops them. If it has reset the weights to the
    initial ones (`is_reset`), the training goes on in the memory of these.
    """
    found = {}
    for path, one in trainer.lightning_module.named_modules():
        for name in [hook._tensor_name for hook in one._forward_pre_hooks.values() if isinstance(hook, _PRUNING)]:
            orig, mask = (getattr(one, f"{name}_{kind}").detach() for kind in ("orig", "mask"))
            is_reset = any(orig.data_ptr() == initial.data_ptr() for initial in _initial(trainer, one, name))
            found[f"{path}.{name}"] = {"orig": orig, "mask": mask, "is_reset": is_reset}
    return found


def prune_again(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Prune these parameters, with the saved masks."""
    for where, content in saved.items():
        path, _, name = where.rpartition(".")
        one = trainer.lightning_module.get_submodule(path)
        if not hasattr(one, f"{name}_mask"):
            custom_from_mask(one, name, content["mask"].to(getattr(one, name).device))
        orig, mask = getattr(one, f"{name}_orig"), getattr(one, f"{name}_mask")
        with torch.no_grad():
            orig.copy_(content["orig"])
            mask.copy_(content["mask"])
            getattr(one, name).copy_(orig * mask)
        for initial in _initial(trainer, one, name) if content["is_reset"] else ():
            initial.data = orig.data


def _initial(trainer: Trainer, module: torch.nn.Module, name: str) -> Iterator[torch.Tensor]:
    """Yield the initial values of a parameter that `ModelPruning` has kept."""
    for one in trainer.callbacks:
        layers = getattr(one, "_original_layers", None) if isinstance(one, ModelPruning) else None
        if layers and id(module) in layers:
            yield getattr(layers[id(module)]["data"], name)
