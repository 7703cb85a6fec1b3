"""Reads how a loader of torch was created."""

from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler


def shuffles(sampler: Any, dataset: Sized) -> bool | None:
    """Return whether one of torch's own samplers shuffles all of a dataset, or takes it in order; None for others."""
    if type(sampler) is SequentialSampler and len(sampler) == len(dataset):
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return True
    return None


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options that create a loader like `loader`."""
    names = ["dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"]
    names += ["prefetch_factor", "persistent_workers", "pin_memory_device", "in_order", "multiprocessing_context"]
    found = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if loader.batch_sampler is not None and loader.batch_size is None:
        return found | {"batch_size": 1, "batch_sampler": loader.batch_sampler}
    return found | {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
