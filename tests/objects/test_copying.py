"""Copying prefixes between stores."""

import random
from pathlib import Path
from typing import Any

import pytest

from mizzen.objects import ObjectInfo, ObjectStore, open_store
from mizzen.objects.copying import CopyFailed, copy_prefix


class Recording:
    """A store that notes what is put, can fail at the nth put, and can spoil what it stores."""

    def __init__(self, inner: ObjectStore, fail_at: int | None = None, spoil: str | None = None) -> None:
        self._inner = inner
        self.fail_at = fail_at
        self.spoil = spoil
        self.puts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, body: bytes | Path) -> None:
        if self.fail_at == len(self.puts):
            raise ConnectionError("the target is away")
        self.puts.append(key)
        content = body if isinstance(body, bytes) else body.read_bytes()
        self._inner.put(key, content[:-1] + b"?" if key == self.spoil else content)


def fill(store: ObjectStore, seed: int) -> dict[str, bytes]:
    rng = random.Random(seed)
    objects = {f"tables/t/{n:02d}.bin": rng.randbytes(rng.randrange(5000)) for n in range(8)}
    objects["tables/t/MANIFEST.json"] = b"{}"
    objects["tables/t/deeper/MANIFEST.json"] = b"[]"
    for key, body in objects.items():
        store.put(key, body)
    store.put("tables/t2/other", b"not asked for")
    return objects


def content(store: ObjectStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list("")}


def test_a_copy_is_complete(store: ObjectStore, tmp_path: Path) -> None:
    """All objects of the prefix arrive, and progress ends at the total."""
    source = open_store(f"file://{tmp_path}/source")
    objects = fill(source, 3)
    target = Recording(store)
    calls: list[tuple[int, int]] = []
    total = copy_prefix(source, target, "tables/t/", progress=lambda done, of: calls.append((done, of)))
    assert content(store) == objects
    assert set(target.puts) == objects.keys()
    assert total == sum(map(len, objects.values()))
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_an_interrupted_copy_goes_on(tmp_path: Path) -> None:
    """After a failure the next copy puts only what is missing or different."""
    source, inner = open_store(f"file://{tmp_path}/source"), open_store(f"file://{tmp_path}/target")
    objects = fill(source, 4)
    target = Recording(inner, fail_at=5)
    with pytest.raises(ConnectionError):
        copy_prefix(source, target, "tables/t/")
    first = list(target.puts)
    inner.put(first[0], bytes(len(objects[first[0]])))  # The same size, another content.
    target.fail_at, target.puts = None, []
    copy_prefix(source, target, "tables/t/")
    assert content(inner) == objects
    assert set(target.puts) == (objects.keys() - set(first)) | {first[0]}


def test_what_arrives_wrong_is_an_error(tmp_path: Path) -> None:
    """An object that differs in the target after copying fails the copy."""
    source, inner = open_store(f"file://{tmp_path}/source"), open_store(f"file://{tmp_path}/target")
    fill(source, 5)
    with pytest.raises(CopyFailed, match=r"03\.bin"):
        copy_prefix(source, Recording(inner, spoil="tables/t/03.bin"), "tables/t/")


def test_an_empty_prefix_copies_nothing(tmp_path: Path) -> None:
    """A prefix without objects is zero bytes and no error."""
    source, target = open_store(f"file://{tmp_path}/source"), open_store(f"file://{tmp_path}/target")
    assert copy_prefix(source, target, "nothing/") == 0
    found: list[ObjectInfo] = list(target.list(""))
    assert found == []
