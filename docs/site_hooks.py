"""Hooks of mkdocs: pages of the site that live outside `docs/`, and the links between them and the pages inside."""

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.txt",
    "client/README.md": "rooms/client.md",
    "sdk/README.md": "rooms/sdk.md",
    "examples/README.md": "examples/index.md",
}
"""Files of the repository outside `docs/`, and where each is on the site."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def _site_path(repository_path: str) -> str:
    """Returns the place on the site of a file of the repository; an unknown file keeps its path, and is reported."""
    inside = PurePosixPath(repository_path)
    if inside.parts[:1] == ("docs",):
        return str(inside.relative_to("docs"))
    return PAGES.get(repository_path, repository_path)


def _relinked(markdown: str, repository_path: str) -> str:
    """Returns a page's text with relative links between repository files as relative links between pages."""
    here, folder = _site_path(repository_path), posixpath.dirname(repository_path)

    def link(found: re.Match[str]) -> str:
        target = _site_path(posixpath.normpath(posixpath.join(folder, found[2])))
        return f"{found[1]}{posixpath.relpath(target, posixpath.dirname(here) or '.')}{found[3] or ''}{found[4]}"

    return _LINK.sub(link, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that live outside `docs/`."""
    root = Path(config.config_file_path).parent
    for init in sorted(root.glob("*/__init__.py")):
        if (init.parent / "README.md").exists():
            PAGES[f"{init.parent.name}/README.md"] = f"rooms/{init.parent.name}.md"
    for readme in sorted(root.glob("examples/*/README.md")):
        PAGES[readme.relative_to(root).as_posix()] = f"examples/{readme.parent.name}.md"
    for source, place in PAGES.items():
        files.append(File.generated(config, place, content=(root / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rewrites a page's links to repository files."""
    sources = {place: source for source, place in PAGES.items()}
    return _relinked(markdown, sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
