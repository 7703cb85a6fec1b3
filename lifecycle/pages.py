"""The tables of this package as users see them in `docs/lifecycle.md`: Markdown, with a picture that Mermaid draws."""

from collections.abc import Mapping

from domain.phases import PLACED_PHASES, QUEUED_PHASES, TERMINAL_PHASES, Phase
from lifecycle.attempts import Table
from lifecycle.endings import ENDINGS
from lifecycle.instances import InstancePhase, InstanceTable


def picture(following: Mapping[Phase, frozenset[Phase]]) -> str:
    """The phases and which may follow which. `following` as `lifecycle.attempts.NEXT_PHASES`.

    The queued phases are in one box, the phases of an attempt in another. A phase that may follow every phase of a box
    has one arrow from the box.
    """
    boxes = {"queued": QUEUED_PHASES, "placed": PLACED_PHASES}
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR"]
    for name, own in boxes.items():
        inside = [phase for phase in Phase if phase in own]
        lines += [f"    state {name} {{", *(f"        {phase}" for phase in inside)]
        lines += [f"        {a} --> {b}" for a in inside for b in inside if b in following[a]]
        lines += ["    }"]
    lines += ["    [*] --> pending"]
    for name, own in boxes.items():
        outside = [phase for phase in Phase if phase not in own]
        of_any = [b for b in outside if all(b in following[a] for a in own)]
        lines += [f"    {name} --> {b}" for b in of_any]
        lines += [
            f"    {a} --> {b}" for a in Phase if a in own for b in outside if b in following[a] and b not in of_any
        ]
    lines += [f"    {phase} --> [*]" for phase in Phase if phase in TERMINAL_PHASES]
    return "\n".join([*lines, "```"])


def steps(table: Table) -> str:
    """A version of the table of steps, by step."""
    lines = ["| step | phase | what follows |", "| --- | --- | --- |"]
    for step, row in table.items():
        phase = "as before" if row.phase is None else f"`{row.phase}`" + (", if needed" if row.may_pass else "")
        after = "; ".join(f"{event}: **{target}**" for event, target in row.after.items())
        lines.append(f"| {step} | {phase} | {after} |")
    return "\n".join(lines)


def endings() -> str:
    """How an attempt's ending is judged, by row: the first that applies decides."""
    lines = ["| the attempt | then it is |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {row.name} | `{row.phase}` |" for row in ENDINGS)])


def instance_picture(following: Mapping[InstancePhase, frozenset[InstancePhase]]) -> str:
    """The phases of an instance and which may follow which."""
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR", f"    [*] --> {InstancePhase.REQUESTED}"]
    lines += [f"    {a} --> {b}" for a in InstancePhase for b in InstancePhase if b in following[a]]
    return "\n".join([*lines, f"    {InstancePhase.GONE} --> [*]", "```"])


def instance_steps(table: InstanceTable) -> str:
    """A version of the table of an instance's steps."""
    lines = ["| step | phase | what follows |", "| --- | --- | --- |"]
    for step, row in table.items():
        after = "; ".join(f"{event}: **{target or 'gone'}**" for event, target in row.after.items())
        lines.append(f"| {step} | `{row.phase}` | {after} |")
    return "\n".join(lines)
