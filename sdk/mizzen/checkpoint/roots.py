"""Opens the object store of a checkpoint root."""

import os
import re

from mizzen.environment import local_path
from mizzen.objects.store import ObjectStore
from mizzen.objects.urls import open_store

_SINGLE_SLASH = re.compile(r"(s3|gs|file):/(?!/)(.*)")


def open_root(uri: str | os.PathLike[str]) -> ObjectStore:
    """Open the store of a root, given as a path, `file:///folder`, `s3://bucket/prefix` or `gs://bucket/prefix`.

    Raises:
        ValueError: the URI has another scheme or is malformed, for example because a `pathlib.Path` was made of it.
        ModuleNotFoundError: the cloud's client library is not installed. The message names the package to install.
    """
    text = os.fspath(uri)
    if text.startswith(("s3://", "gs://")):
        return open_store(text.rstrip("/"))
    if found := _SINGLE_SLASH.fullmatch(text):
        right = f"{found[1]}:{'//' if found[1] != 'file' else '///'}{found[2]}"
        raise ValueError(f"{text!r}: a URI has two slashes, of which a Path keeps only one; use the string {right!r}")
    scheme, separator, _ = text.partition("://")
    if separator and scheme != "file":
        raise ValueError(f"{text!r}: the scheme {scheme!r} is not supported; use a path, file://, s3:// or gs://")
    return open_store(local_path(text).as_uri())
