"""What the `state_dict` of an optimizer says nothing about: added groups, parameters, and optimizers inside others."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any
from weakref import ref

from mizzen.checkpoint import loops
from mizzen.checkpoint.own_names import is_of_script
from mizzen.checkpoint.restored_names import own_attributes
from mizzen.checkpoint.tensors import loaded

_KEY = "mizzen.added_groups"
"""In the state of an optimizer: for each group that was added, the part and the name of each of its parameters."""
_MANY = 100
"""Lists with as many items are not looked into."""
_PLAIN = (str, int, float, complex, type(None))


class AddedGroups:
    """Saves and restores groups that a training adds to its optimizers, as by `if epoch == 2: add_param_group(...)`.

    The script has other groups at its next start, and may then add one that was restored, in a resumed epoch.
    """

    def __init__(self) -> None:
        self._began: dict[str, int] = {}

    def begin(self, objects: Mapping[str, Any]) -> None:
        """Remember the number of groups of the torch optimizers among `objects`, as the script has made them."""
        kind = _optimizer()
        self._began = {part: len(one.param_groups) for part, one in objects.items() if kind and isinstance(one, kind)}

    def add(self, state: dict[str, Any], objects: Mapping[str, Any]) -> str | None:
        """Add the groups that were added since `begin` to the parts of a state.

        Returns:
            A part with groups that a restart cannot add, because a parameter is in no tracked module; None if it can.
        """
        strange = None
        for part, count in self._began.items():
            if groups := objects[part].param_groups[count:]:
                names = {id(one): [module, name] for module, name, one in _parameters(objects)}
                added = [[names.get(id(one)) for one in group["params"]] for group in groups]
                strange = part if None in chain.from_iterable(added) else strange
                state[part] = {**state[part], _KEY: added}
        return strange

    def restore(self, part: str, value: Any, objects: Mapping[str, Any], undo: ExitStack) -> Any:
        """Add the groups that the optimizer of a part lacks. Return its saved state, `value`, without their names."""
        if part not in self._began or not isinstance(value, Mapping) or _KEY not in value:
            return value
        optimizer, value = objects[part], dict(value)
        added, count = value.pop(_KEY), len(optimizer.param_groups)
        missing = len(value["param_groups"]) - count
        wanted = (
            [[tuple(name or ()) for name in names] for names in added[len(added) - missing :]] if missing > 0 else []
        )
        found = {(module, name): one for module, name, one in _parameters(objects)}
        if not wanted or missing > len(added) or not found.keys() >= set(chain.from_iterable(wanted)):
            return value
        undo.callback(_shorten, optimizer, count)
        for names, group in zip(wanted, value["param_groups"][count:], strict=True):
            params = [found[name] for name in names]
            # torch refuses a group with names beside one without.
            named = list(zip(group["param_names"], params, strict=True)) if "param_names" in group else params
            optimizer.add_param_group({"params": named})
        _pass_over(optimizer, [{id(found[name]) for name in names} for names in wanted])
        return value


def _pass_over(optimizer: Any, restored: list[set[int]]) -> None:
    """Make `add_param_group` ignore each group that was restored, once."""
    plain = optimizer.add_param_group

    def add_param_group(group: dict[str, Any]) -> None:
        params = group["params"]
        group["params"] = params = [params] if hasattr(params, "data_ptr") else list(params)
        given = {id(one[1] if isinstance(one, tuple) else one) for one in params}
        if given in restored:
            restored.remove(given)
        else:
            plain(group)

    optimizer.add_param_group = add_param_group


def _shorten(optimizer: Any, count: int) -> None:
    vars(optimizer).pop("add_param_group", None)
    del optimizer.param_groups[count:]


class OptimizerWatch:
    """Finds, before the first save, what optimizers train or keep that is not saved.

    These are parameters outside the tracked objects, such as the learned weights of losses, and optimizers inside
    others with a state that the outer ones do not save, or that the script has not tracked.
    """

    def __init__(self) -> None:
        """Remember the optimizers of the script: its variables, and attributes of its objects and other optimizers."""
        self._known: dict[int, tuple[Any, str]] = {}
        self._stepped = set[int]()
        self._hook = None
        kind = _optimizer()
        if kind is None:
            return
        left = list(_variables())
        for name, value in left:
            if isinstance(value, kind) and id(value) not in self._known:
                self._known[id(value)] = ref(value), name
                left += [(f"{name}.{inner}", one) for inner, one in vars(value).items() if isinstance(one, kind)]
            elif isinstance(value, list | tuple) and len(value) < _MANY:
                left += [(f"{name}[{at}]", one) for at, one in enumerate(value) if isinstance(one, kind)]
            elif isinstance(value, dict) and len(value) < _MANY:
                left += [(f"{name}[{at!r}]", one) for at, one in value.items() if isinstance(one, kind)]
            elif is_of_script(type(value)) and isinstance(getattr(value, "__dict__", None), dict):
                left += [(f"{name}.{inner}", one) for inner, one in vars(value).items() if isinstance(one, kind)]
        if self._known:
            register = loaded("torch.optim.optimizer").register_optimizer_step_post_hook
            self._hook = register(lambda one, *_: self._stepped.add(id(one)))

    def told(self, state: Any) -> str | None:
        """Return what `state`, the captured state, lacks, with the line that adds it; None if nothing is missing."""
        if self._hook is None:
            return None
        self._hook.remove()
        self._hook = None
        saved, is_clear = _tensors(state)
        if not is_clear:
            return None
        places = {_place(one) for one in saved}

        def lacks(tensor: Any) -> bool:
            if not tensor.numel() or _place(tensor) in places:
                return False
            # A function of the script may save copies.
            same = (one for one in saved if one.shape == tensor.shape and one.dtype == tensor.dtype)
            return not any(map(tensor.equal, same))

        for known, name in self._known.values():
            optimizer = known()
            if optimizer is None or id(optimizer) not in self._stepped:
                continue
            for one in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                if one.requires_grad and lacks(one.detach()):
                    return _parameter(one, name)
            if any(map(lacks, _tensors(list(optimizer.state.values()))[0])):
                outer, _, short = name.rpartition(".")
                before = f" before {outer}" if outer.removeprefix("self") else ""
                short = short if short.isidentifier() else "optimizer"
                return (
                    f"{name} ({type(optimizer).__name__}) has a state that no tracked object saves. Track it{before}: "
                    f"checkpointer.track({short}={name})"
                )
        return None


def _parameter(parameter: Any, optimizer: str) -> str:
    torch = loaded("torch")
    label, value = f"a parameter of shape {tuple(parameter.shape)}", 'weights={"weight": weight}'
    for name, one in _variables():
        short = name.rpartition(".")[2]
        if one is parameter:
            label, value = name, f'{short}={{"{short}": {name}}}'
        elif isinstance(one, torch.nn.Module) and any(parameter is inner for inner in one.parameters()):
            label, value = f"a parameter of {name}", f"{short}={name}"
        else:
            continue
        break
    return f"{optimizer} trains {label}, which is not in the checkpoint. Track it: checkpointer.track({value})"


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the running functions of the script, and the attributes of `self`, with their names."""
    for frame in loops.frames():
        for variables in (frame.f_locals, own_attributes(frame.f_locals), frame.f_globals):
            yield from list(variables.items())


def _parameters(objects: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the parameters of the torch modules among `objects`, each with its part and its name."""
    torch = loaded("torch")
    for part, module in objects.items():
        if isinstance(module, torch.nn.Module):
            for name, one in module.named_parameters():
                yield part, name, one


def _optimizer() -> Any:
    torch = loaded("torch")
    return None if torch is None else torch.optim.Optimizer


def _tensors(value: Any) -> tuple[list[Any], bool]:
    """Return the torch tensors and arrays inside a state, as tensors; and whether all other values are plain."""
    torch, numpy = loaded("torch"), loaded("numpy")
    found, left, is_clear = list[Any](), [value], True
    while left:
        one = left.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, list | tuple | set | deque):
            left += one
        elif numpy is not None and isinstance(one, numpy.generic):
            pass
        elif numpy is not None and isinstance(one, numpy.ndarray) and one.dtype.kind in "biufc":
            found.append(torch.as_tensor(one if one.flags.writeable else one.copy()))
        else:
            is_clear = is_clear and isinstance(one, _PLAIN)
    return found, is_clear


def _place(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
