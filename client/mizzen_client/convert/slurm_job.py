"""Converts batch scripts with `#SBATCH` lines."""

import re
from pathlib import PurePath
from typing import Any

from mizzen_client.convert import slurm_options as table
from mizzen_client.convert.conversion import (
    RESERVED,
    SET_BY_MIZZEN,
    VARIABLE,
    CannotConvert,
    Conversion,
    named,
    shown,
)
from mizzen_client.convert.quantities import duration_text
from mizzen_client.convert.slurm_arrays import Elements, dependencies_of, elements_of, not_before_of
from mizzen_client.convert.slurm_mail import notify_of
from mizzen_client.convert.slurm_options import SlurmOption, options_of
from mizzen_client.convert.slurm_resources import Options, SlurmRequest, seconds_of
from mizzen_client.convert.slurm_script import Converted, SlurmAllocation, convert_body
from mizzen_client.convert.slurm_variables import exports
from mizzen_client.documents import without_empty

_DIRECTIVE = re.compile(r"#SBATCH(?:\s+(.*))?$")
_SHELL = re.compile(r"#!\s*\S*/(?:env\s+(?:-S\s+)?)?(?:ba|da|z|k)?sh(?:\s+.*)?$")
_SIGNAL = re.compile(r"(?:([RB]{1,2}):)?(?:SIG)?([A-Z]+[12]?|[0-9]{1,2})(?:@([0-9]{1,5}))?")
_SIGNALS = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT"}
_MOST_GRACE_S = 3600
_DEFAULT_NOTICE_S = 60
_MOST_BYTES = 96 << 10
_SCRIPT = "batch-script"
_FILE_NAMES = re.compile(r"%[AaJjNnstux]")


def convert(text: str, name: str) -> Conversion:
    """Convert the batch script `text`; `name` is that of its file, without the folder.

    Raises:
        CannotConvert: see the message.
    """
    return _Batch(text, name).convert()


class _Batch:
    def __init__(self, text: str, name: str) -> None:
        if len(text.encode()) > _MOST_BYTES:
            raise CannotConvert(1, f"a script has at most {_MOST_BYTES} bytes; put the rest into files of `workdir`")
        self._lines = text.split("\n")
        if self._lines[-1] == "":
            self._lines.pop()
        if not self._lines or not self._lines[0].startswith("#!"):
            raise CannotConvert(
                1, "the first line must name the interpreter, such as #!/bin/bash; sbatch refuses this script"
            )
        self._name = name
        self._conversion = Conversion("slurm")
        self._options: Options = {}
        self._body: list[tuple[int, str]] = []

    def convert(self) -> Conversion:
        self._read_lines()
        self._table()
        if not any(text.strip() and not text.lstrip().startswith("#") for _, text in self._body):
            raise CannotConvert(len(self._lines), "the script has no command")
        request = SlurmRequest(self._conversion, self._options)
        if option := self._options.get("constraint"):
            request.constrain(option)
        signal, grace = self._signal()
        body = convert_body(
            self._conversion, self._body, SlurmAllocation(request.nodes, request.tasks, signal or "TERM")
        )
        self._note_signal(signal, body)
        if request.nodes > 1 and not body.is_spread:
            option = self._options["nodes"] if "nodes" in self._options else self._options["ntasks"]
            why = "nothing in the script starts tasks on the other nodes (no srun): there is one task, with one node"
            self._conversion.lost(option.line, option.text, why)
        self._conversion.documents.append(self._document(request, body, grace))
        return self._conversion

    def _read_lines(self) -> None:
        is_header = True
        for number, line in enumerate(self._lines[1:], 2):
            found = _DIRECTIVE.match(line)
            if found and is_header:
                self._add(number, found[1] or "")
                continue
            if found:
                self._conversion.dropped(
                    number, shown(line), "sbatch ignores #SBATCH lines after the first command, too"
                )
            is_header = is_header and (not line.strip() or line.lstrip().startswith("#"))
            self._body.append((number, line))

    def _add(self, number: int, text: str) -> None:
        if text.split(maxsplit=1)[:1] in (["hetjob"], ["packjob"]):
            raise CannotConvert(
                number, f"#SBATCH {text}: convert each part of a heterogeneous job by itself, as a job of a document"
            )
        if not text.strip():
            self._conversion.dropped(number, "#SBATCH", "the line has no option")
        for option in options_of(number, text):
            if before := self._options.get(option.name):
                self._conversion.dropped(before.line, before.text, f"line {number} gives --{option.name} again")
            self._options[option.name] = option

    def _table(self) -> None:
        """Remark on the options that need no calculation."""
        for option in self._options.values():
            if option.name == "kill-on-invalid-dep" and option.value == "no":
                self._conversion.carried(option.line, option.text, "if_never")
            elif option.name in table.DROPPED:
                self._conversion.dropped(option.line, option.text, table.DROPPED[option.name])
            elif option.name in table.LOST:
                self._conversion.lost(option.line, option.text, table.LOST[option.name])
            elif option.name not in table.READ:
                self._conversion.lost(option.line, option.text, "sbatch has no such option; check its spelling")

    def _document(self, request: SlurmRequest, body: Converted, grace: str | None) -> dict[str, Any]:
        elements = self._elements(body)
        files, run = self._scripts(request, body, elements)
        name = self._options.get("job-name")
        limits = {"max_runtime": self._time(), "retries": self._retries()}
        env = self._env()
        job = {
            "name": "main",
            "tasks": request.tasks if body.is_spread else 1,
            "resources": request.resources(is_spread=body.is_spread),
            "image": body.image,
            "run": run,
            "env": env,
        }
        after, not_before = self._options.get("dependency"), self._options.get("begin")
        given = named(self._conversion, name.line if name else 1, name.text if name else "the file's name",
                      name.value if name else PurePath(self._name).stem)  # fmt: skip
        keeps = self._options.get("kill-on-invalid-dep")
        return without_empty({
            "version": 1,
            "name": given,
            "workdir": self._workdir(),
            "array": elements.array if elements else None,
            "after": dependencies_of(self._conversion, after, given, is_array=elements is not None) if after else None,
            "if_never": "keep" if keeps and keeps.value == "no" else None,
            "not_before": not_before_of(self._conversion, not_before) if not_before else None,
            "notify": notify_of(self._conversion, self._options.get("mail-type"), self._options.get("mail-user"),
                                is_array=elements is not None),
            "checkpoint": {"grace": grace} if grace else None,
            "limits": without_empty(limits),
            "files": files,
            "jobs": [without_empty(job)],
        })  # fmt: skip

    def _elements(self, body: Converted) -> Elements | None:
        option = self._options.get("array")
        if option is None:
            return None
        return elements_of(self._conversion, option)

    def _scripts(self, request: SlurmRequest, body: Converted, elements: Elements | None) -> tuple[dict[str, str], str]:
        """Return the files and the script of the job."""
        first, script = self._lines[0], body.script.strip("\n")
        self._conversion.carried(1, shown(first), "jobs[0].run")
        values = dict(elements.variables) if elements else {}
        values["SLURM_CPUS_PER_TASK"] = str(request.cores)
        values["SLURM_CPUS_ON_NODE"] = str(request.cores * (1 if body.is_spread else request.in_node))
        values["SLURM_JOB_CPUS_PER_NODE"] = values["SLURM_CPUS_ON_NODE"]
        values |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(request.nodes))
        values |= dict.fromkeys(("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), str(request.in_node))
        values["SLURM_NODEID"], values["SLURM_LOCALID"] = request.places
        if not body.is_spread:
            values |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(request.tasks))
        elif request.gpus_of_node and request.in_node > 1:
            values["SLURM_LOCALID"] = "0"  # The device of the task; the other GPUs of its node are hidden.
        is_step = body.is_spread or (body.has_steps and request.tasks == 1)
        found, unknown = exports(script, values, is_step=is_step, has_array=elements is not None)
        self._note_variables(found, unknown, request)
        prologue = [f"export {name}={variable.value}" for name, variable in found.items()]
        if _SHELL.match(first):
            return {}, "\n".join([first, *prologue, script]) + "\n"
        command = f"exec {first[2:].strip()} ./{_SCRIPT}"
        return {_SCRIPT: f"{first}\n{script}\n"}, "\n".join(["#!/bin/bash", *prologue, command]) + "\n"

    def _note_variables(self, found: dict[str, Any], unknown: set[str], request: SlurmRequest) -> None:
        for name, variable in found.items():
            line = self._line_of(name)
            if line is not None and variable.differs:
                self._conversion.changed(line, f"${name}", "jobs[0].run", variable.differs)
            elif line is not None and name == "SLURM_LOCALID" and variable.value == "0":
                why = "it is 0 in each task, because a task sees only its own GPUs"
                self._conversion.changed(line, f"${name}", "jobs[0].run", why)
            elif line is not None:
                self._conversion.carried(line, f"${name}", "jobs[0].run")
        for name in sorted(unknown):
            self._conversion.lost(self._line_of(name) or 1, f"${name}", "mizzen has no such value: write it into `env`")

    def _line_of(self, name: str) -> int | None:
        """Return the first line of the script that names a variable."""
        pattern = re.compile(rf"\b{name}\b")
        return next((line for line, text in self._body if pattern.search(text)), None)

    def _env(self) -> dict[str, str]:
        option = self._options.get("export")
        env: dict[str, str] = {}
        if option is None:
            return env
        for part in option.value.split(","):
            name, equals, value = part.partition("=")
            if part in ("NONE", "NIL"):
                self._conversion.carried(option.line, option.text, "jobs[0].env")
            elif part == "ALL":
                why = (
                    "the variables of the submitting shell are not copied: put those that the program needs into `env`"
                )
                self._conversion.changed(option.line, f"--export={part}", "jobs[0].env", why)
            elif equals and RESERVED.match(name):
                self._conversion.dropped(option.line, f"--export={part}", SET_BY_MIZZEN)
            elif equals and VARIABLE.fullmatch(name):
                env[name] = value
                self._conversion.carried(option.line, f"--export={part}", f"jobs[0].env.{name}")
            else:
                why = "the value is in the submitting shell: give it with `mizzen submit --env NAME=VALUE`"
                self._conversion.lost(option.line, f"--export={part}", why)
        return env

    def _workdir(self) -> str:
        for name in ("output", "error", "input"):
            if option := self._options.get(name):
                self._note_file(option)
        option = self._options.get("chdir")
        if option is None:
            why = "the files of the folder are copied to each task; changes stay on its machine until the end"
            self._conversion.changed(1, "the working directory", "workdir", why)
            return "."
        if _FILE_NAMES.search(option.value):
            raise CannotConvert(option.line, f"{option.text}: write a folder without %")
        why = "the files of the folder are copied to each task; changes stay on its machine until the end"
        self._conversion.changed(option.line, option.text, "workdir", why)
        return option.value

    def _note_file(self, option: SlurmOption) -> None:
        if option.name == "input" and option.value not in ("/dev/null", "none"):
            self._conversion.lost(option.line, option.text, "redirect the input in the script: COMMAND < FILE")
        elif option.name == "input":
            self._conversion.carried(option.line, option.text, "")
        else:
            why = "mizzen keeps the output of each task: `mizzen logs NAME`"
            self._conversion.dropped(option.line, option.text, why)

    def _time(self) -> str | None:
        option = self._options.get("time")
        if option is None:
            return None
        seconds = seconds_of(option)
        if seconds is None:
            self._conversion.carried(option.line, option.text, "limits.max_runtime (none)")
            return None
        why = "the limit is on the running time of all attempts together, not of each"
        self._conversion.changed(option.line, option.text, "limits.max_runtime", why)
        return duration_text(max(1, seconds))

    def _retries(self) -> dict[str, int] | None:
        if option := self._options.get("requeue"):
            why = "it returns to the queue after preemption or a lost machine; `limits.retries` is for its own failures"
            self._conversion.changed(option.line, option.text, "limits.retries", why)
        option = self._options.get("no-requeue")
        if option is None:
            return None
        self._conversion.carried(option.line, option.text, "limits.retries")
        return {"preempted": 0, "lost": 0}

    def _signal(self) -> tuple[str | None, str | None]:
        """Return the name of the signal, and the time between it and SIGKILL."""
        option = self._options.get("signal")
        if option is None:
            return None, None
        found = _SIGNAL.fullmatch(option.value.upper())
        if found is None:
            raise CannotConvert(
                option.line, f"{option.text}: write a signal such as USR1@120, with B: for the script only"
            )
        notice_s = int(found[3] or _DEFAULT_NOTICE_S)
        if notice_s > _MOST_GRACE_S:
            why = "the time from the notice to the end is at most an hour"
            self._conversion.changed(option.line, option.text, "checkpoint.grace", why)
        return _SIGNALS.get(found[2], found[2]), duration_text(min(notice_s, _MOST_GRACE_S))

    def _note_signal(self, signal: str | None, body: Converted) -> None:
        option = self._options.get("signal")
        if option is None:
            return
        if signal == "TERM":
            self._conversion.carried(option.line, option.text, "checkpoint.grace")
        elif body.handles_signal:
            why = f"SIGTERM is sent instead of SIG{signal}; the script's trap is for it"
            self._conversion.changed(option.line, option.text, "checkpoint.grace", why)
        else:
            why = f"SIGTERM instead of SIG{signal}: let the program handle it (`checkpoint.grace` is the time)"
            self._conversion.lost(option.line, option.text, why)
