"""Renders the tables of `domain.lifecycle` for `docs/lifecycle.md`, as Markdown tables and Mermaid diagrams."""

from collections.abc import Mapping

from domain.lifecycle.attempts import Table
from domain.lifecycle.endings import ENDINGS
from domain.lifecycle.instances import InstancePhase, InstanceTable
from domain.phases import PLACED_PHASES, QUEUED_PHASES, TERMINAL_PHASES, Phase


def picture(following: Mapping[Phase, frozenset[Phase]]) -> str:
    """Returns a Mermaid diagram of the phases and their transitions, given as in
    `domain.lifecycle.attempts.NEXT_PHASES`.

    The queued phases are in one box, and the phases of an attempt in another. A phase that may follow every phase of a
    box has one arrow from the box.
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
    """Returns a version of the table of an attempt's steps, as Markdown."""
    lines = ["| step | phase | next step or end |", "| --- | --- | --- |"]
    for step, row in table.items():
        phase = "unchanged" if row.phase is None else f"`{row.phase}`" + (", if needed" if row.may_pass else "")
        after = "; ".join(f"{event}: **{target}**" for event, target in row.after.items())
        lines.append(f"| {step} | {phase} | {after} |")
    return "\n".join(lines)


def endings() -> str:
    """Returns the decision table `domain.lifecycle.endings.ENDINGS` as Markdown."""
    lines = ["| how the attempt ended | next phase |", "| --- | --- |"]
    for row in ENDINGS:
        doubted = ", if confirmed; else `pending`" if row.confirmed and row.phase is not Phase.PENDING else ""
        lines.append(f"| {row.name} | `{row.phase}`{doubted} |")
    return "\n".join(lines)


def instance_picture(following: Mapping[InstancePhase, frozenset[InstancePhase]]) -> str:
    """Returns a Mermaid diagram of an instance's phases and their transitions."""
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR", f"    [*] --> {InstancePhase.REQUESTED}"]
    lines += [f"    {a} --> {b}" for a in InstancePhase for b in InstancePhase if b in following[a]]
    return "\n".join([*lines, f"    {InstancePhase.GONE} --> [*]", "```"])


def instance_steps(table: InstanceTable) -> str:
    """Returns a version of the table of an instance's steps, as Markdown."""
    lines = ["| step | phase | next step |", "| --- | --- | --- |"]
    for step, row in table.items():
        after = "; ".join(f"{event}: **{target or 'gone'}**" for event, target in row.after.items())
        lines.append(f"| {step} | `{row.phase}` | {after} |")
    return "\n".join(lines)
