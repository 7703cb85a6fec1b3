"""Helpers for tests of torch's tensors: their encoded files, and their bits."""

from typing import Any

import torch

from mizzen.checkpoint.parts import encode


def content(value: Any) -> bytearray:
    """Returns the encoded file of a value that contains tensors."""
    kind, chunks = encode("p", value)
    assert kind == "tensors"
    return bytearray(b"".join(chunks))


def loadable(name: str, value: Any) -> tuple[str, bytearray]:
    """Returns the kind and the encoded file of a part."""
    kind, chunks = encode(name, value)
    return kind, bytearray(b"".join(chunks))


def bits(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of the elements in C order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
