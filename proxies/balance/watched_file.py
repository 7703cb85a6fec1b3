"""Finds out whether a file has changed."""

from pathlib import Path


class WatchedFile:
    """A file that may be replaced or rewritten. Its path may lead through symbolic links, which may change as well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = self._state()

    def has_changed(self) -> bool:
        """Returns whether the file differs from that of the last call, or of the start."""
        before, self._seen = self._seen, self._state()
        return before != self._seen

    def _state(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
