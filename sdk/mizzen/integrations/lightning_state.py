"""What checkpoints of Lightning lack: the metrics that were logged, and attributes that callbacks have tuned."""

from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
    from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
except ImportError:
    from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
    from pytorch_lightning.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr


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
