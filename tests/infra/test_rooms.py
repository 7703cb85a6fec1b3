"""The pages for people who change the code: each path and name in them exists, and each large folder has one."""

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOMS = [
    "activities", "agent", "api", "console", "gms", "infra", "proxies", "reclaim", "research", "rms", "sdk", "services",
    "simulation", "tetris", "workflows",
]  # fmt: skip
"""The large folders of code. Each has a README of one page."""
SECTIONS = ["Pipeline", "Vocabulary", "Where to start", "Tests", "Contract"]
PAGES = [
    *(f"{room}/README.md" for room in ROOMS),
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "docs/checklists.md",
    "docs/internals.md",
]
MOST_WORDS = 700
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?<![\w/.*<-])[\w-][\w./-]*\.(?:py|sql|md|ya?ml|toml|lock)\b(?!/)")
_NAME = re.compile(r"[A-Za-z_][\w]*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")
"""A word in capitals stands for something that the reader chooses, such as NAME."""


@cache
def _words(checkout: Path) -> frozenset[str]:
    """Returns every identifier in the code, the SQL and the settings of the tree."""
    found: set[str] = set()
    folders = [init.parent for init in checkout.glob("*/__init__.py")] + [checkout / "client", checkout / "sdk"]
    for folder in folders:
        for path in (*folder.rglob("*.py"), *folder.rglob("*.sql")):
            found.update(re.findall(r"[A-Za-z_]\w*", path.read_text()))
    found.update(re.findall(r"[A-Za-z_]\w*", (checkout / "pyproject.toml").read_text()))
    found.update(re.findall(r"^([\w-]+):", (checkout / "Makefile").read_text(), re.MULTILINE))
    return frozenset(found)


@cache
def _file_names(room: Path) -> frozenset[str]:
    """Returns the names of a room's files, without those of virtual environments, which have many."""
    found: set[str] = set()
    for _, folders, files in os.walk(room):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found.update(files)
    return frozenset(found)


def _exists(checkout: Path, room: Path, path: str) -> bool:
    inside = [room, checkout / "sdk", checkout / "client", checkout]
    if room.name in ("client", "sdk"):
        inside += [room / "mizzen", room / "mizzen_client"]
    if any((folder / path).exists() for folder in inside):
        return True
    return "/" not in path and path in _file_names(room)


def _module(checkout: Path, name: str) -> Path | None:
    """Returns the file or folder of a dotted module, else None."""
    home = {"mizzen": "sdk", "mizzen_client": "client"}.get(name.partition(".")[0], "")
    place = checkout / home / name.replace(".", "/")
    return next((found for found in (place.with_suffix(".py"), place) if found.exists()), None)


def _missing(checkout: Path, page: str) -> Iterator[str]:
    text, room = (checkout / page).read_text(), (checkout / page).parent
    for path in _PATH.findall(re.sub(r"https?://\S+", "", text)):
        if not _PLACEHOLDER.search(path.rsplit("/")[-1].rsplit(".")[0]) and not _exists(checkout, room, path):
            yield path
    for command in (body for language, body in _FENCE.findall(text) if language == "sh"):
        yield from (path for path in re.findall(r"tests/[\w/.]+", command) if not (checkout / path).exists())
    for code in _CODE.findall(_FENCE.sub("", text)):
        if "/" in code:
            is_path = re.fullmatch(r"\w[\w./-]+", code) and not _PLACEHOLDER.search(code)
            if is_path and not _exists(checkout, room, code.rstrip("/")):
                yield code
        elif _NAME.fullmatch(code) and not _PATH.fullmatch(code) and not _PLACEHOLDER.fullmatch(code):
            name = code.removesuffix("()")
            while (found := _module(checkout, name)) is None and "." in name:
                name = name.rpartition(".")[0]
            rest = code.removesuffix("()").removeprefix(name if found else "").strip(".")
            words = _words(checkout) if found is None or found.is_dir() else re.findall(r"\w+", found.read_text())
            yield from (code for part in rest.split(".") if part and part not in words)


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_the_page_exists(checkout: Path, page: str) -> None:
    """Paths, modules and identifiers in backticks, and test folders in commands, are in the tree."""
    assert sorted(set(_missing(checkout, page))) == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_page_of_a_room_has_its_sections(checkout: Path, room: str) -> None:
    """Each page has the same sections in the same order, and at most one page of text."""
    text = (checkout / room / "README.md").read_text()
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert [heading for heading in headings if heading in SECTIONS] == SECTIONS
    assert len(_FENCE.sub("", text).split()) <= MOST_WORDS
