"""Detects positions and variables of a script that no checkpoint contains, to warn before its first save."""

import gc
import warnings
from collections.abc import Callable, Collection, Iterator, MutableMapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mizzen.checkpoint import loops, repeats, rng
from mizzen.checkpoint.attribute_holders import has_state, is_plain_object
from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.forgotten import PLAIN
from mizzen.checkpoint.restored_names import Values
from mizzen.checkpoint.tensors import loaded
from mizzen.logger import logger

_UNMOVED = (
    "It has a ResumableSampler whose advance() is not called: call it after each batch, or iterate the ResumableLoader "
    "itself instead of what a framework, such as accelerate, has made of it"
)
_COUNTING = ("torch.optim.lr_scheduler", "torch.optim.swa_utils", "torch.amp.grad_scaler")
_MOST = 20_000
"""Objects among which a random generator is searched. With more, it counts as found."""
_IN_ORDER = ("SequentialSampler", "DistributedSampler", "_InfiniteConstantSampler", "ResumableSampler")
"""Samplers whose iterations begin at the beginning. Others may begin at the position of the training."""


def warn_of_lost_position(
    tracked: Collection[Any], restored: loops.Stack, optimizers: Callable[[], str | None] | None, stacklevel: int
) -> None:
    """Issue a `CheckpointWarning` if a restart of the script would not continue exactly.

    See `repeats` for loops and their variables. Or the training is within an iteration of torch's loader that cannot be
    resumed: it draws its order from the global generator, or a resumed iteration draws the seed of its workers from it,
    while the training draws, too. Or it has a `ResumableSampler` whose `advance` is not called.

    Args:
        tracked: the tracked objects.
        restored: the functions that were running when the script called `restore`.
        optimizers: returns what optimizers train or keep that is not tracked (`OptimizerWatch.told`).
        stacklevel: as in `warnings.warn`.
    """
    found = list[str]()
    for tell in (lambda: _held(tracked), optimizers, lambda: repeats.told(restored, _values(tracked))):
        try:
            found += filter(None, [tell and tell()])
        except Exception:  # Of the script's objects, for example: a warning must not end the training.
            logger(__name__).debug("the script could not be analyzed", exc_info=True)
    message = _lost_iteration(tracked, restored)
    if message is not None:
        gc.collect()  # An iterator in a cycle that nobody holds any more, such as one of an earlier training.
        message = _lost_iteration(tracked, restored)
    if found:
        message = f"a restart of this script would not continue exactly. {'. '.join(found)}"
    if message is not None:
        warnings.warn(message, CheckpointWarning, stacklevel=stacklevel + 1)


def _held(tracked: Collection[Any]) -> str | None:
    """Return which object with a state of its own is only an attribute of a tracked object of the script."""
    torch, kept = loaded("torch"), {id(one) for one in tracked}
    for owner in filter(is_plain_object, tracked):
        for name, value in vars(owner).items():
            is_module = torch is not None and isinstance(value, torch.nn.Module)  # Its tensors are attributes, too.
            if has_state(value) and not is_module and id(value) not in kept and not isinstance(value, type):
                kind = type(owner).__name__
                return (
                    f"The state of the attribute {name} of a tracked {kind} is not in the checkpoint. Track it, too: "
                    f"checkpointer.track({name}=...)"
                )
    return None


def _values(tracked: Collection[Any]) -> Values:
    data, nn = loaded("torch.utils.data.dataloader"), loaded("torch")
    kept = {id(one) for one in tracked}
    # Their attributes are saved.
    datasets = {id(one.dataset) for one in tracked if data is not None and isinstance(one, data.DataLoader)}
    inside = {id(part) for one in tracked if isinstance(one, dict) for part in one.values()}

    def is_kept(value: Any) -> bool:
        # Also an object whose attributes are tracked, as by `track(stopper=vars(stopper))`, and the Checkpointer.
        return any(
            id(one) in kept | datasets
            for one in (value, getattr(value, "__dict__", value), getattr(value, "progress", value))
        )

    def is_position(value: Any) -> bool:
        if id(value) not in kept or (nn is not None and isinstance(value, nn.nn.Module | nn.optim.Optimizer)):
            return False
        if is_plain_object(value):
            return False  # See `RestoredNames.is_known`.
        return isinstance(value, MutableMapping) or not (hasattr(value, "optimizer") or rng.generator(value))

    def is_loader(value: Any) -> bool:
        loader = getattr(value, "base_dataloader", value)  # accelerate has wrapped it.
        if data is None or not isinstance(loader, data.DataLoader):
            return False
        return bool({id(value), *_parts(loader)} & kept) or bool(_order(loader._index_sampler, "is_saved"))

    def is_plain(value: Any) -> bool:
        loader = getattr(value, "base_dataloader", value)
        if data is None or not isinstance(loader, data.DataLoader | data._BaseDataLoaderIter) or is_loader(value):
            return False
        return type(_sampler(loader)).__name__ in (*_IN_ORDER, "RandomSampler")

    def generator(value: Any) -> Any:
        sampler = _sampler(value) if data is not None and isinstance(value, data.DataLoader) else None
        drawn = value if sampler is None else getattr(sampler, "generator", None)
        if drawn is None or not (rng.generator(drawn) or _is_counting(drawn)):
            return None
        if is_loader(value) or _reaches(tracked, drawn):
            return None
        return drawn

    def is_inside(value: Any) -> bool:
        return id(value) in inside and hasattr(value, "__setitem__")

    def is_reached(value: Any) -> bool:
        return _reaches(tracked, value)

    return Values(is_position, is_loader, is_plain, is_kept, is_inside, is_reached, generator, _saved(tracked))


def _is_counting(value: Any) -> bool:
    """Return whether a value is a schedule, an average or a scaler of torch, with a state that is needed."""
    kind = type(value)
    return kind.__module__.startswith(_COUNTING) and kind.__name__ != "ExponentialLR" and bool(value.state_dict())


def _saved(tracked: Collection[Any]) -> set[str]:
    """Return the names that the functions of the script that return tracked states use."""
    found, left = set[str](), [getattr(one, "__code__", None) for one in _functions(tracked)]
    while left:
        if isinstance(code := left.pop(), CodeType):
            found.update(code.co_names, code.co_freevars)
            left += code.co_consts
    return found


def _functions(tracked: Collection[Any]) -> Iterator[Any]:
    for one in tracked:
        own = None if type(one).__module__.startswith("torch.") else getattr(type(one), "state_dict", None)
        yield from (getattr(part, "__func__", part) for part in (one if isinstance(one, tuple) else [own]))


def _reaches(tracked: Collection[Any], value: Any) -> bool:
    """Return whether a tracked object refers to `value`, so that its state may contain that of `value`."""
    torch, left, seen = loaded("torch"), list(tracked), set[int]()
    closed = (type, ModuleType) if torch is None else (type, ModuleType, torch.nn.Module, torch.optim.Optimizer)
    while left:
        one = left.pop()
        if one is value or len(seen) > _MOST:
            return True
        if id(one) not in seen and not isinstance(one, closed):
            seen.add(id(one))
            # Not the global variables of functions, which lead everywhere: see `_saved`.
            left += (one.__closure__ or ()) if isinstance(one, FunctionType) else gc.get_referents(one)
    return False


def _parts(loader: Any) -> set[int]:
    return {id(loader), id(loader.dataset), id(loader.sampler), id(loader.batch_sampler)}


def _order(indices: Any, attribute: str) -> Any:
    """Return an attribute of the position of a `ResumableLoader`; None if it is another loader."""
    return getattr(getattr(indices, "order", None), attribute, None)


def _sampler(iterator: Any) -> Any:
    return getattr(iterator._index_sampler, "sampler", iterator._index_sampler)


def _lost_iteration(tracked: Collection[Any], restored: loops.Stack) -> str | None:
    """Return a message if the training is within an iteration of a loader that a restart does not resume."""
    data, samplers = loaded("torch.utils.data.dataloader"), loaded("torch.utils.data.sampler")
    if data is None or samplers is None:
        return None
    followed, has_dropout = {id(one) for one in tracked}, any(_drops(one) for one in tracked)
    for found in gc.get_objects():
        # Not isinstance: the `__class__` of some lazy objects imports a library.
        if not issubclass(type(found), data._BaseDataLoaderIter) or _is_complete(found):
            continue
        sampler = _sampler(found)
        drawing = (samplers.RandomSampler, samplers.WeightedRandomSampler, samplers.SubsetRandomSampler)
        draws = isinstance(sampler, drawing) and sampler.generator is None
        unmoved = getattr(sampler, "is_unmoved", False)
        is_followed = followed & {id(found._dataset), id(sampler), id(found._index_sampler)}
        # The dataset of a stream is its position.
        orders = _order(found._index_sampler, "is_saved"), getattr(found._dataset, "is_saved", None)
        if not is_followed and orders == (None, None):
            draws |= has_dropout
        if (draws or unmoved) and not repeats.is_look(found, restored):
            advice = _UNMOVED if unmoved else f"Track it: {PLAIN}"
            return (
                "this step is within an iteration of a DataLoader whose position is not tracked: after a kill, the "
                f"epoch would begin again, or draw other random numbers. {advice}"
            )
    return None


def _drops(value: Any) -> bool:
    """Return whether a torch module draws random numbers in each step."""
    torch = loaded("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return False
    return any("Dropout" in type(one).__name__ and getattr(one, "p", 0) for one in value.modules())


def _is_complete(iterator: Any) -> bool:
    """Return whether an iterator of a loader has yielded no batch yet, or all batches."""
    try:
        return not 0 < int(iterator._num_yielded) < len(iterator._index_sampler)
    except TypeError:  # A stream has no length.
        return not iterator._num_yielded
