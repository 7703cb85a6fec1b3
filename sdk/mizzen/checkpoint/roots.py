"""Where checkpoints are kept: a root's address, and the store that it names."""

import os

from mizzen.environment import local_path
from mizzen.objects.store import ObjectStore, open_store


def open_root(uri: str | os.PathLike[str]) -> ObjectStore:
    """The store of the root at a path, `file:///folder`, `s3://bucket/prefix` or `gs://bucket/prefix`.

    Raises:
        ValueError: it is none of these.
        ModuleNotFoundError: a cloud's library is not installed; the message says what to install.
    """
    text = os.fspath(uri)
    if text.startswith(("s3://", "gs://")):
        return open_store(text.rstrip("/"))
    scheme, separator, _ = text.partition("://")
    if separator and scheme != "file":
        raise ValueError(f"{text!r}: the scheme {scheme!r} is not supported; give a path, file://, s3:// or gs://")
    return open_store(local_path(text).as_uri())
