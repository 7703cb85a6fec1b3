"""The fields of a document that the parameters of a submitit executor determine."""

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mizzen_client.convert.conversion import CannotConvert, Conversion, named, shown
from mizzen_client.convert.quantities import duration_text, gpu_model, memory_text
from mizzen_client.convert.slurm_options import SlurmOption
from mizzen_client.convert.slurm_resources import size_of
from mizzen_client.convert.slurm_script import without_modules

_DEFAULT_MIN = 5
_GUESSED_BYTES_OF_CORE = 4 << 30
_GPUS = ("gpus_per_node", "num_gpus", "gres", "gpus_per_task")


@dataclass
class SubmititExecutor:
    """An executor with its parameters."""

    line: int
    kind: str
    parameters: dict[str, tuple[int, str, Any]] = field(default_factory=dict)
    """Names without `slurm_`, to the line, the name in the source, and the value."""


class ExecutorShape:
    """Converts the parameters of a submitit executor into fields of a document. Remarks on a parameter appear once."""

    def __init__(self, conversion: Conversion, executor: SubmititExecutor) -> None:
        self._conversion, self._executor = conversion, executor
        self._given = executor.parameters

    def _take(self, name: str, target: str, why: str = "") -> Any:
        """Return the value of a parameter, or None if it is absent."""
        if name not in self._given:
            return None
        line, source, value = self._given[name]
        text = f"{source}={shown(repr(value), 40)}"
        if why:
            self._conversion.changed(line, text, target, why)
        else:
            self._conversion.carried(line, text, target)
        return value

    def drop(self, name: str, why: str) -> None:
        """Add the remark that a parameter is not needed."""
        line, source, value = self._given[name]
        self._conversion.dropped(line, f"{source}={shown(repr(value), 40)}", why)

    def _number(self, name: str, target: str, why: str = "") -> int | None:
        value = self._take(name, target, why)
        if value is None:
            return None
        if isinstance(value, str) and value.isdecimal() and len(value) < 10:
            value = int(value)
        if type(value) is not int or value < 0:
            line, source, _ = self._given[name]
            raise CannotConvert(line, f"{source}={shown(repr(value))}: must be a whole number")
        return value

    def name(self, default: str, number: int) -> str:
        """Return the name of the workload. `number` distinguishes several submissions; 0 if there is only one."""
        suffix = f"-{number}" if number else ""
        if "name" not in self._given:
            why = f"the name is {default}{suffix}, after the file"
            self._conversion.changed(self._executor.line, "no name", "name", why)
            return f"{default[:50]}{suffix}"
        line, source, value = self._given["name"]
        return named(self._conversion, line, f"{source}={value!r}", f"{str(value)[:50]}{suffix}")

    def throttle(self) -> dict[str, int]:
        """Return the throttle of an array, which submitit sets to 256 by default."""
        given = self._number("array_parallelism", "array.throttle")
        return {"throttle": given} if given else {}

    def tasks(self) -> int | None:
        """Return the number of tasks."""
        nodes = self._number("nodes", "jobs[0].tasks") or 1
        each = self._number("tasks_per_node", "jobs[0].tasks") or 1
        self._nodes, self._each = nodes, each
        return nodes * each if nodes * each > 1 else None

    def resources(self) -> dict[str, Any]:
        """Return the resources of a task; call `tasks` first."""
        accelerators, gpus = self._gpus()
        cores = self._number("cpus_per_task", "jobs[0].resources.cpus") or 1
        if (per_gpu := self._number("cpus_per_gpu", "jobs[0].resources.cpus")) and gpus:
            cores = per_gpu * gpus
        return {**accelerators, "cpus": cores, "memory": self._memory(cores, gpus)}

    def _gpus(self) -> tuple[dict[str, Any], int]:
        types: list[str] = []
        count = None
        for name in _GPUS:
            if name not in self._given:
                continue
            line, source, value = self._given[name]
            if name == "gres":
                value = self._gpus_of(line, source, str(value))
                if not value:
                    continue
            self._take(name, "jobs[0].resources.accelerators")
            words = [word for word in str(value).split(":") if word != "gpu"]
            if not words or not words[-1].isdecimal() or int(words[-1]) > 62 or len(words) > 2:
                raise CannotConvert(line, f"{source}={value!r}: must be a number of at most 62, such as 8, or a100:8")
            types, count = words[:-1], int(words[-1])
            if name != "gpus_per_task" and count % self._each:
                message = f"{source}={value!r}: {count} GPUs cannot be divided among {self._each} tasks"
                raise CannotConvert(line, f"{message}; each task has GPUs of its own")
            if name != "gpus_per_task" and self._each > 1:
                why = f"each task sees only its own GPUs, as devices from 0, and not all {count} of the node"
                self._conversion.changed(line, f"{source}={value!r}", "jobs[0].resources.accelerators", why)
                count //= self._each
        models = self._models()
        if not count:
            return {}, 0
        types = types or models
        if not types:
            line, source, value = next(self._given[one] for one in _GPUS if one in self._given)
            why = "no GPU type is given: replace `gpu` with a type that `mizzen machines` shows"
            self._conversion.changed(line, f"{source}={value!r}", "jobs[0].resources.accelerators", why)
        named = [f"{kind}:{count}" for kind in types or ["gpu"]]
        return {"accelerators": named[0] if len(named) == 1 else named}, count

    def _gpus_of(self, line: int, source: str, gres: str) -> str:
        """Return the part of generic resources that are GPUs; the others get a remark. Empty: there are none."""
        parts = [part for part in gres.split(",") if part != "none"]
        for part in parts:
            if part.partition(":")[0] not in ("gpu", "gres/gpu"):
                self._conversion.lost(line, f"{source}: {part}", "a document asks for GPUs, cores and memory only")
        return ",".join(part.removeprefix("gres/") for part in parts if "gpu" in part.partition(":")[0])

    def _models(self) -> list[str]:
        if "constraint" not in self._given:
            return []
        line, source, value = self._given["constraint"]
        found = [gpu_model(part) for part in re.split(r"[|]", str(value))]
        if all(found):
            self._take("constraint", "jobs[0].resources.accelerators")
            return [*dict.fromkeys(one for one in found if one)]
        why = "machines have no features: name GPU types in `accelerators`, or restrict `regions`"
        self._conversion.lost(line, f"{source}={value!r}", why)
        return []

    def _memory(self, cores: int, gpus: int) -> str:
        factors = {"mem_gb": Fraction(1 << 30, self._each), "mem": Fraction(1, self._each),
                   "mem_per_cpu": Fraction(cores), "mem_per_gpu": Fraction(max(1, gpus))}  # fmt: skip
        for name, factor in factors.items():
            value = self._take(name, "jobs[0].resources.memory")
            if value is None:
                continue
            line, source, _ = self._given[name]
            try:
                number = (
                    Fraction(str(value))
                    if name == "mem_gb"
                    else size_of(SlurmOption(line, name, str(value), f"{source}={value!r}"))
                )
                return memory_text(int(number * factor))
            except ValueError as error:
                raise CannotConvert(line, f"{source}={value!r}: {error}") from None
        why = "4GiB for each core is written, because no parameter gives the memory"
        self._conversion.changed(self._executor.line, "no mem_gb", "jobs[0].resources.memory", why)
        return memory_text(_GUESSED_BYTES_OF_CORE * cores)

    def setup(self) -> str | None:
        """Return the commands before the function."""
        value = self._take("setup", "jobs[0].setup", "it runs in a shell of its own: variables that it sets are gone")
        lines = [str(one) for one in value] if isinstance(value, (list, tuple)) else []
        line = self._given["setup"][0] if lines else self._executor.line
        text = without_modules(self._conversion, line, "\n".join(lines))
        return f"{text}\n" if text.strip() else None

    def limits(self) -> dict[str, Any]:
        """Return the limits."""
        why = "the limit is on the running time of all attempts together"
        minutes = self._number("timeout_min", "limits.max_runtime", why)
        if minutes is None:
            said = f"submitit gives a job {_DEFAULT_MIN} minutes by default; here there is no limit"
            self._conversion.changed(self._executor.line, "no timeout_min", "limits.max_runtime", said)
            return {}
        return {"max_runtime": duration_text(minutes * 60)} if minutes else {}

    def notice(self) -> dict[str, str] | None:
        """Return the section `checkpoint`, with the time from the notice to the end."""
        why = "SIGTERM is sent instead of SIGUSR2"
        seconds = self._number("signal_delay_s", "checkpoint.grace", why)
        return {"grace": duration_text(min(seconds, 3600))} if seconds else None
