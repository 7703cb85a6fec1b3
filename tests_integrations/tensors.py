"""What tests of torch's tensors share: their files, and their bits."""

from typing import Any

import torch

from mizzen.checkpoint.parts import encode


def content(value: Any) -> bytearray:
    """The file of a value that has tensors."""
    kind, chunks = encode("p", value)
    assert kind == "tensors"
    return bytearray(b"".join(chunks))


def loadable(name: str, value: Any) -> tuple[str, bytearray]:
    """A part's kind and file."""
    kind, chunks = encode(name, value)
    return kind, bytearray(b"".join(chunks))


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
