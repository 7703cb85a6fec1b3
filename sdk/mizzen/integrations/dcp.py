"""Storage of torch's distributed checkpoints (DCP) in a root: fenced, with checksums, and one commit for all ranks.

    writer = dcp.RootWriter("s3://bucket/run-7")
    torch.distributed.checkpoint.save(state, storage_writer=writer.at(step))
    ...
    torch.distributed.checkpoint.load(state, storage_reader=dcp.RootReader("s3://bucket/run-7"))

DCP plans which rank writes which pieces of the sharded tensors (FSDP, tensor and pipeline parallelism), and cuts them
anew for a load by another number of ranks. Here each rank writes its pieces as one part; rank 0 then commits all parts
as one checkpoint. If a rank fails, nothing is committed. The plan itself, the part `dcp`, is a pickle, as in DCP's own
files: load only roots that you trust.
"""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mizzen.checkpoint.errors import CheckpointError
from mizzen.checkpoint.manifest import Manifest, Part
from mizzen.checkpoint.part_reader import fetch_part, verify_part
from mizzen.checkpoint.place import Gang, Retention
from mizzen.checkpoint.removal import sweep
from mizzen.checkpoint.root_view import open_checkpoints
from mizzen.checkpoint.roots import open_root
from mizzen.checkpoint.state_saver import whole_step
from mizzen.checkpoint.writer import Writer, open_writer
from mizzen.objects import checksums
from mizzen.objects.buffers import padded
from mizzen.objects.store import Chunk, Fetch
from mizzen.objects.workers import Workers

PLAN = "dcp"
"""Name of the part with DCP's metadata."""


@dataclass(frozen=True)
class StoredPiece:
    """The location of a stored piece of a tensor, or of the bytes of another value."""

    part: Part
    offset: int
    size_bytes: int
    dtype: torch.dtype | None = None
    """None: bytes."""
    shape: tuple[int, ...] = ()


class RootWriter(StorageWriter):
    """Saves the states of all ranks as one checkpoint for each `torch.distributed.checkpoint.save`."""

    def __init__(self, uri: str | os.PathLike[str], *, attempt: int | None = None, keep: int = 2) -> None:
        """Open the root on each rank; the first save of rank 0 claims it.

        Args:
            uri: root of the checkpoints; all ranks must be able to write there.
            attempt: fencing token; by default MIZZEN_ATTEMPT, or else the next number.
            keep: number of newest checkpoints to keep.

        Raises:
            ValueError: the URI is malformed, or a number is out of range.
        """
        super().__init__()
        self._store = open_root(uri)
        told = os.environ.get("MIZZEN_ATTEMPT")
        self._attempt = attempt if attempt is not None or told is None else int(told)
        self._retention = Retention(keep)
        self._writer: Writer | None = None
        self._step: int | None = None
        self._nonce = self._folder = ""

    def at(self, step: int) -> "RootWriter":
        """Set the step of the next save, and return this object. All ranks call it.

        Raises:
            StateError: it is not a whole number, 0 or more.
        """
        self._step = whole_step(step)
        return self

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageWriter.reset`, which is called only with a `checkpoint_id`."""
        raise CheckpointError("checkpoint_id: not used with a root; pass storage_writer=writer.at(step)")

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """See `StorageWriter.set_up_storage_writer`."""
        if self._step is None:
            raise CheckpointError("step: not set; pass storage_writer=writer.at(step)")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter.prepare_local_plan`."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the root, on rank 0, and give each rank the key of its part."""
        if self._writer is None:
            self._writer = open_writer(self._store, self._attempt, Gang(), self._retention)
            if self._writer.claimed.first:
                sweep(self._writer.log, self._writer.attempt, parts=True)
        self._nonce = os.urandom(4).hex()
        folder = f"parts/a{self._writer.attempt:04d}/step-{self._step:010d}.r0000.{self._nonce}"
        self._folder = folder
        return [replace(plan, storage_data=f"{folder}/part-{_name(rank)}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write the pieces of this rank as one part, durably."""
        chunks: list[Chunk] = []
        found: list[tuple[Any, int, int, torch.dtype | None, tuple[int, ...]]] = []
        offset = 0
        shape: tuple[int, ...]
        for item in plan.items:
            value: Any = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                chunk, dtype, shape = value.getbuffer(), None, ()
            else:
                tensor = value.detach().cpu().contiguous()
                chunk, dtype, shape = _memory(tensor), tensor.dtype, tuple(tensor.shape)
            found.append((item.index, offset, chunk.nbytes, dtype, shape))
            padding = padded(chunk.nbytes) - chunk.nbytes
            chunks += [chunk, bytes(padding)]
            offset += chunk.nbytes + padding
        results: list[WriteResult] = []
        if chunks:
            key = plan.storage_data
            with Workers(1) as digests:
                checksum = digests.submit(checksums.checksum, checksums.fastest(), chunks)
                self._store.put(key, chunks)
                name = key.rsplit("/", 1)[1].removeprefix("part-").removesuffix(".bin")
                part = Part(name, key, "bytes", offset, checksum.result())
            for index, at, size_bytes, dtype, shape in found:
                results.append(WriteResult(index, size_bytes, StoredPiece(part, at, size_bytes, dtype, shape)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the parts of all ranks as one checkpoint, on rank 0."""
        pieces = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_data = pieces
        content = pickle.dumps(metadata, protocol=5)
        key = f"{self._folder}/part-{PLAN}.pickle"
        self._store.put(key, [content])
        plan = Part(PLAN, key, "pickle", len(content), checksums.checksum(checksums.fastest(), [content]))
        shards = {piece.part.key: piece.part for piece in pieces.values()}
        assert self._writer is not None and self._step is not None
        self._writer.commit(self._step, (*shards.values(), plan), self._nonce)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `StorageWriter.validate_checkpoint_id`: a root is passed to the constructor instead."""
        return False


class RootReader(StorageReader):
    """Loads a checkpoint that `RootWriter` has saved, with any number of ranks."""

    def __init__(
        self,
        uri: str | os.PathLike[str],
        step: int | None = None,
        *,
        process_group: distributed.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        """Open the root. All ranks of the load read the same checkpoint: the newest one of `step`, or of all steps.

        `process_group` and `no_dist` are those of the call of `load`, which does not tell them to its reader.

        Raises:
            ValueError: the URI is malformed.
            MissingCheckpointError: there is no root.
        """
        super().__init__()
        self._checkpoints = open_checkpoints(uri)
        self._asked = step
        self._group = process_group
        self._is_alone = no_dist or not distributed.is_initialized()
        self.manifest: Manifest | None = None
        """The checkpoint that is loaded."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageReader.reset`, which is called only with a `checkpoint_id`."""
        raise CheckpointError("checkpoint_id: not used with a root; pass storage_reader=RootReader(uri, step)")

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return DCP's metadata of the checkpoint that rank 0 has chosen, after its checksum was verified."""
        chosen: list[Any] = [None]
        if self._is_alone or distributed.get_rank(self._group) == 0:
            try:
                chosen = [self._checkpoints.get(self._asked)]
            except CheckpointError as error:
                chosen = [error]  # The other ranks wait for the choice.
        if not self._is_alone:
            first = 0 if self._group is None else distributed.get_global_rank(self._group, 0)
            distributed.broadcast_object_list(chosen, src=first, group=self._group)
        if isinstance(chosen[0], CheckpointError):
            raise chosen[0]
        self.manifest = chosen[0]
        assert self.manifest is not None
        plan = next((part for part in self.manifest.parts if part.name == PLAN), None)
        if plan is None:
            raise CheckpointError(f"{self._checkpoints.root}: {self.manifest.name} was not saved by RootWriter")
        found: Metadata = pickle.loads(fetch_part(self._checkpoints.store, plan))
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """See `StorageReader.set_up_storage_reader`."""
        self._pieces: Mapping[Any, StoredPiece] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader.prepare_local_plan`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader.prepare_global_plan`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read the parts that this rank needs. No rank changes a tensor before all ranks have verified their parts.

        Parts on a local disk are read twice, the second time directly into the tensors; others are held in memory.
        """
        wanted: dict[Part, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(self._pieces[item.storage_index].part, []).append(item)
        store, held = self._checkpoints.store, dict[Part, memoryview]()
        with self._agreed():
            for part in wanted:
                if store.is_local:
                    verify_part(store, part)
                else:
                    held[part] = fetch_part(store, part)
        for part, items in wanted.items():
            with store.opened(part.key) if store.is_local else nullcontext(_copying(held.pop(part))) as fetch:
                for item in items:
                    _load(planner, item, self._pieces[item.storage_index], fetch)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """Raise an error of this rank, or one that another rank of the load has met at the same time."""
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
        told = None if mine is None else str(mine)
        found: list[str | None] = [told]
        if not self._is_alone:
            found = [None] * distributed.get_world_size(self._group)
            distributed.all_gather_object(found, told, group=self._group)
        if mine is not None:
            raise mine
        for rank, theirs in enumerate(found):
            if theirs is not None:
                raise CheckpointError(f"rank {rank} cannot load its parts: {theirs}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `StorageReader.validate_checkpoint_id`: a root is passed to the constructor instead."""
        return False


def _name(rank: int) -> str:
    return f"shard-{rank:04d}"


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in C order on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _copying(content: memoryview) -> Fetch:
    """Return a function that reads from a part in memory."""

    def fetch(into: memoryview, start: int) -> int:
        found = content[start : start + len(into)]
        into[: len(found)] = found
        return len(found)

    return fetch


def _load(planner: LoadPlanner, item: Any, piece: StoredPiece, fetch: Fetch) -> None:
    def read(into: memoryview, start: int) -> memoryview:
        if fetch(into, piece.offset + start) != len(into):
            raise CheckpointError(f"{piece.part.key}: was changed while it was read; load again")
        return into

    if item.type is LoadItemType.BYTE_IO:
        planner.load_bytes(item, BytesIO(read(memoryview(bytearray(piece.size_bytes)), 0)))
        return
    assert piece.dtype is not None
    target = planner.resolve_tensor(item).detach()
    rows, *rest = item.lengths or (1,)
    is_whole = list(rest) == list(piece.shape[1:]) and target.dtype == piece.dtype
    if is_whole and target.is_contiguous() and target.device.type == "cpu":
        if target.numel():
            row_bytes = target.numel() // rows * target.element_size()
            read(_memory(target), (item.storage_offsets[0] if item.storage_offsets else 0) * row_bytes)
    else:
        tensor = torch.empty(piece.shape, dtype=piece.dtype)
        read(_memory(tensor), 0)
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, start, length)
        target.copy_(tensor)
    planner.commit_tensor(item, target)
