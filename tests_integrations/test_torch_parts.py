"""Tests of torch tensors in checkpoints: all types, no copies, and files that other programs can read."""

import os
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mizzen.checkpoint import Checkpointer, StateError
from mizzen.checkpoint.layout import Encoder
from mizzen.checkpoint.parts import decode, encode
from mizzen.checkpoint.snapshot import Snapshot
from mizzen.checkpoint.tensors import SMALL_BYTES
from tests_integrations.tensors import bits, content

TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Returns many bit patterns of a type, including NaN."""
    raw = torch.arange(4 * 16 * 8, dtype=torch.int32).mul(37).to(torch.uint8).view(4, 128)
    return raw > 100 if dtype is torch.bool else raw.view(dtype)


def cuts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns views of a tensor: whole, transposed, sliced, zero-dimensional and empty."""
    return [tensor, tensor.t(), tensor[1:, ::2], tensor[0, 0], tensor[:0], tensor[:, :0]]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_come_back_as_they_were(dtype: torch.dtype) -> None:
    """A tensor of each type and layout loads with its type, shape and bits, as a writable view of the data."""
    tensors = cuts(sample(dtype))
    file = content({"deep": [tensors]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decode("tensors", file)["deep"][0]
    for one, other in zip(found, tensors, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bits(one) == bits(other)
    before = bytes(file)
    found[0].zero_()
    assert bytes(file) != before


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_standard_readers_open_the_file(dtype: torch.dtype) -> None:
    """The package safetensors reads all tensors by their paths, with the documented types."""
    tensors = cuts(sample(dtype))
    found = safetensors.torch.load(bytes(content({"layer": dict(enumerate(tensors))})))
    assert len(found) == len(tensors)
    for index, tensor in enumerate(tensors):
        other = found[f"layer/{index}"]
        if dtype.is_complex:
            other = torch.view_as_complex(other)
        elif dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            other = other.view(dtype)
        assert (other.dtype, other.shape, bits(other)) == (dtype, tensor.shape, bits(tensor))


def test_numpy_and_torch_and_bytes_in_one_file(tmp_path: Path) -> None:
    """Arrays, tensors and bytes in one part keep their types. A standard reader finds the metadata and each tensor."""
    state = {"a": np.arange(3.0), "t": torch.arange(4), "raw": b"abc", 3: (1, None, float("nan"))}
    Checkpointer(tmp_path).save(1, {"model": state})
    found = Checkpointer(tmp_path).load_latest()
    assert found is not None
    model = found.state["model"]
    assert type(model["a"]) is np.ndarray and type(model["t"]) is torch.Tensor
    assert (model["raw"], model[3][:2], model["t"].tolist()) == (b"abc", (1, None), [0, 1, 2, 3])
    [file] = tmp_path.rglob("*.safetensors")
    with safetensors.safe_open(file, framework="numpy") as opened:
        assert opened.metadata()["format"] == "pt"
        assert sorted(opened.keys()) == ["a", "raw", "t"]
        assert opened.get_tensor("a").tolist() == [0, 1, 2]


def test_live_memory_is_not_copied() -> None:
    """The chunks of CPU tensors share their memory and keep it alive. A snapshot is not changed by training."""
    size = SMALL_BYTES // 4
    tensor = torch.zeros(size)
    _, chunks = encode("p", {"w": tensor, "gone": torch.full((size,), 7.0)})
    kept = Snapshot().take({"p": encode("p", {"w": tensor})})
    tensor.fill_(1)
    found = decode("tensors", bytearray(b"".join(chunks)))
    assert found["w"].tolist() == [1.0] * size and found["gone"].tolist() == [7.0] * size
    assert decode("tensors", bytearray(b"".join(kept["p"][1])))["w"].tolist() == [0.0] * size


def test_lazy_and_tied_tensors() -> None:
    """Lazy conjugates are stored resolved. Tied weights are stored once and load as tied; partial views do not."""
    wave = torch.randn(8, dtype=torch.complex64)
    tied = nn.Linear(100, 100, bias=False)
    model = nn.Sequential(tied, nn.ReLU(), nn.Linear(100, 100, bias=False))
    model[2].weight = tied.weight
    tree = {"conj": wave.conj(), "imag": wave.conj().imag, "model": model.state_dict(), "row": tied.weight[0]}
    file = content(tree)
    assert len(file) < 1.2 * 40_000
    found = decode("tensors", file)
    assert torch.equal(found["conj"], wave.conj()) and torch.equal(found["imag"], -wave.imag)
    assert found["model"]["0.weight"] is found["model"]["2.weight"]
    assert torch.equal(found["row"], tied.weight[0])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(3).to_sparse(), "a tensor of torch.sparse_coo cannot be stored"),
        (torch.zeros(3, device="meta"), "on the device 'meta' has no values"),
        (torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "tensor of NestedTensor cannot be stored"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "a nested tensor cannot be stored"),
        (torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "a quantised tensor cannot be stored"),
        (nn.LazyLinear(2).weight, "a parameter of a lazy module has no values"),
        (FakeTensorMode().from_tensor(torch.zeros(2)), "'meta' has no values|FakeTensor has no memory"),
    ],
    ids=["sparse", "meta", "jagged", "nested", "quantised", "lazy", "fake"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_other_layouts_are_refused(tensor: torch.Tensor, message: str) -> None:
    """A tensor with another layout is rejected, and the error names its path."""
    with pytest.raises(StateError, match=rf"part 'p' at a/0: .*{message}"):
        encode("p", {"a": [tensor]})


def test_a_gigabyte_is_encoded_without_touching_it() -> None:
    """Encoding a state of 1 GB of untouched virtual memory makes none of it resident."""

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    state = {str(i): torch.empty(16 * 2**20) for i in range(16)}
    before = resident_bytes()
    _, chunks = encode("p", state)
    assert sum(len(chunk) for chunk in chunks) > 2**30
    assert resident_bytes() - before < 2**26


def test_a_header_of_another_file_is_corrupt() -> None:
    """A file of another program has no tree in its header, and is rejected as corrupt."""
    from mizzen.checkpoint import CorruptCheckpointError

    file = bytearray(safetensors.torch.save({"a": torch.zeros(2)}))
    assert struct.unpack_from("<Q", file)[0] > 0
    with pytest.raises(CorruptCheckpointError, match="the content cannot be decoded as tensors"):
        decode("tensors", file)


def test_many_vectors_are_copied_as_one() -> None:
    """Runs of one-dimensional tensors give the same file with a reused encoder, also after changes in place."""
    torch.manual_seed(2)
    vectors = [torch.nn.Parameter(torch.rand(size)) for size in (3, 1, 9, 7) * 50]
    short = [torch.rand(5).to(torch.float16) for _ in range(3)]
    many = [torch.rand(4, dtype=torch.float16) for _ in range(80)]
    state = {"tensors": [*vectors, torch.rand(2, 3), *short, torch.tensor(1.0).half(), *many]}
    encoder = Encoder()

    def same() -> bool:
        again = b"".join(encoder.encode({"p": state})["p"][1])
        return again == b"".join(encode("p", state)[1])

    assert same()
    memory = encoder.encode({"p": state})["p"][1]
    for tensor in state["tensors"]:
        tensor.data.mul_(2)
    assert same()
    assert all(now is before for now, before in zip(encoder.encode({"p": state})["p"][1][1:], memory[1:], strict=True))
    for grown in (vectors[0], many[3]):
        grown.data = torch.ones(100_000, dtype=grown.dtype)
        assert same()
        grown.data.resize_(2)
        assert same()
        grown.data = grown.data.double()
        assert same()


def test_a_form_that_is_known_gives_the_same_file() -> None:
    """A reused encoder and a new one produce the same bytes for the same state."""
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(3, 5) for _ in range(40)] + [nn.Embedding(9000, 4), nn.Linear(3, 5).bfloat16()])
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(rate: float) -> dict[str, Any]:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "note": ["x", rate, (1, None)]}

    encoder = Encoder()
    for rate in (0.1, 0.01, 0.001):
        state = step(rate)
        kind, chunks = encoder.encode({"p": state})["p"]
        assert (kind, b"".join(chunks)) == (encode("p", state)[0], b"".join(encode("p", state)[1]))
    assert encoder.owns(chunks[-1])
    changes: list[Any] = [
        lambda s: s["model"].pop("3.bias"),
        lambda s: s["model"].__setitem__("3.bias", torch.ones(5)),
        lambda s: s["model"].__setitem__("new", torch.ones(5)),
        lambda s: s["model"].__setitem__("3.bias", torch.ones(6)[1:]),
        lambda s: s["model"].__setitem__("3.weight", s["model"]["3.weight"].t()),
        lambda s: s["model"].__setitem__("4.bias", s["model"]["3.bias"]),
        lambda s: s["model"].__setitem__("3.weight", s["model"]["3.weight"].reshape(-1)),
        lambda s: s["model"].__setitem__("3.weight", s["model"]["3.weight"].view(torch.int32)),
        lambda s: s["model"].__setitem__("$dict", s["model"].pop("3.bias")),
        lambda s: s.__setitem__("model", {"$dict": s["model"]["3.bias"]}),
        lambda s: s.__setitem__("model", dict(s["model"])),
        lambda s: s["model"].__setitem__("raw", b"bytes"),
        lambda s: s["note"].append(torch.zeros(3)),
        lambda s: s.__setitem__("note", "x"),
        lambda s: s["note"].__setitem__(1, 1),
        lambda s: s["note"].__setitem__(1, True),
        lambda s: s["note"].__setitem__(1, -0.0),
        lambda s: s["note"].__setitem__(1, 0.0),
        lambda s: s["note"].__setitem__(1, np.float32(1)),
        lambda s: s["note"].__setitem__(1, np.float64(1)),
    ]
    for change in changes:
        state = step(0.1)
        encoder.encode({"p": state})
        change(state)
        assert b"".join(encoder.encode({"p": state})["p"][1]) == b"".join(encode("p", state)[1])
    state = step(0.1)
    encoder.encode({"p": state})
    state["model"]["3.weight"] = torch.eye(5).to_sparse()
    with pytest.raises(StateError, match="sparse"):
        encoder.encode({"p": state})
