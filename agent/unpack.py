"""Fills a task's working directory from the user's archive, then from the files in the specification."""

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from agent.launch import Owner
from domain.spec import MOUNTS
from infra.archives import ArchiveTree, BadArchive, walk

MAX_UNPACKED_BYTES = 4 << 30
MAX_MEMBERS = 100_000


def fill_workdir(
    target: Path,
    archive: Path | None,
    files: Mapping[str, str],
    *,
    owner: Owner | None = None,
    mounted: Mapping[str, Path] = MappingProxyType({}),
    max_bytes: int = MAX_UNPACKED_BYTES,
    max_members: int = MAX_MEMBERS,
) -> None:
    """Makes the folder `target` with the content of `archive` (tar.gz) and `files`, atomically.

    Does nothing if `target` exists. Only the folder's owner may enter it: `owner`, or the agent's user if that is None.
    Files below `MOUNTS` in the archive that belong to an absolute path are moved to the path in `mounted`; if there are
    none, that path becomes an empty folder.

    Raises:
        BadArchive: the archive or the files cannot be unpacked (`infra.archives`).
        OSError: the files cannot be written on this machine.
    """
    if target.exists():
        return
    staging = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    staging.mkdir(mode=0o700)
    try:
        tree = ArchiveTree(max_members)
        if archive is not None:
            _unpack(archive, staging, tree, max_bytes, max_members)
        tree.add_files(files)
        for name, text in files.items():
            path = staging / name
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # It may be a link of the archive.
            path.write_bytes(text.encode(errors="replace"))
            path.chmod(0o644)
        for seen in mounted:
            _require_own(staging, f"{MOUNTS}{seen}")
        if owner is not None:
            _give_content(staging, owner)
        for seen in sorted(mounted, reverse=True):  # `/a/b` before `/a`.
            _remove(mounted[seen])
            (staging / f"{MOUNTS}{seen}").rename(mounted[seen])
        if mounted:
            shutil.rmtree(staging / MOUNTS)
        if owner is not None:  # Last: until then, other processes of the owner cannot exchange files in it for links.
            os.chown(staging, owner.uid, owner.gid)
        staging.rename(target)
    except OSError:
        if not target.exists():  # If it exists, a concurrent call has made it with the same content.
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unpack(archive: Path, root: Path, tree: ArchiveTree, max_bytes: int, max_members: int) -> None:
    links: dict[str, str] = {}
    with archive.open("rb") as file:
        for member, content in walk(file, tree, max_bytes=max_bytes, max_members=max_members):
            path = root / member.path
            links.pop(member.path, None)
            if member.link is not None:
                path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                links[member.path] = member.link
                continue
            (path if member.is_folder else path.parent).mkdir(mode=0o755, parents=True, exist_ok=True)
            if not member.is_folder:
                with path.open("wb") as out:
                    out.writelines(content)
                path.chmod(0o755 if member.executable else 0o644)
    for name, target in links.items():  # Last, so that nothing is written through a link.
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)


def _require_own(root: Path, name: str) -> None:
    """Creates a folder at a path, unless the archive has a folder there.

    Raises:
        BadArchive: a part of the path is a link, or a file.
    """
    path = root
    for part in name.split("/"):
        path /= part
        if path.is_symlink() or (path.is_file() and path != root / name):
            raise BadArchive(f"{path.relative_to(root)}: must be a folder, because file_mounts has {name}")
    if not path.exists():
        path.mkdir(mode=0o755, parents=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _give_content(root: Path, owner: Owner) -> None:
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            os.chown(Path(folder, name), owner.uid, owner.gid, follow_symlinks=False)
