"""Finds a position in the data that no checkpoint contains, so that a script is told before its first save."""

import gc
import warnings

from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.tensors import loaded

_UNTRACKED = (
    "Track it: loader = ResumableLoader(loader) of mizzen.integrations.torch, and checkpointer.track(loader=loader)"
)
_UNMOVED = (
    "It has a ResumableSampler whose advance() is not called: call it after each batch, or iterate the ResumableLoader "
    "itself instead of what a framework, such as accelerate, has made of it"
)


def warn_of_lost_position(stacklevel: int) -> None:
    """Issue a `CheckpointWarning` if the training is within an iteration of torch's loader that cannot be repeated.

    That is a loader that draws its order from the global generator: a resumed epoch would have another order. Or it
    uses a `ResumableSampler` whose `advance` is not called, for example because a framework has replaced the loader.
    """
    data, samplers = loaded("torch.utils.data.dataloader"), loaded("torch.utils.data.sampler")
    if data is None or samplers is None:
        return
    for found in gc.get_objects():
        # Not isinstance: the `__class__` of some lazy objects imports a library.
        if not issubclass(type(found), data._BaseDataLoaderIter):
            continue
        sampler = getattr(found._index_sampler, "sampler", found._index_sampler)
        drawing = (samplers.RandomSampler, samplers.WeightedRandomSampler, samplers.SubsetRandomSampler)
        draws = isinstance(sampler, drawing) and sampler.generator is None
        unmoved = getattr(sampler, "is_unmoved", False)
        if (draws or unmoved) and 0 < found._num_yielded < len(found._index_sampler):
            message = (
                "this step is within an iteration of a DataLoader whose position is not tracked: after a kill, the "
                f"epoch would begin again. {_UNMOVED if unmoved else _UNTRACKED}"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=stacklevel + 1)
            return
