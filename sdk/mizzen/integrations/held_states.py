"""Optimizers, schedules and scalers that a script keeps in attributes of its module, Trainer or callbacks.

A framework saves only those that the script has given to it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mizzen.checkpoint.own_names import is_of_script

HELD = "held"
"""Name of the part."""
_KINDS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


def held_objects(owners: Mapping[str, Any], known: Iterable[Any]) -> dict[str, Any]:
    """Return the attributes with such a state, without those `known`, of the `owners` that are of the script's classes.

    They are named by the owner's name and theirs. What `known` objects wrap counts as known, too.
    """
    every = [one for one in known if one is not None]
    every += [vars(one).get(name) for one in every for name in ("optimizer", "scheduler", "_optimizer")]
    ids = {*map(id, every)}
    return {
        f"{path}.{name}": value
        for path, owner in owners.items()
        if is_of_script(type(owner))
        for name, value in vars(owner).items()
        if isinstance(value, _KINDS) and id(value) not in ids
    }


def states_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of these objects."""
    return {path: one.state_dict() for path, one in found.items()}


def load_states(found: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Load those of the states whose objects still exist."""
    for path in found.keys() & states.keys():
        found[path].load_state_dict(states[path])
