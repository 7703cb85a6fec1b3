"""Reads the archives of outputs, and unpacks them into folders."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from mizzen_client.calls import path_of
from mizzen_client.errors import OutputError, Unreachable
from mizzen_client.transport import Backoff, Params, StreamBroken, Transport
from mizzen_client.views import Output

_PIECE_BYTES = 1 << 20
Progress = Callable[[int], None]
"""Called with the number of bytes that have arrived of the archive."""


def write_output(
    transport: Transport, workload_id: str, output: Output, folder: Path, progress: Progress | None
) -> None:
    """Write the files of an output into a folder (`OutputCalls.fetch_output`)."""
    if output["error"] is not None:
        raise OutputError(f"output {output['name']} was not stored: {output['error']}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} exists and is not an empty folder: give another one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    path = path_of("workloads", workload_id, "outputs", output["name"])
    try:
        _unpack(_Archive(transport, path, output, transport.pauses(), progress), partial)
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unpack(archive: "_Archive", folder: Path) -> None:
    try:
        with BufferedReader(archive, _PIECE_BYTES) as file:
            with tarfile.open(fileobj=file, mode="r|") as tar:
                root = folder.resolve()
                for entry in tar:
                    _write(tar, entry, root)
            while file.read(_PIECE_BYTES):
                pass  # The padding at the end, so that the archive is known to be complete.
    except (tarfile.TarError, FileExistsError) as error:
        raise OutputError(f"the archive of the output is not valid: {error}") from None


def _write(tar: tarfile.TarFile, entry: tarfile.TarInfo, root: Path) -> None:
    """Write an entry of an archive that is not trusted. Python has filters for such archives only since 3.11.4."""
    place = root / entry.name
    leads_to = place.parent / entry.linkname if entry.issym() else place
    if not all(Path(os.path.realpath(one)).is_relative_to(root) for one in (place, leads_to)):
        raise tarfile.TarError(f"{entry.name} is not in the folder of the output")
    (place if entry.isdir() else place.parent).mkdir(parents=True, exist_ok=True)
    if entry.issym():
        place.symlink_to(entry.linkname)
    elif not entry.isdir():
        content = tar.extractfile(entry) if entry.isreg() else None
        if content is None:
            raise tarfile.TarError(f"{entry.name} is not a file, a folder or a link")
        with place.open("xb") as file:
            shutil.copyfileobj(content, file, _PIECE_BYTES)
        place.chmod(entry.mode & 0o755 | 0o600)
        os.utime(place, (entry.mtime, entry.mtime))


class _Archive(RawIOBase):
    """The archive of an output as a file that is read once."""

    def __init__(
        self, transport: Transport, path: str, output: Output, pauses: Backoff, progress: Progress | None
    ) -> None:
        self._transport = transport
        self._path = path
        self._params: dict[str, str | int] = {
            "job": output["job"],
            "task": output["task"],
            "attempt": output["attempt"],
        }
        self._size = output["archive_bytes"]
        self._pauses = pauses
        self._progress = progress
        self._at = 0
        self._rest = b""
        self._stack = ExitStack()
        self._pieces: Iterator[bytes] | None = None

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, into: Any) -> int:
        """Fill a buffer, at least in part; return how many bytes were read, 0 at the end."""
        while not self._rest and self._at < self._size:
            self._rest = self._next()
        view = memoryview(into)
        found = self._rest[: len(view)]
        view[: len(found)] = found
        self._rest = self._rest[len(found) :]
        return len(found)

    def close(self) -> None:
        """Close the connection."""
        self._stack.close()
        super().close()

    def _next(self) -> bytes:
        """Return the next piece. If the connection is lost, pause and return nothing; the next call continues."""
        try:
            if self._pieces is None:
                params: Params = {**self._params, "start": self._at}
                self._pieces = self._stack.enter_context(self._transport.stream(self._path, params, lines=False))
                self._pauses.connected()
            piece = next(self._pieces, None)
            if piece is None:
                raise StreamBroken("the transfer of the output was interrupted")
        except StreamBroken as error:
            self._pieces = None
            self._stack.close()
            self._pauses.pause(Unreachable(str(error)))
            return b""
        self._pauses.succeeded()
        self._at += len(piece)
        if self._progress is not None:
            self._progress(self._at)
        return piece
