"""The folders in which compiled machine code is cached, and whether the cache is complete. Does not import numba."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_COMPLETE = "complete"


@cache
def folder_of(package: str) -> str | None:
    """Returns the cache folder for a package's machine code, and deletes the folders of other versions of its sources.

    The folder is beside the sources or, if that is not writable, in the user's cache folder; None: neither is writable.
    """
    digest = hashlib.sha256(version("numba").encode())
    for source in sorted(Path(package).glob("*.py")):
        digest.update(source.read_bytes())
    name = f"compiled-{digest.hexdigest()[:16]}"
    roots = [Path(package) / "__pycache__"]
    with contextlib.suppress(RuntimeError):  # The user has no home folder.
        roots.append(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mizzen" / Path(package).name)
    for root in roots:
        with contextlib.suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
            for old in root.glob("compiled-*"):
                if old.name != name:
                    shutil.rmtree(old, ignore_errors=True)
            (root / name).mkdir(exist_ok=True)
            return str(root / name)
    return None


def is_complete(package: str) -> bool:
    """Returns whether `mark_complete` was called for this version of a package's sources: nothing is left to compile.

    Also returns True if no cache folder is writable: compiling ahead of time would not help the next process.
    """
    folder = _folder_by_name(package)
    return folder is None or (folder / _COMPLETE).exists()


def mark_complete(package: str) -> None:
    """Records that all functions of a package that scheduling needs are compiled and cached."""
    folder = _folder_by_name(package)
    if folder is not None:
        (folder / _COMPLETE).touch()


def _folder_by_name(package: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no package {package!r}")
    folder = folder_of(str(Path(spec.origin).parent))
    return None if folder is None else Path(folder)
