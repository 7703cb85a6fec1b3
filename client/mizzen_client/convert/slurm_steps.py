"""The `srun` commands of a batch script: their options, and the commands that remain without them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mizzen_client.convert.conversion import CannotConvert
from mizzen_client.convert.slurm_options import FLAGS, LETTERS

_SRUN = re.compile(r"(?<![\w./$:=-])srun(?=\s)")
_QUOTED = re.compile(r"(?:^|[\s;])\w+=([\"'])$")
"""An assignment of a command to a variable, such as `LAUNCHER="srun ..."`."""
_VARIABLE = re.compile(r"[\"']?\$\{?(\w+)\}?[\"']?")
_BEFORE = 500
"""Number of characters before a word that are examined to decide whether it is a command."""
_GAP = re.compile(r"(?:\s|\\\n)*")
_WORD = re.compile(r"""(?:[^\s"'\\]|"(?:[^"\\]|\\.)*"|'[^']*'|\\[^\n])+""")
_OWN_LETTERS = {**LETTERS, "l": "label", "u": "unbuffered", "K": "kill-on-bad-exit", "E": "preserve-env",
                "X": "disable-status", "r": "relative", "W": "wait", "Z": "no-allocate", "T": "threads"}  # fmt: skip
_OWN_FLAGS = FLAGS - {"wait"} | {
    "container-mount-home", "container-remap-root", "container-writable", "disable-status", "exact", "exclusive",
    "interactive", "kill-on-bad-exit", "label", "multi-prog", "no-allocate", "no-container-mount-home", "overlap",
    "preserve-env", "pty", "unbuffered",
}  # fmt: skip
_ALL = re.compile(r"""["']?\$\{?SLURM_(?:NTASKS|NPROCS|NNODES|JOB_NUM_NODES|NTASKS_PER_NODE)\}?["']?""")
STEP_LOST: Mapping[str, str] = {
    "container-mounts": "the image is read-only and sees no folder of the machine: use `workdir`, `tables` or `files`",
    "container-workdir": "the working directory is that of the task, with its files: begin the command with `cd`",
    "mpi": "mizzen provides no PMI: each process of an MPI program would run alone; use torchrun, or one task",
    "relative": "steps on chosen nodes need a document with several jobs",
    "nodelist": "steps on chosen nodes need a document with several jobs",
    "task-prolog": "put the commands into the script", "task-epilog": "put the commands into the script",
    "prolog": "put the commands into the script", "epilog": "put the commands into the script",
    "chdir": "begin the command with `cd`",
    "input": "redirect the input in the command",
    "bcast": "the program is in `workdir`, which each task gets",
    "het-group": "write a document with several jobs",
    "time": "give `limits.max_runtime`, or run the command with `timeout`",
}  # fmt: skip
"""By option of srun: what to do instead. The others concern the speed, the output or the terminal only."""


@dataclass
class SlurmStep:
    """One `srun` command."""

    line: int
    start: int
    """The position of `srun` in the text of its line."""
    command: int
    """The position of the command that it starts."""
    options: dict[str, str] = field(default_factory=dict)
    """Long names to values."""

    def tasks(self, nodes: int, total: int) -> int:
        """Return the number of tasks, for an allocation of `nodes` nodes and `total` tasks.

        Raises:
            CannotConvert: a number is an expression.
        """
        counts = {name: self._count(name) for name in ("ntasks", "nodes", "ntasks-per-node")}
        if counts["ntasks"] is not None:
            return counts["ntasks"] or total
        given_nodes = counts["nodes"]
        if counts["ntasks-per-node"] is not None:
            each = counts["ntasks-per-node"] or total // nodes
            return each * (given_nodes or nodes)
        return total if given_nodes in (None, 0, nodes) else given_nodes * max(1, total // nodes)

    def _count(self, name: str) -> int | None:
        """Return the number that an option gives: 0 means the allocation's number, None that the option is absent."""
        given = self.options.get(name)
        if given is None:
            return None
        if _ALL.fullmatch(given):
            return 0
        if not given.isdecimal() or not given.isascii() or len(given) > 6:
            raise CannotConvert(self.line, f"srun --{name}={given}: write a number; the value cannot be computed here")
        return int(given)


def steps_of(line: int, text: str, assigned: Mapping[str, str]) -> list[SlurmStep]:
    """Return the `srun` commands in a line of a script with its continuation lines.

    `assigned` are the texts of the script's variables: a variable after `srun` may have options.

    Raises:
        CannotConvert: an option's value or the command is missing.
    """
    steps = []
    for found in _SRUN.finditer(text):
        if not _is_code(text, found):
            continue
        quoted = _QUOTED.search(text[max(0, found.start() - _BEFORE) : found.start()])
        end = text.find(quoted[1], found.end()) if quoted else -1
        steps.append(_step(line, text[:end] if end > 0 else text, found.start(), found.end(), assigned, bool(quoted)))
    return steps


def _is_code(text: str, found: re.Match[str]) -> bool:
    before = text[max(0, found.start() - _BEFORE) : found.start()].rpartition("\n")[2]
    if "#" in before and re.search(r"(^|\s)#", before):
        return False
    # A command begins a line, or follows an operator, a keyword, an assignment or another command such as time.
    if _QUOTED.search(before):
        return True
    return bool(re.search(r"(?:^|[;&|({`]|\b(?:then|do|else|time|exec|nohup|if|while|!))\s*(?:\w+=\S*\s+)*$", before))


def _step(line: int, text: str, start: int, position: int, assigned: Mapping[str, str], is_quoted: bool) -> SlurmStep:
    step = SlurmStep(line, start, position)
    while True:
        position = _skip(text, position)
        word = _WORD.match(text, position)
        if word is None and is_quoted:  # The command follows where the variable is used.
            step.command = len(text)
            return step
        if word is None:
            raise CannotConvert(line, "srun: no command follows its options")
        variable = _VARIABLE.fullmatch(word[0])
        if variable and (given := assigned.get(variable[1], "")).startswith("-"):
            step.options.update(_step(line, f"{given} true", 0, 0, {}, False).options)
            position = word.end()
            continue
        if not word[0].startswith("-"):
            step.command = position
            return step
        position = word.end()
        name, equals, value = _named(word[0])
        if not equals and not value and name not in _OWN_FLAGS:
            following = _WORD.match(text, _skip(text, position))
            if following is None:
                raise CannotConvert(line, f"srun {word[0]}: the option needs a value")
            value, position = following[0], following.end()
        step.options[name] = value.strip("\"'")


def _named(word: str) -> tuple[str, bool, str]:
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        return name, bool(equals), value
    name = _OWN_LETTERS.get(word[1:2], word[1:2])
    value = word[2:].removeprefix("=")
    return name, bool(value), "" if name in _OWN_FLAGS else value


def _skip(text: str, position: int) -> int:
    found = _GAP.match(text, position)
    return found.end() if found is not None else position
