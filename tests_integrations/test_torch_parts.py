"""Torch's tensors in checkpoints: every type, without copies, readable by others, and torch's own objects tracked."""

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

from mizzen.checkpoint import Checkpointer, StateError, Tracked
from mizzen.checkpoint.parts import decode, encode
from mizzen.checkpoint.snapshot import Snapshot

TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def content(value: Any) -> bytearray:
    """The file of a value that has tensors."""
    kind, chunks = encode("p", value)
    assert kind == "tensors"
    return bytearray(b"".join(chunks))


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Any bit patterns of a type, NaN among them."""
    raw = torch.arange(4 * 16 * 8, dtype=torch.int32).mul(37).to(torch.uint8).view(4, 128)
    return raw > 100 if dtype is torch.bool else raw.view(dtype)


def cuts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor whole, turned, cut, without dimensions, and empty."""
    return [tensor, tensor.t(), tensor[1:, ::2], tensor[0, 0], tensor[:0], tensor[:, :0]]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_come_back_as_they_were(dtype: torch.dtype) -> None:
    """Each type in each layout loads with its type, shape and bits, as a writable view of the data."""
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
    """The package safetensors finds all tensors by their paths, with the types that the docs name."""
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
    """What is mixed comes back mixed, and a standard reader finds the metadata and each tensor in the file."""
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
    """The chunks of tensors on the CPU are their memory, and keep it alive; a snapshot is not changed by training."""
    tensor = torch.zeros(1000)
    _, chunks = encode("p", {"w": tensor, "gone": torch.full((1000,), 7.0)})
    kept = Snapshot().take({"p": encode("p", {"w": tensor})})
    tensor.fill_(1)
    found = decode("tensors", bytearray(b"".join(chunks)))
    assert found["w"].tolist() == [1.0] * 1000 and found["gone"].tolist() == [7.0] * 1000
    assert decode("tensors", bytearray(b"".join(kept["p"][1])))["w"].tolist() == [0.0] * 1000


def test_lazy_and_tied_tensors() -> None:
    """Conjugates are stored as what they mean; tied weights once, and they come back tied; views of a part do not."""
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
        (torch.eye(3).to_sparse(), "a tensor of torch.sparse_coo is not stored"),
        (torch.zeros(3, device="meta"), "on the device 'meta' has no values"),
        (torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "a tensor of NestedTensor is not stored"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "a nested tensor is not stored"),
        (torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "a quantised tensor is not stored"),
        (nn.LazyLinear(2).weight, "a parameter of a lazy module has no values"),
        (FakeTensorMode().from_tensor(torch.zeros(2)), "'meta' has no values|without memory has no values"),
    ],
    ids=["sparse", "meta", "jagged", "nested", "quantised", "lazy", "fake"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_other_layouts_are_refused(tensor: torch.Tensor, message: str) -> None:
    """What is no plain tensor is refused with its place."""
    with pytest.raises(StateError, match=rf"part 'p' at a/0: .*{message}"):
        encode("p", {"a": [tensor]})


class Scaled(nn.Module):
    """Its second version stores the scale as a factor, its first as a percentage."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"] / 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


@pytest.mark.parametrize("version", [1, 2])
def test_states_of_modules_keep_their_version(version: int) -> None:
    """A module migrates a state of an older version, and leaves one of its own version alone, as with torch.save."""
    state = nn.Sequential(Scaled()).state_dict()
    state._metadata["0"]["version"] = version  # type: ignore[attr-defined]
    if version == 1:
        state["0.scale"] = torch.tensor(50.0)
    model = nn.Sequential(Scaled())
    model.load_state_dict(decode("tensors", content(state)))
    assert float(model[0].scale) == 0.5


def a_training(seed: int) -> dict[str, Any]:
    """Torch's objects that have a state, after some steps."""
    torch.manual_seed(seed)
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    average = torch.optim.swa_utils.AveragedModel(model)
    schedulers = {
        "warm": torch.optim.lr_scheduler.LinearLR(optimizer),
        "stones": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        "sequence": torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
    }
    scaler = torch.amp.GradScaler("cpu")
    return {
        "model": model, "optimizer": optimizer, "average": average, "scaler": scaler,
        "dice": torch.Generator().manual_seed(seed), **schedulers,
    }  # fmt: skip


def train(objects: dict[str, Any], steps: int) -> list[float]:
    """Some steps with everything; the losses and random draws."""
    losses = []
    for _ in range(steps):
        inputs = torch.randn(8, 4, generator=objects["dice"])
        loss = objects["model"](inputs).square().mean()
        objects["optimizer"].zero_grad()
        objects["scaler"].scale(loss).backward()
        objects["scaler"].step(objects["optimizer"])
        objects["scaler"].update()
        objects["average"].update_parameters(objects["model"])
        for name in ("warm", "stones", "cosine", "sequence"):
            objects[name].step()
        objects["plateau"].step(loss.item())
        losses += [loss.item(), torch.rand(1).item(), objects["optimizer"].param_groups[0]["lr"]]
    return losses


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torchs_own_objects_go_on_exactly() -> None:
    """Models, optimizers, schedulers, scaler, averages and generators go on as if nothing had happened."""
    first, second = a_training(1), a_training(2)
    tracked, fresh = Tracked(first), Tracked(second)
    train(first, 3)
    state = {name: decode(*loadable(name, value)) for name, value in tracked.capture(3).items()}
    assert not any(name.startswith("_orig_mod") for name in state["model"])
    expected = train(first, 6)
    fresh.restore(state)
    assert train(second, 6) == expected
    assert second["stones"].milestones.elements is not None


def loadable(name: str, value: Any) -> tuple[str, bytearray]:
    """A part's kind and file."""
    kind, chunks = encode(name, value)
    return kind, bytearray(b"".join(chunks))


def test_a_gigabyte_is_encoded_without_touching_it() -> None:
    """Encoding a state of 1 GB that is backed by nothing makes none of it resident."""

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    state = {str(i): torch.empty(16 * 2**20) for i in range(16)}
    before = resident_bytes()
    _, chunks = encode("p", state)
    assert sum(len(chunk) for chunk in chunks) > 2**30
    assert resident_bytes() - before < 2**26


def test_a_header_of_another_file_is_corrupt() -> None:
    """A file that another program wrote has no tree, and is refused as such."""
    from mizzen.checkpoint import CorruptCheckpointError

    file = bytearray(safetensors.torch.save({"a": torch.zeros(2)}))
    assert struct.unpack_from("<Q", file)[0] > 0
    with pytest.raises(CorruptCheckpointError, match="its tensors cannot be read"):
        decode("tensors", file)
