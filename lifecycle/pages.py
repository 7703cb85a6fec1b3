"""The tables of this package as users see them in `docs/lifecycle.md`: Markdown, with a picture that Mermaid draws."""

from collections.abc import Mapping

from domain.phases import PLACED_PHASES, QUEUED_PHASES, TERMINAL_PHASES, Phase
from lifecycle.attempts import Table
from lifecycle.endings import ENDINGS


def picture(following: Mapping[Phase, frozenset[Phase]]) -> str:
    """The phases and which may follow which. `following` as `lifecycle.attempts.NEXT_PHASES`.

    The phases of an attempt are in one box: what may follow any of them has one arrow from the box.
    """
    placed = [phase for phase in Phase if phase in PLACED_PHASES]
    others = [phase for phase in Phase if phase not in PLACED_PHASES]
    from_any = [phase for phase in others if all(phase in following[p] for p in placed)]
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR", "    [*] --> pending", "    state placed {"]
    lines += [f"        {a} --> {b}" for a in placed for b in placed if b in following[a]]
    lines += ["    }"]
    lines += [
        f"    {phase} --> {b}" for phase in Phase if phase in QUEUED_PHASES for b in Phase if b in following[phase]
    ]
    lines += [f"    placed --> {phase}" for phase in from_any]
    lines += [f"    {a} --> {b}" for a in placed for b in others if b in following[a] and b not in from_any]
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
