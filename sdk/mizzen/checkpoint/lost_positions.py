"""Detects a position in the data that no checkpoint contains, to warn a script before its first save."""

import gc
import warnings
from collections.abc import Collection
from typing import Any

from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.tensors import loaded

_UNTRACKED = (
    "Track it: loader = ResumableLoader(loader) of mizzen.integrations.torch, and checkpointer.track(loader=loader)"
)
_UNMOVED = (
    "It has a ResumableSampler whose advance() is not called: call it after each batch, or iterate the ResumableLoader "
    "itself instead of what a framework, such as accelerate, has made of it"
)


def warn_of_lost_position(tracked: Collection[Any], stacklevel: int) -> None:
    """Issue a `CheckpointWarning` if the training is within an iteration of torch's loader that cannot be resumed.

    `tracked` are the tracked objects. The loader draws its order from the global generator: a resumed epoch would have
    another order. Or it has a `ResumableSampler` whose `advance` is not called, for example because a framework has
    replaced the loader. Or the loop around the caller takes all of its batches, so that a resumed epoch begins again.
    """
    data, samplers = loaded("torch.utils.data.dataloader"), loaded("torch.utils.data.sampler")
    if data is None or samplers is None:
        return
    for found in gc.get_objects():
        # Not isinstance: the `__class__` of some lazy objects imports a library.
        if not issubclass(type(found), data._BaseDataLoaderIter) or _is_complete(found):
            continue
        sampler = getattr(found._index_sampler, "sampler", found._index_sampler)
        drawing = (samplers.RandomSampler, samplers.WeightedRandomSampler, samplers.SubsetRandomSampler)
        draws = isinstance(sampler, drawing) and sampler.generator is None
        unmoved = getattr(sampler, "is_unmoved", False)
        if draws or unmoved or _begins_again(found, sampler, tracked, data.DataLoader):
            message = (
                "this step is within an iteration of a DataLoader whose position is not tracked: after a kill, the "
                f"epoch would begin again. {_UNMOVED if unmoved else _UNTRACKED}"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=stacklevel + 1)
            return


def _is_complete(iterator: Any) -> bool:
    """Return whether an iterator of a loader has yielded no batch yet, or all batches."""
    try:
        return not 0 < int(iterator._num_yielded) < len(iterator._index_sampler)
    except TypeError:  # A stream has no length.
        return not iterator._num_yielded


def _begins_again(iterator: Any, sampler: Any, tracked: Collection[Any], kind: Any) -> bool:
    dataset = iterator._dataset
    followed = {id(one) for one in tracked}
    # A `ResumableLoader` knows whether its state is read, for example within a tracked object.
    order = getattr(iterator._index_sampler, "order", dataset)
    if followed & {id(dataset), id(sampler), id(iterator._index_sampler)} or getattr(order, "is_saved", False):
        return False
    # Other samplers and parts of a dataset may begin at the position of the training.
    whole = ("SequentialSampler", "DistributedSampler", "_InfiniteConstantSampler", "ResumableSampler")
    if type(sampler).__name__ not in whole or hasattr(dataset, "indices"):
        return False

    def is_loader(value: Any) -> bool:
        inner = getattr(value, "base_dataloader", value)  # accelerate has wrapped it.
        return isinstance(inner, kind) and inner.dataset is dataset and not followed & {id(value), id(inner)}

    from mizzen.checkpoint.loops import begins_again

    try:
        return begins_again(is_loader)
    except Exception:  # Attributes of the script's objects may raise anything: a warning must not end the training.
        return False
