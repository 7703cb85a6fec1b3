"""Converts the commands of a batch script: replaces Slurm's commands, and adds remarks about the others."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mizzen_client.convert.conversion import CannotConvert, Carryover, Conversion, Remark, shown
from mizzen_client.convert.slurm_steps import STEP_LOST, SlurmStep, steps_of

_AT_COMMAND = r"((?:^|[;&|({`]|\b(?:then|do|else|if|while|!))[ \t]*(?:\w+=[^\s;&|(){}`]*[ \t]+)*)"
_MODULES = re.compile(rf"{_AT_COMMAND}(module|ml)(?=\s)", re.MULTILINE)
_MPI = re.compile(rf"{_AT_COMMAND}(mpirun|mpiexec)(?=\s)", re.MULTILINE)
_COMMANDS = re.compile(rf"{_AT_COMMAND}(sbatch|squeue|scancel|scontrol|sacct|sinfo|sstat|salloc|sbcast)(?=\s|$)", re.M)
_INSTEAD = {
    "sbatch": "submit the documents one after the other, with `after`",
    "scontrol": "a preempted workload returns to the queue by itself, and a failed one as `limits.retries` says",
    "squeue": "use `mizzen ls` outside of the task", "scancel": "use `mizzen cancel` outside of the task",
    "sacct": "use `mizzen show` outside of the task", "sstat": "use `mizzen show` outside of the task",
    "sinfo": "use `mizzen machines` outside of the task", "salloc": "use `mizzen run`",
    "sbcast": "each task gets the files of `workdir`",
}  # fmt: skip
_INNER = r"(?:[^()]|\([^()]*\))*"
_HOSTS = re.compile(rf"(<?)(?:\$\({_INNER}|(?<=<)\({_INNER}|`[^`]*)scontrol\s+show\s+hostnames?\b{_INNER}(?:\)|`)")
_HOST = re.compile(rf"\$\(\s*srun\s{_INNER}hostname\b{_INNER}\)|`\s*srun\s[^`]*hostname\b[^`]*`")
_RENDEZVOUS = re.compile(r"\s*(?:export\s+)?(MASTER_ADDR|MASTER_PORT|WORLD_SIZE)=[^;&|]*(?:\$\(.*\)[\"']?)?\s*$", re.S)
_TRAP = re.compile(
    r"(\btrap\s+(?:'[^']*'|\"[^\"]*\"|\S+)[ \t]+)((?:[A-Z0-9]+[ \t]+)*[A-Z0-9]+)(?=[ \t]*(?:$|[;&#]))", re.M
)
_HOME = re.compile(r"(?<![\w./])~/|\$\{?HOME\b|\b(?:conda|mamba|micromamba)\s+activate\b|\bsource\s+activate\b")
_CONTAINER = re.compile(rf"{_AT_COMMAND}(singularity|apptainer|enroot|docker|podman)(?=\s)", re.MULTILINE)
_FOLDER = re.compile(r"(?:^|[;&|]\s*)cd\s+[\"']?/(?!tmp)[^\s;&|]*", re.MULTILINE)
_SITE = re.compile(
    r"\$\{?(SCRATCH|WORK|PROJECT|GROUP_HOME|LOCAL_?SCRATCH|JOBSCRATCH|TMPDIR|USER|LOGNAME|HOSTNAME|PBS_\w+)\b"
)
_PATHS = re.compile(
    r"(?<![\w.$}/:@*~-])/(?!(?:usr|s?bin|opt|etc|dev|proc|sys|tmp|var/tmp|lib(?:64)?)\b)[A-Za-z][\w.-]*/\S*"
)


@dataclass(frozen=True)
class SlurmAllocation:
    """The resources that the options request."""

    nodes: int
    tasks: int
    """Tasks of a step that names no number."""
    signal: str
    """The signal before the end of the time, `TERM` by default."""


@dataclass(frozen=True)
class Converted:
    """The commands for mizzen's tasks."""

    script: str
    is_spread: bool
    """Whether each task runs the script, instead of the first one only."""
    has_steps: bool
    """Whether the script calls `srun`."""
    image: str | None
    handles_signal: bool
    """Whether a trap of the script handles the allocation's signal."""


_ASSIGNED = re.compile(r"\s*(?:export\s+)?(\w+)=(?:([\"'])([^\"']*)\2|(\S*))\s*$")
_LONGEST = 16 << 10
"""Characters in a line with its continuation lines."""


def convert_body(conversion: Conversion, lines: list[tuple[int, str]], allocation: SlurmAllocation) -> Converted:
    """Return the commands in `lines`, which have their numbers in the source.

    Raises:
        CannotConvert: a step starts tasks in a way that a document cannot express.
    """
    return _Body(conversion, lines, allocation).convert()


class _Body:
    def __init__(self, conversion: Conversion, lines: list[tuple[int, str]], allocation: SlurmAllocation) -> None:
        self._conversion = conversion
        self._allocation = allocation
        self._groups = list(_joined(lines))
        found = [_ASSIGNED.match(text) for _, text in self._groups]
        self._assigned = {
            one[1]: (one[3] or one[4] or "").replace("\\\n", " ").strip() for one in found if one is not None
        }
        for line, text in self._groups:
            if len(text) > _LONGEST:
                raise CannotConvert(line, f"a line with more than {_LONGEST} characters: break it into several")
        self._image: str | None = None
        self._traps = False

    def convert(self) -> Converted:
        steps = [step for line, text in self._groups for step in self._steps_of(line, _HOST.sub("", text))]
        is_spread = self._decide(steps)
        if is_spread:
            self._say_spread()
        out: list[str] = []
        kept: list[tuple[int, int]] = []
        for line, text in self._groups:
            edited = self._edited(line, text, is_spread)
            out.append(edited)
            last = line + text.count("\n")
            if edited == text:
                kept.append((line, last))
        self._note_kept(kept)
        return Converted("\n".join(out), is_spread, bool(steps), self._image, self._traps)

    def _steps_of(self, line: int, text: str) -> list[SlurmStep]:
        return steps_of(line, text, self._assigned)

    def _decide(self, steps: list[SlurmStep]) -> bool:
        """Return whether each of several tasks runs the script."""
        given, counts = self._allocation, [step.tasks(self._allocation.nodes, self._allocation.tasks) for step in steps]
        for step, count in zip(steps, counts, strict=True):
            if "multi-prog" in step.options:
                raise CannotConvert(step.line, "srun --multi-prog: write a document with one job for each program")
            if count not in (1, given.tasks):
                message = (
                    f"this step has {count} of the job's {given.tasks} tasks; a document starts all tasks of a job"
                )
                raise CannotConvert(step.line, f"{message}: write a job for each such step")
        is_spread = given.tasks > 1 and given.tasks in counts
        if given.nodes > 1 and not is_spread and steps:
            message = (
                f"steps of one task on {given.nodes} nodes: submit them as the elements of an --array with --nodes=1"
            )
            raise CannotConvert(steps[0].line, message)
        return is_spread

    def _say_spread(self) -> None:
        first = next((line for line, text in self._groups if text.strip() and not text.lstrip().startswith("#")), 1)
        why = (
            f"each of the {self._allocation.tasks} tasks runs the whole script, and steps do not wait for each other; "
            "in Slurm it runs once, and srun starts the tasks"
        )
        self._conversion.changed(first, "the script", "jobs[0].run", why)

    def _edited(self, line: int, text: str, is_spread: bool) -> str:
        code = text.lstrip()
        if not code or code.startswith("#"):
            return text
        text = self._addresses(line, text, is_spread)
        text = self._steps(line, text, is_spread)
        text = self._without(line, text)
        text = self._mpi(line, text)
        text = self._signals(line, text)
        self._places(line, text)
        return text

    def _addresses(self, line: int, text: str, is_spread: bool) -> str:
        """Replace commands that ask Slurm for the host names."""
        if is_spread and (found := _RENDEZVOUS.fullmatch(text)):
            self._conversion.changed(
                line, shown(text), "jobs[0].run", f"left out: mizzen sets {found[1]} for each task"
            )
            return f": # mizzen sets {found[1]}"
        edited = _HOSTS.sub(lambda found: '<(echo "$MASTER_ADDR")' if found[1] else "$MASTER_ADDR", text)
        edited = _HOST.sub("$MASTER_ADDR", edited)
        if edited != text:
            why = "it has only MASTER_ADDR, the address of the first task's machine"
            self._conversion.changed(line, shown(text), "jobs[0].run", why)
        return edited

    def _steps(self, line: int, text: str, is_spread: bool) -> str:
        """Remove `srun` and its options."""
        for step in reversed(self._steps_of(line, text)):
            source = " ".join(
                ["srun", *(f"--{name}={value}" if value else f"--{name}" for name, value in step.options.items())]
            )
            for name in step.options.keys() & STEP_LOST.keys():
                if (name, step.options[name]) != ("mpi", "none"):
                    self._conversion.lost(line, f"srun --{name}={step.options[name]}", STEP_LOST[name])
            if image := step.options.get("container-image"):
                self._image = image.removeprefix("docker://").replace("#", "/", 1)
                self._conversion.carried(line, f"srun --container-image={image}", "jobs[0].image")
            alone = is_spread and step.tasks(self._allocation.nodes, self._allocation.tasks) == 1
            if alone:
                why = "only task 0 runs this step, and the others do not wait: do it in a workload before (`after`)"
                self._conversion.lost(line, source, why)
            else:
                self._conversion.changed(
                    line, source, "jobs[0].tasks", "mizzen starts the tasks; the options are not needed"
                )
            text = text[: step.start] + ('[ "$RANK" != 0 ] || ' if alone else "") + text[step.command :]
        return text

    def _without(self, line: int, text: str) -> str:
        """Make commands of Slurm and of environment modules do nothing."""
        text = without_modules(self._conversion, line, text)
        if re.search(r"(?<![\w./$-])srun(?=[\s\"'])", text):
            why = "mizzen starts the tasks: remove srun and its options from this line"
            self._conversion.lost(line, shown(text), why)
        for found in _COMMANDS.finditer(text):
            self._conversion.lost(line, _command(text, found), f"Slurm does not run this task; {_INSTEAD[found[2]]}")
        return _COMMANDS.sub(r"\1: \2", text)

    def _mpi(self, line: int, text: str) -> str:
        tasks = self._allocation.tasks
        for found in _MPI.finditer(text):
            if self._allocation.nodes > 1:
                message = f"{found[2]} starts its processes on other nodes through Slurm, which mizzen does not replace"
                raise CannotConvert(line, f"{message}: use one node, or torchrun with one task for each node")
            if tasks > 1 and not re.search(r"\s-{1,2}(?:n|np|c)\s", text):
                why = f"-n {tasks} is added, which {found[2]} took from Slurm"
                self._conversion.changed(line, found[2], "jobs[0].run", why)
                text = _MPI.sub(rf"\1\2 -n {tasks}", text)
        return text

    def _signals(self, line: int, text: str) -> str:
        """Rewrite traps to handle SIGTERM, the only notice that mizzen sends."""

        def on_term(found: re.Match[str]) -> str:
            names = [name.removeprefix("SIG") for name in found[2].split()]
            numbers = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT"}
            names = [numbers.get(name, name) for name in names]
            self._traps = self._traps or self._allocation.signal in names
            if self._allocation.signal not in names or self._allocation.signal == "TERM":
                return found[0]
            kept = dict.fromkeys("TERM" if name == self._allocation.signal else name for name in names)
            why = f"the trap is for TERM, because mizzen sends SIGTERM and not SIG{self._allocation.signal}"
            self._conversion.changed(line, shown(text), "jobs[0].run", why)
            return f"{found[1]}{' '.join(kept)}"

        return _TRAP.sub(on_term, text)

    def _places(self, line: int, text: str) -> None:
        """Remark on paths and variables that a task does not have."""
        if found := _CONTAINER.search(text):
            why = "the tasks of a job with an `image` run in it; machines may not have this program"
            self._conversion.lost(line, shown(text[found.start(1) :]), why)
        if found := _FOLDER.search(text):
            why = "a task begins in its working directory, which has the files of `workdir`: leave it out"
            self._conversion.lost(line, shown(found[0].strip(" ;&")), why)
        if found := _HOME.search(text):
            why = (
                "HOME is the working directory of the task, without the files of your home: make the environment in "
                "`setup`, or give the job an `image`"
            )
            self._conversion.lost(line, shown(text[found.start() :]), why)
        if found := _SITE.search(text):
            self._conversion.lost(line, f"${found[1]}", "mizzen does not set it: give it a value in `env`")
        for path in dict.fromkeys(found[0].rstrip("\"';)") for found in _PATHS.finditer(text)):
            why = "the path must exist on the machines; use `workdir` for code and `tables` or a bucket for data"
            self._conversion.changed(line, shown(path), "jobs[0].run", why)

    def _note_kept(self, kept: list[tuple[int, int]]) -> None:
        """Add a remark for each range of unchanged lines."""
        begin = end = 0
        for first, last in [*kept, (0, 0)]:
            if first == end + 1 and end:
                end = last
                continue
            if begin:
                self._note_range(begin, end)
            begin, end = first, last

    def _note_range(self, begin: int, end: int) -> None:
        last = end if end > begin else None
        texts = dict(self._groups)
        if all(not text.strip() for line, text in texts.items() if begin <= line <= end):
            return
        source = "the script's lines" if last else shown(texts[begin])
        remark = Remark(begin, source, Carryover.CARRIED, "jobs[0].run")
        self._conversion.remarks.append(replace(remark, last_line=last))


def _command(text: str, found: re.Match[str]) -> str:
    return shown(re.split(r"[;&|)\n]", text[found.start(2) :], maxsplit=1)[0])


def _joined(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield each line with its continuation lines."""
    held: list[tuple[int, str]] = []
    for number, text in lines:
        held.append((number, text))
        if not text.endswith("\\") or text.lstrip().startswith("#"):
            yield held[0][0], "\n".join(one for _, one in held)
            held = []
    if held:
        yield held[0][0], "\n".join(one for _, one in held)


def without_modules(conversion: Conversion, line: int, text: str) -> str:
    """Return shell commands in which those of environment modules do nothing. Each is reported as lost."""
    for found in _MODULES.finditer(text):
        why = "mizzen has no environment modules: give the job an `image`, or install the software in `setup`"
        conversion.lost(line, _command(text, found), why)
    return _MODULES.sub(r"\1: \2", text)
