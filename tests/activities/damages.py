"""What happens to objects that nobody meant to change."""

import os

from mizzen.environment import local_path
from mizzen.objects.store import ObjectStore


def delete(store: ObjectStore, key: str) -> None:
    """The object is gone."""
    store.delete(key)


def truncate(store: ObjectStore, key: str) -> None:
    """Its last byte is missing."""
    store.put(key, store.get(key)[:-1])


def flip(store: ObjectStore, key: str) -> None:
    """One bit is another one, as a bad disk has it: neither size nor time change."""
    path = local_path(store.uri(key))
    status, damaged = path.stat(), bytearray(store.get(key))
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGES = [delete, truncate, flip]
