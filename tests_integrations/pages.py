"""The scripts of docs/resilient.md."""

import difflib
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "resilient.md"
_SCRIPT = re.compile(r"<!-- (before|after|check): (\w+) -->\n```python\n(.*?)```\n", re.DOTALL)

SCRIPTS: dict[tuple[str, str], str] = {(when, name): text for when, name, text in _SCRIPT.findall(PAGE.read_text())}
"""`before`, `after` or `check`, and the integration, to its text."""


def script(when: str, name: str, folder: Path) -> Path:
    """One of them as a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{when}.py"
    path.write_text(SCRIPTS[when, name])
    return path


def changed_lines(name: str) -> int:
    """Lines that were added, removed or replaced; one that replaces another is one."""
    before, after = SCRIPTS["before", name].splitlines(), SCRIPTS["after", name].splitlines()
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for tag, a, b, c, d in codes if tag != "equal")
