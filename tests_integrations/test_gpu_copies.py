"""Tensors of GPUs are copied to the host in pieces. Without a GPU, tensors on the CPU take the same path."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mizzen.checkpoint import Checkpointer, CheckpointSettings, open_checkpoints, parts, tensors
from mizzen.checkpoint.gpu_copies import GpuCopies
from mizzen.checkpoint.layout import Encoder
from mizzen.checkpoint.module_layout import ModuleLayout
from mizzen.checkpoint.pictures import differing, picture

MIB = 1 << 20


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if request.param == "cpu":
        monkeypatch.setattr(tensors, "is_on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    return str(request.param)


def state_of(device: str) -> dict[str, Any]:
    """Return tensors of all kinds, among them some that are larger than a pinned buffer, or have no elements."""
    torch.manual_seed(0)
    large = torch.randn(3 * MIB // 4 + 5, device=device)
    short = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]
    return {
        "large": large,
        "tied": {"weight": large, "view": large[7:]},
        "many": [torch.randn(size % 40, device=device) for size in range(300)],
        "transposed": torch.randn(70, 90, device=device).t(),
        "strided": torch.arange(5000, device=device)[::3],
        "conjugate": torch.randn(50, 3, dtype=torch.complex64, device=device).conj(),
        "complex": torch.randn(4, dtype=torch.complex128, device=device),
        "scalar": torch.tensor(2.5, device=device),
        "true": torch.tensor([True, False], device=device),
        "none": torch.empty(0, 3, device=device),
        "parameter": torch.nn.Parameter(torch.randn(33, 3, device=device)),
        "short": [torch.randn(77, device=device).to(dtype) for dtype in short],
        "host": {"array": np.arange(1000), "step": torch.tensor(3.0)},
        "text": "x",
    }


def content(chunks: list[Any]) -> bytes:
    return b"".join(bytes(chunk) for chunk in chunks)


@pytest.mark.parametrize("gpu_copy_bytes", [0, 2 * MIB, 64 * MIB])
def test_the_file_is_that_of_a_plain_copy(device: str, gpu_copy_bytes: int) -> None:
    """Whether all, some or none of the tensors are copied within the GPU first, the bytes are the same."""
    state = state_of(device)
    expected = content(parts.encode("state", state)[1])
    encoder = Encoder(MIB, gpu_copy_bytes)
    assert content(encoder.encode({"state": state})["state"][1]) == expected
    for _ in range(2):  # The second save uses memory of the first.
        [(_, chunks)] = encoder.encode({"state": state}, later=True).values()
        encoder.finish()
        assert content(chunks) == expected
        assert all(encoder.owns(chunk) for chunk in chunks if len(chunk) > 200_000)


def test_a_picture_of_tensors_on_a_gpu_is_that_of_their_copies(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify=True` compares the restored state, on the GPU, with the loaded one; it copies samples only."""
    state = {"state": state_of(device)}
    seen = picture(state)
    kind, chunks = parts.encode("state", state["state"])
    loaded = parts.decode(kind, bytearray(content(chunks)), name="state")
    monkeypatch.setattr(tensors, "is_on_gpu", lambda _: False)
    assert len(seen["state"]["tensors"]) > 300
    assert differing(seen, picture({"state": loaded})) == []


@pytest.mark.parametrize("gpu_copy_bytes", [0, 64 * MIB])
def test_changes_after_a_background_save_are_not_in_it(device: str, gpu_copy_bytes: int, tmp_path: Path) -> None:
    """The training goes on at once, and changes its tensors in place while the save runs."""
    weight = torch.zeros(2 * MIB, device=device)
    counts = [torch.zeros(10, device=device) for _ in range(200)]
    settings = CheckpointSettings(pinned_bytes=MIB, gpu_copy_bytes=gpu_copy_bytes)
    with Checkpointer(tmp_path, keep=10, settings=settings) as checkpointer:
        for step in range(1, 6):
            weight.add_(1)
            for count in counts:
                count.add_(1)
            checkpointer.save_async(step, {"model": {"weight": weight, "counts": counts}})
            weight.add_(100).sub_(100)
    for step in range(1, 6):
        found = open_checkpoints(tmp_path).load(step).state["model"]
        assert (found["weight"] == step).all()
        assert all((count == step).all() for count in found["counts"])


def test_a_model_and_its_optimizer_are_restored_in_place(device: str, tmp_path: Path) -> None:
    """Parameters, buffers and the optimizer's state stay on their device, and at their addresses."""

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        inner = [torch.nn.Linear(30, 30) for _ in range(40)]
        model = torch.nn.Sequential(*inner, torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 20_000)).to(device)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    model, optimizer = made(1)
    model(torch.randn(5, 30, device=device)).sum().backward()
    optimizer.step()
    checkpointer = Checkpointer(tmp_path, settings=CheckpointSettings(gpu_copy_bytes=64 * MIB))
    checkpointer.track(model=model, optimizer=optimizer)
    checkpointer.restore()
    checkpointer.save_async(1, checkpointer._tracked.capture(1)).wait()
    other, resumed = made(2)
    places = [tensor.data_ptr() for tensor in other.state_dict().values()]
    again = Checkpointer(tmp_path)
    again.track(model=other, optimizer=resumed)
    assert again.restore() == 1
    pairs = zip(other.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(one.device == two.device and torch.equal(one, two) for one, two in pairs)
    assert [tensor.data_ptr() for tensor in other.state_dict().values()] == places
    for one, two in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert one.keys() == two.keys()
        assert all(one[name].device == two[name].device and torch.equal(one[name], two[name]) for name in one)


def test_a_large_model_is_filled_from_a_file_in_pieces(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on a GPU is filled without a copy of it in the host's memory: each piece goes to the GPU at once."""
    monkeypatch.setattr(ModuleLayout, "is_in_memory", False)

    def made(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        short = torch.nn.Parameter(torch.randn(3 * MIB + 1).to(torch.bfloat16))
        return torch.nn.ParameterDict(
            {"empty": torch.nn.Parameter(torch.empty(0)), "short": short}
            | {f"p{n}": torch.nn.Parameter(torch.randn(n * 400_000 + 3)) for n in range(10)}
        ).to(device)

    model = made(1)
    Checkpointer(tmp_path).save(3, {"model": model.state_dict()})
    other = made(2)
    again = Checkpointer(tmp_path)
    again.track(model=other)
    assert again.restore(parts=["model"]) == 3
    assert all(torch.equal(one, two) for one, two in zip(other.parameters(), model.parameters(), strict=True))


def test_a_failed_save_keeps_no_memory_of_the_gpu(device: str, tmp_path: Path) -> None:
    """The copies within the GPU are dropped if the state cannot be stored."""
    checkpointer = Checkpointer(tmp_path, settings=CheckpointSettings(gpu_copy_bytes=64 * MIB))
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    state = {"model": {"weight": torch.zeros(MIB, device=device)}, "zero": {"object": object()}}
    before += 4 * MIB if device == "cuda" else 0
    with pytest.raises(ValueError, match="part 'zero' at object"):
        checkpointer.save_async(1, state)
    assert not checkpointer._encoder._gpu._groups
    if device == "cuda":
        assert torch.cuda.memory_allocated() == before
    checkpointer.save_async(1, {"model": state["model"]}).wait()


@pytest.mark.parametrize(("name", "value"), [("pinned_bytes", 1000), ("gpu_copy_bytes", -1)])
def test_limits_out_of_range_are_refused(name: str, value: int) -> None:
    """The error names the setting, the value and what would be right."""
    with pytest.raises(ValueError, match=f"{name}={value}: must be "):
        CheckpointSettings(**{name: value})


def test_pinned_memory_stays_within_the_limit() -> None:
    """Two buffers, each a power of two, because torch rounds pinned memory up to one."""
    assert [GpuCopies(size)._half_bytes * 2 for size in (MIB, 3 * MIB, 256 * MIB)] == [MIB, 2 * MIB, 256 * MIB]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_copies_leave_the_memory_that_the_training_needs() -> None:
    """Where the training's peak leaves too little room for a copy, a part goes to the host at once: no step fails."""
    weights = {str(number): torch.ones(1 << 28, device="cuda") for number in range(4)}
    free, total = torch.cuda.mem_get_info()
    encoder = Encoder()

    def train() -> None:
        """A step whose activations leave 1.5 GiB for copies."""
        torch.empty(free - total // 32 - (3 << 29), dtype=torch.uint8, device="cuda")
        for weight in weights.values():
            weight.add_(1)

    train()
    for step in range(3):
        [(_, chunks)] = encoder.encode({"model": weights}, later=True).values()
        assert len(encoder._gpu._groups) == 1
        train()
        encoder.finish()
        assert len(chunks[1]) == 4 << 30
        assert (torch.frombuffer(chunks[1], dtype=torch.float32) == step + 2).all()
