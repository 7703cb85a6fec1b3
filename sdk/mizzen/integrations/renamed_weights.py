"""Loads weights that transformers stores under other names than those of the model's `state_dict`.

transformers 5 writes some models, such as ViT and Mixtral, under the names of their published files. Its `Trainer`
loads a checkpoint by the names in the model, so it passes over these weights without an error.
"""

import json
from functools import reduce
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mizzen.checkpoint import rng


def load_renamed_weights(model: object, folder: Path) -> None:
    """Load the weights of a model that the Trainer has not loaded from a checkpoint in `folder`."""
    if not isinstance(model, PreTrainedModel):
        return
    stored = set[str]()
    for path in folder.glob("model*.safetensors"):
        with path.open("rb") as file:  # A number of bytes, and then so much JSON.
            stored |= json.loads(file.read(int.from_bytes(file.read(8), "little"))).keys() - {"__metadata__"}
    tensors = model.state_dict()
    if stored <= tensors.keys():
        return
    # The widest type, because none of the weights may be rounded.
    widest = reduce(torch.promote_types, (one.dtype for one in tensors.values() if one.is_floating_point()))
    generators = rng.capture_shared()
    loaded = type(model).from_pretrained(folder, dtype=widest).state_dict()
    rng.restore_shared(generators)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(loaded[name])
