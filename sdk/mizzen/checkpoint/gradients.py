"""What a `state_dict` says nothing about: gradients, and which parameters are trained.

Warns if a training accumulates gradients over a checkpoint, because a checkpoint has no gradients.
"""

import warnings
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any
from weakref import ref

from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.tensors import loaded

_MOST = 32
"""Number of parameters of a module that are looked at closely: a step changes all of them."""
_KEY = "mizzen.requires_grad"
"""In the metadata of a module's state: the parameters that were frozen or unfrozen, by name."""


class TrainingWatch:
    """Detects whether a training has changed its torch modules."""

    def __init__(self) -> None:
        self._start: Any = None

    def begin(self, objects: Iterable[Any]) -> None:
        """Begin to watch the torch modules among `objects`, which were restored or created."""
        self._start = _mark(objects)

    def has_trained(self, objects: Iterable[Any]) -> bool | None:
        """Return whether the parameters or gradients have changed since `begin`; None if there are no parameters."""
        mark = _mark(objects)
        return None if mark is None else mark != self._start

    def mark(self, objects: Iterable[Any], has_stepped: bool) -> Any:
        """Return a value that differs after each step of the training, to compare two moments.

        None if there are no parameters, or if the training has stepped without a change of them: it trains other
        objects.
        """
        mark = _mark(objects)
        return None if has_stepped and mark == self._start else mark


def _mark(objects: Iterable[Any]) -> Any:
    """Return what a step changes in the torch modules among `objects`; None if all parameters are frozen.

    These are the numbers of changes in place of parameters and gradients, and, for changes that torch does not count,
    one element of the first `_MOST` parameters of each module.
    """
    torch = loaded("torch")
    modules = [one for one in objects if torch is not None and isinstance(one, torch.nn.Module)]
    lazy = torch.nn.parameter.is_lazy if torch is not None else bool  # No value before the first forward pass.
    found = [[one for one in module.parameters() if one.requires_grad and not lazy(one)] for module in modules]
    every = [tensor for tensors in found for tensor in tensors]
    if not every:
        return None
    gradients = [tensor.grad for tensor in every if tensor.grad is not None]
    samples = [tensor for tensors in found for tensor in tensors[:_MOST] if tensor.numel() and not tensor.is_meta]
    values = tuple(tensor.detach()[(0,) * tensor.dim()].item() for tensor in samples)
    return _version(every), len(gradients), _version(gradients), values


def _version(tensors: Iterable[Any]) -> int:
    """Return a number that grows when a tensor is changed in place."""
    return sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)


class GradientWatch:
    """Watches one gradient that exists at a capture: if the next backward pass adds to it, warns once.

    There is no warning for a leftover gradient that the script clears before the next backward pass.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._was_there = self._told = False

    def captured(self, step: int, objects: Mapping[str, Any]) -> None:
        """Look for a gradient in the torch modules among `objects`, whose state at `step` was just captured."""
        torch = loaded("torch")
        if torch is None or self._told:
            return
        self._forget()
        for name, module in objects.items():
            for tensor in islice(module.parameters(), _MOST) if isinstance(module, torch.nn.Module) else ():
                if tensor.grad is not None and tensor.requires_grad and tensor.grad.any():
                    # `torch.autograd.grad` calls only the first hook: it adds nothing to `grad`.
                    self._hooks = [
                        tensor.register_hook(lambda _, tensor=tensor: self._begin(tensor)),
                        tensor.register_post_accumulate_grad_hook(lambda _, name=name: self._added(name, step)),
                    ]
                    return

    def _begin(self, tensor: Any) -> None:
        self._was_there = tensor.grad is not None and bool(tensor.grad.any())

    def _added(self, name: str, step: int) -> None:
        self._forget()
        if self._was_there:
            self._told = True
            message = (
                f"part {name!r}: the training adds to gradients that were there at step {step}, but a checkpoint has "
                "no gradients: a training that resumes there differs. Call step() only after the gradients are cleared "
                "(zero_grad)"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=2)

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class FrozenParameters:
    """Saves and restores which parameters a training has frozen or unfrozen, as by `if epoch == 2: unfreeze(model)`.

    Only changes since the restore are saved, in the metadata of the module's state, so a script may freeze other
    parameters before its next start.
    """

    def __init__(self) -> None:
        self._began: dict[str, tuple[list[str], list[Any], list[bool]]] = {}

    def begin(self, objects: Mapping[str, Any]) -> None:
        """Remember the parameters of the torch modules among `objects`, as the script has frozen them."""
        torch = loaded("torch")
        self._began = {}
        for part, module in objects.items():
            if torch is not None and isinstance(module, torch.nn.Module):
                found = dict(module.named_parameters())
                began = [one.requires_grad for one in found.values()]
                self._began[part] = list(found), [ref(one) for one in found.values()], began

    def add(self, state: Mapping[str, Any]) -> None:
        """Add what has changed since `begin` to the parts of a state."""
        for part in self._began:
            if (changed := self.changed(part)) and (metadata := getattr(state[part], "_metadata", None)) is not None:
                metadata[""] = {**metadata.get("", {}), _KEY: changed}

    def restore(self, part: str, value: Any) -> None:
        """Freeze and unfreeze the parameters of a part's module as they were when `value` was saved."""
        self.change(part, getattr(value, "_metadata", {}).get("", {}).get(_KEY, {}))

    def changed(self, part: str) -> dict[str, bool]:
        """Return `requires_grad` of each parameter of a part for which it has changed since `begin`, by name."""
        names, refs, before = self._began[part]
        now = [before[at] if (one := found()) is None else one.requires_grad for at, found in enumerate(refs)]
        if now == before:
            return {}
        return {name: new for name, new, old in zip(names, now, before, strict=True) if new != old}

    def change(self, part: str, changed: Mapping[str, bool]) -> None:
        """Freeze and unfreeze the parameters of a part that are in `changed`."""
        names, refs, _ = self._began.get(part, ([], [], []))
        for name, found in zip(names, refs, strict=True):
            if name in changed and (parameter := found()) is not None:
                parameter.requires_grad_(changed[name])
