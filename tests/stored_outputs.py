"""Stores outputs of workloads, as agents do."""

import hashlib
import io
import tarfile
from collections.abc import Sequence
from typing import Any

from domain import ids
from domain.output_manifest import OutputManifest, OutputPart
from mizzen.objects import ObjectStore


def store_output(
    bucket: ObjectStore, workload: str, parts: Sequence[bytes], name: str = "model", attempt: int = 1, task: int = 0,
    **fields: Any,
) -> None:  # fmt: skip
    """Stores an output of a task of the job `trainer` in a bucket. `fields` are of its manifest."""
    place = (workload, attempt, "trainer", task, name)
    for number, part in enumerate(parts):
        bucket.put(ids.output_part_key(*place, number), part)
    stored = [OutputPart(size_bytes=len(part), sha256=hashlib.sha256(part).hexdigest()) for part in parts]
    manifest = OutputManifest(path="out", stored_at_s=1e9, files=1, parts=stored, **fields)
    bucket.put(ids.output_manifest_key(*place), manifest.model_dump_json().encode())


def tar_of(**files: bytes) -> bytes:
    """Returns an archive of files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()
