"""Warns if a training accumulates gradients over a checkpoint, because a checkpoint has no gradients."""

import warnings
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.tensors import loaded

_MOST = 32
"""Number of parameters of a module that are checked: after a backward pass, all parameters have a gradient."""


def _trained(objects: Iterable[Any]) -> list[Any]:
    """Return the first `_MOST` parameters that are not frozen, of each torch module among `objects`."""
    torch = loaded("torch")
    modules = [one for one in objects if torch is not None and isinstance(one, torch.nn.Module)]
    return [
        tensor
        for module in modules
        for tensor in islice((one for one in module.parameters() if one.requires_grad), _MOST)
    ]


class TrainingWatch:
    """Detects whether a training has changed its torch modules since it was restored or begun."""

    def __init__(self) -> None:
        self._versions = 0

    def begin(self, objects: Iterable[Any]) -> None:
        """Begin to watch the torch modules among `objects`."""
        self._versions = _version(_trained(objects))

    def has_trained(self, objects: Iterable[Any]) -> bool | None:
        """Return whether a parameter was changed in place or has a gradient; None if there are no parameters."""
        found = _trained(objects)
        if not found:
            return None
        return _version(found) != self._versions or any(tensor.grad is not None for tensor in found)


def _version(parameters: Iterable[Any]) -> int:
    """Return a number that grows when a parameter is changed in place."""
    return sum(0 if tensor.is_inference() else tensor._version for tensor in parameters)


class GradientWatch:
    """Watches one gradient that exists at a capture: if the next backward pass adds to it, warns once.

    There is no warning for a leftover gradient that the script clears before the next backward pass.
    """

    def __init__(self) -> None:
        self._hook: Any = None
        self._told = False

    def captured(self, step: int, objects: Mapping[str, Any]) -> None:
        """Look for a gradient in the torch modules among `objects`, whose state at `step` was just captured."""
        torch = loaded("torch")
        if torch is None or self._told:
            return
        self._forget()
        for name, module in objects.items():
            for tensor in islice(module.parameters(), _MOST) if isinstance(module, torch.nn.Module) else ():
                if tensor.grad is not None and tensor.requires_grad and tensor.grad.any():
                    self._hook = tensor.register_hook(
                        lambda _, tensor=tensor, name=name: self._added(tensor, name, step)
                    )
                    return

    def _added(self, tensor: Any, name: str, step: int) -> None:
        self._forget()
        if tensor.grad is not None and tensor.grad.any():
            self._told = True
            message = (
                f"part {name!r}: the training adds to gradients that were there at step {step}, but a checkpoint has "
                "no gradients: a training that resumes there differs. Call step() only after the gradients are cleared "
                "(zero_grad)"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=2)

    def _forget(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
