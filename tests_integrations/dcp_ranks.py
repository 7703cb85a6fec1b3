"""One rank of a gang that saves a sharded state with `mizzen.integrations.dcp`, or loads and compares it.

`DCP` is `save`, `load`, `fail`: a load that must fail and change nothing, or `some`: rank 0 loads alone, and the others
in a group of their own. `DCP_ROOT` is the root.
"""

import os

import torch
from torch import distributed
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mizzen.integrations import dcp

doing, root = os.environ["DCP"], os.environ["DCP_ROOT"]
distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
whole = {
    "rows": torch.arange(77.0).view(11, 7).sin(),
    "columns": torch.arange(60, dtype=torch.bfloat16).view(4, 15),
    "every": torch.arange(5),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "complex": torch.complex(torch.arange(6.0), -torch.arange(6.0)).view(3, 2),
}
places = {"rows": Shard(0), "columns": Shard(1), "every": Replicate(), "complex": Shard(0)}


def shared(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | DTensor]:
    """Returns the values, distributed over the ranks."""
    found = {name: distribute_tensor(values[name], mesh, [place]) for name, place in places.items()}
    return {**found, "scalar": values["scalar"].clone()}


if doing == "save":
    writer = dcp.RootWriter(root)
    for step in (1, 2, 3):
        state = {"model": shared({name: value * step for name, value in whole.items()}), "step": step}
        save(state, storage_writer=writer.at(step))
elif doing == "some":
    rank = distributed.get_rank()
    group = distributed.new_group(list(range(1, distributed.get_world_size())))
    state = {"model": shared({name: torch.zeros_like(value) for name, value in whole.items()}), "step": 0}
    if rank == 0:
        load(state, storage_reader=dcp.RootReader(root, no_dist=True), no_dist=True)
        distributed.barrier()  # So the others have not begun yet: rank 0 has waited for none of them.
    else:
        distributed.barrier()
        load(state, storage_reader=dcp.RootReader(root, process_group=group), process_group=group)
    for name, value in shared({name: value * state["step"] for name, value in whole.items()}).items():
        found = state["model"][name]
        pair = [one.to_local() if isinstance(one, DTensor) else one for one in (found, value)]
        assert state["step"] == 3 and torch.equal(*pair), name
else:
    state = {"model": shared({name: torch.zeros_like(value) for name, value in whole.items()}), "step": 0}
    reader = dcp.RootReader(root)
    try:
        load(state, storage_reader=reader)
    except CheckpointException:
        values = [value.to_local() if isinstance(value, DTensor) else value for value in state["model"].values()]
        os._exit(int(doing != "fail" or any(value.any() for value in values)))
    assert doing == "load"
    assert reader.manifest is not None and state["step"] == reader.manifest.step
    for name, value in state["model"].items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, whole[name] * state["step"]), name
distributed.barrier()  # A rank that still connects to one that is closing can abort in gloo.
distributed.destroy_process_group()
