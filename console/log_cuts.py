"""What a page of logs leaves out: the tasks with older lines, and the elements of an array that are not shown."""

import re
from collections import Counter
from typing import NamedTuple

_CUT = re.compile(r"--- (?:(?P<job>[^/|]+)/(?P<task>\d+)\| )?older lines are left out")
_LINE = re.compile(r"(?P<job>[a-z0-9-]+)/(?P<task>\d+)\| ")


class CutTask(NamedTuple):
    """A task of which older lines are not shown."""

    job: str
    """Empty: the page shows one task, and lines have no label."""
    task: str
    shown: int
    """Number of its lines that are shown."""


def cut_tasks(text: str, most: int) -> list[CutTask]:
    """Returns the tasks of which a page leaves out older lines. `most`: the most lines that it shows of a task."""
    shown = Counter[tuple[str, str]]()
    cut = set[tuple[str, str]]()
    for line in text.splitlines():
        if found := _CUT.match(line):
            cut.add((found["job"] or "", found["task"] or ""))
        elif not line.startswith("--- "):
            of = _LINE.match(line)
            shown[(of["job"], of["task"]) if of else ("", "")] += 1
    if ("", "") in cut:  # One task, whose own lines may look like labels.
        return [CutTask("", "", shown.total())]
    cut |= {one for one, count in shown.items() if count >= most}
    return [CutTask(*one, shown[one]) for one in sorted(cut)]


def whole_elements(text: str, name: str) -> tuple[str, int]:
    """Returns the elements of an array that a cut text has as a whole, and the index below which the others follow.

    The elements are sorted by index, the highest first. If the text has a part of one element only, it stays.

    Args:
        text: lines of the elements of an array.
        name: of the array.
    """
    found = list(re.finditer(rf"^{re.escape(name)}/(\d+)[#: ]", text, re.MULTILINE))
    if not found:
        return text, 0
    last = int(found[-1][1])
    begin = next(one.start() for one in found if int(one[1]) == last)
    complete = [int(one[1]) for one in found if int(one[1]) != last]
    return (text[:begin], complete[-1]) if complete else (text, last)
