"""Finds a position in the data that no checkpoint contains, so that a script is told before its first save."""

import gc
import warnings

from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.tensors import loaded


def warn_of_lost_position(stacklevel: int) -> None:
    """Issue a `CheckpointWarning` if the training is within an iteration of torch's loader that cannot be repeated.

    That is a loader that shuffles by the global generator: a resumed epoch would have another order.
    """
    data = loaded("torch.utils.data.dataloader")
    if data is None:
        return
    for found in gc.get_objects():
        # Not isinstance: the `__class__` of some lazy objects imports a library.
        if not issubclass(type(found), data._BaseDataLoaderIter):
            continue
        sampler = getattr(found._index_sampler, "sampler", found._index_sampler)
        shuffles = isinstance(sampler, data.RandomSampler) and sampler.generator is None
        if shuffles and 0 < found._num_yielded < len(found._index_sampler):
            message = (
                "this step is within an iteration of a DataLoader whose position is not tracked: after a kill, the "
                "epoch would begin again in another order. Track it: loader = ResumableLoader(loader) of "
                "mizzen.integrations.torch, and checkpointer.track(loader=loader)"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=stacklevel + 1)
            return
