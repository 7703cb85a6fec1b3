"""The scripts in docs/resilient.md."""

import difflib
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "resilient.md"
_SCRIPT = re.compile(r"<!-- (before|after|check): (\w+) -->\n```python\n(.*?)```\n", re.DOTALL)

SCRIPTS: dict[tuple[str, str], str] = {(when, name): text for when, name, text in _SCRIPT.findall(PAGE.read_text())}
"""The text of each script, by its kind (`before`, `after` or `check`) and the name of the integration."""


def script(when: str, name: str, folder: Path) -> Path:
    """Writes a script to a file in `folder`, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{when}.py"
    path.write_text(SCRIPTS[when, name])
    return path


def changed_lines(name: str) -> int:
    """Returns the number of lines that were added, removed or replaced. A replaced line counts once."""
    before, after = SCRIPTS["before", name].splitlines(), SCRIPTS["after", name].splitlines()
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for tag, a, b, c, d in codes if tag != "equal")
