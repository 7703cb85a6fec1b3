"""Which paths of a folder are not packed: patterns of `.gitignore` files, and those of `.mizzenignore` files.

Both have the syntax of git, with negation (`!best.pt`), and apply to the folder that they are in and below it. A
pattern of a `.mizzenignore` comes before all of `.gitignore`; of files with the same name, the one deeper in the tree
comes first. As in git, nothing below an ignored folder is packed. `.gitignore` files above the folder count, up to the
root of the repository.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from mizzen_client.errors import ArchiveError

GIT_FILE, OWN_FILE = ".gitignore", ".mizzenignore"
ALWAYS = (".git", "__pycache__", ".venv")


@dataclass(frozen=True)
class _Patterns:
    prefix: str
    """Path from the folder with the patterns to the packed folder, if the patterns are above it."""
    inside: str
    """Path from the packed folder to the folder with the patterns, if they are in it."""
    spec: GitIgnoreSpec
    is_own: bool


class Ignored:
    """The patterns that apply in one folder."""

    def __init__(self, patterns: tuple[_Patterns, ...]) -> None:
        self._patterns = patterns

    @classmethod
    def of(cls, folder: Path) -> "Ignored":
        """Return the patterns that apply in the folder to be packed.

        Raises:
            ArchiveError: a file with patterns cannot be read, or has a pattern that is not valid.
        """
        found = []
        root = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)
        inside = folder.relative_to(root).parts
        for depth in range(len(inside)):
            above = root.joinpath(*inside[:depth])
            prefix = "".join(f"{part}/" for part in inside[depth:])
            found += [_Patterns(prefix, "", spec, is_own=False) for spec in _read(above / GIT_FILE)]
        return cls(tuple(found)).below(folder, "")

    def below(self, folder: Path, name: str) -> "Ignored":
        """Return the patterns that apply in `folder`, whose path from the packed folder is `name` (with a slash)."""
        own = [
            _Patterns("", name, spec, file == OWN_FILE)
            for file in (GIT_FILE, OWN_FILE)
            for spec in _read(folder / file)
        ]
        return Ignored((*self._patterns, *own)) if own else self

    def has(self, name: str, is_folder: bool) -> bool:
        """Return whether the path, from the packed folder, is ignored."""
        if name.rpartition("/")[2] in ALWAYS:
            return True
        for is_own in (True, False):
            for one in reversed(self._patterns):
                if one.is_own is not is_own:
                    continue
                path = one.prefix + name.removeprefix(one.inside)
                found = one.spec.check_file(path + "/" * is_folder).include
                if found is not None:
                    return found
        return False


def _read(file: Path) -> Iterator[GitIgnoreSpec]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ArchiveError(f"{file}: {error}") from None
    try:
        yield GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ArchiveError(f"{file}: {error}") from None
