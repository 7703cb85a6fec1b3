"""Damages of stored objects: deletion, truncation and a flipped bit."""

import os

from mizzen.environment import local_path
from mizzen.objects.store import ObjectStore


def delete(store: ObjectStore, key: str) -> None:
    """Deletes the object."""
    store.delete(key)


def truncate(store: ObjectStore, key: str) -> None:
    """Removes the object's last byte."""
    store.put(key, store.get(key)[:-1])


def flip(store: ObjectStore, key: str) -> None:
    """Flips one bit, as a failing disk does: size and modification time stay the same."""
    path = local_path(store.uri(key))
    status, damaged = path.stat(), bytearray(store.get(key))
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGES = [delete, truncate, flip]
