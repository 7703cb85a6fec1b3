"""The resources of a batch script's tasks, from its options."""

import re
from fractions import Fraction
from math import ceil
from typing import Any

from mizzen_client.convert.conversion import CannotConvert, Conversion
from mizzen_client.convert.quantities import cores, gpu_model, memory_text
from mizzen_client.convert.slurm_options import SlurmOption

_TIME = re.compile(r"(?:([0-9]{1,5})-)?([0-9]{1,7})(?::([0-9]{1,7}))?(?::([0-9]{1,7}))?")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?)([KMGT])?B?", re.IGNORECASE)
_SHIFT = {"K": 10, "M": 20, "G": 30, "T": 40}
_COUNT = re.compile(r"[0-9]{1,7}")
_GUESS_BYTES_OF_CORE = 4 << 30

Options = dict[str, SlurmOption]


def seconds_of(option: SlurmOption) -> int | None:
    """Return the seconds of a time such as `30`, `2:30:00` or `1-12`; None: there is no limit.

    Raises:
        CannotConvert: the value is not a time.
    """
    if option.value.upper() in ("UNLIMITED", "INFINITE", "0", "-1"):
        return None
    found = _TIME.fullmatch(option.value)
    if found is None:
        right = "write minutes, minutes:seconds, hours:minutes:seconds, days-hours or days-hours:minutes:seconds"
        raise CannotConvert(option.line, f"{option.text}: {right}")
    days, *parts = (int(part) if part else None for part in found.groups())
    first, second, third = parts
    if days is not None:
        return days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)


def number_of(options: Options, name: str, least: int = 1) -> int | None:
    """Return the whole number of an option, or None if it is absent.

    Raises:
        CannotConvert: the value is not a whole number.
    """
    option = options.get(name)
    if option is None:
        return None
    if not _COUNT.fullmatch(option.value) or int(option.value) < least:
        raise CannotConvert(option.line, f"{option.text}: write a whole number of at least {least}")
    return int(option.value)


def size_of(option: SlurmOption) -> int:
    """Return the bytes of a size such as `16G`; without a unit it is in megabytes.

    Raises:
        CannotConvert: the value is not a size.
    """
    found = _SIZE.fullmatch(option.value)
    if found is None:
        raise CannotConvert(option.line, f"{option.text}: write a size such as 4000M or 16G")
    return int(Fraction(found[1]) * (1 << _SHIFT[(found[2] or "M").upper()]))


class SlurmRequest:
    """The resources that the options request, node by node, and the resources of a task of mizzen."""

    def __init__(self, conversion: Conversion, options: Options) -> None:
        """Read the options.

        Raises:
            CannotConvert: a value is invalid.
        """
        self._conversion, self._options = conversion, options
        self.gpu_types: list[str] = []
        self.gpus_of_task, self.gpus_of_node, gpus = self._gpus()
        self.nodes = self._nodes()
        self.cores = number_of(options, "cpus-per-task") or 1
        self.tasks = self._tasks(gpus)
        if self.nodes > self.tasks:
            self.tasks = self.nodes
        if self.gpus_of_node is None and gpus is not None and self.gpus_of_task is None:
            self.gpus_of_node = self._shared("gpus", gpus, self.nodes)
        self.in_node, self._full = self._layout()

    @property
    def places(self) -> tuple[str, str]:
        """The shell's expressions for the node of a task and for its number on this node."""
        most, full = self.in_node, self._full
        if full == self.nodes:
            return f"$((RANK / {most}))", f"$((RANK % {most}))"
        first, less = full * most, most - 1
        return (
            f"$((RANK < {first} ? RANK / {most} : {full} + (RANK - {first}) / {less}))",
            f"$((RANK < {first} ? RANK % {most} : (RANK - {first}) % {less}))",
        )

    def resources(self, *, is_spread: bool) -> dict[str, Any]:
        """Return the resources of each task, if each of mizzen's tasks is one of Slurm's, else those of a node.

        Raises:
            CannotConvert: tasks would share a GPU.
        """
        in_node = 1 if is_spread else self.in_node
        if is_spread:
            self._note_layout()
        gpus = self._gpus_of_one(in_node, is_spread)
        cpus = self._cpus(in_node, gpus)
        fields: dict[str, Any] = {}
        if gpus:
            kinds = [f"{kind}:{gpus}" for kind in self.gpu_types or ["gpu"]]
            fields["accelerators"] = kinds[0] if len(kinds) == 1 else kinds
            self._note_type()
        return {**fields, "cpus": cpus, "memory": self._memory(is_spread, cpus, gpus)}

    def _nodes(self) -> int:
        option = self._options.get("nodes")
        if option is None:
            each, total = number_of(self._options, "ntasks-per-node"), number_of(self._options, "ntasks")
            return ceil(total / each) if each and total else 1
        found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", option.value)
        if found is None or int(found[1]) < 1:
            raise CannotConvert(option.line, f"{option.text}: write a number of nodes, such as 2, or 2-4")
        if found[2] and found[2] != found[1]:
            why = f"{found[1]} nodes are used; if the program can continue with other numbers, write a range of tasks"
            self._conversion.changed(option.line, option.text, "jobs[0].tasks", why)
        else:
            why = "tasks with the resources of a node; several can be on one machine if it has room for them"
            self._say(option, "jobs[0].tasks", why if int(found[1]) > 1 else "")
        return int(found[1])

    def _tasks(self, gpus: int | None) -> int:
        each, total = number_of(self._options, "ntasks-per-node"), number_of(self._options, "ntasks")
        per_gpu = number_of(self._options, "ntasks-per-gpu")
        for name in ("ntasks", "ntasks-per-node", "ntasks-per-gpu"):
            if name in self._options:
                self._say(self._options[name], "jobs[0].tasks")
        if per_gpu is not None:
            if per_gpu > 1:
                option = self._options["ntasks-per-gpu"]
                raise CannotConvert(option.line, f"{option.text}: tasks cannot share a GPU; write --ntasks-per-gpu=1")
            found = gpus if gpus is not None else (self.gpus_of_node or 1) * self.nodes
            self.gpus_of_task = 1
            return found
        return total or (each or 1) * self.nodes

    def _layout(self) -> tuple[int, int]:
        """Return the largest number of tasks on a node, and the number of nodes to count with it: others have one less.

        Slurm fills node after node up to --ntasks-per-node. Without it, the tasks are divided as evenly as possible.
        """
        each = number_of(self._options, "ntasks-per-node")
        if each and ceil(self.tasks / each) == self.nodes:
            return each, self.nodes
        return ceil(self.tasks / self.nodes), self.tasks % self.nodes or self.nodes

    def _note_layout(self) -> None:
        """If the tasks cannot be divided evenly among the nodes, note how they are numbered."""
        option = self._options.get("ntasks")
        if self._full < self.nodes and option is not None:
            counts = ", ".join(str(self.in_node - (node >= self._full)) for node in range(self.nodes))
            why = f"the {self.nodes} nodes count {counts} tasks; Slurm may divide them differently"
            self._conversion.changed(option.line, option.text, "jobs[0].run", why)

    def _gpus(self) -> tuple[int | None, int | None, int | None]:
        """Return the number of GPUs per task, per node, and in total, each None if no option gives it."""
        found: dict[str, int | None] = {"task": None, "node": None, "all": None}
        for name, of in (("gpus-per-task", "task"), ("tres-per-task", "task"), ("gpus-per-node", "node"),
                         ("gres", "node"), ("gpus", "all")):  # fmt: skip
            if name in self._options:
                count = self._counted(self._options[name])
                found[of] = count if count is not None else found[of]
        return found["task"], found["node"], found["all"]

    def _counted(self, option: SlurmOption) -> int | None:
        """Read `gpu:a100:4,shard:2`, `a100:4` or `4`; entries other than GPUs get a remark."""
        total: int | None = None
        is_generic = option.name in ("gres", "tres-per-task")
        for part in option.value.split(","):
            words = [word for word in re.split(r"[:=]", part.partition("(")[0].removeprefix("gres/")) if word]
            if not words or (is_generic and words[0] != "gpu"):
                why = "a document asks for GPUs, cores and memory only"
                if option.value != "none":
                    self._conversion.lost(option.line, f"--{option.name}={part}", why)
                continue
            words = words[1:] if is_generic else words
            count = int(words[-1]) if words and _COUNT.fullmatch(words[-1]) else 1
            self.gpu_types += [word for word in words if not _COUNT.fullmatch(word)][:1]
            total = (total or 0) + count
        if total is not None:
            self._say(option, "jobs[0].resources.accelerators")
        if len(self.gpu_types) > 1 and total is not None:
            raise CannotConvert(option.line, f"{option.text}: GPUs of two types in one task; write a job for each type")
        return total

    def _note_type(self) -> None:
        """If no GPU type is known, note that the user must replace the placeholder `gpu`."""
        names = ("gres", "gpus-per-task", "gpus-per-node", "gpus", "tres-per-task", "ntasks-per-gpu")
        option = next(self._options[name] for name in names if name in self._options)
        if not self.gpu_types:
            why = "no GPU type is given: replace `gpu` with a type that `mizzen machines` shows, or a list of types"
            self._conversion.changed(option.line, option.text, "jobs[0].resources.accelerators", why)

    def constrain(self, option: SlurmOption) -> None:
        """Read --constraint: GPU types are carried over, other features are not."""
        features = [feature for feature in re.split(r"[|&,\[\]()]+", option.value.partition("*")[0]) if feature]
        models = [gpu_model(feature) for feature in features]
        has_gpus = bool(self.gpus_of_task or self.gpus_of_node)
        if has_gpus and not self.gpu_types and "&" not in option.value and all(models):
            self.gpu_types = [*dict.fromkeys(model for model in models if model)]
            self._conversion.carried(option.line, option.text, "jobs[0].resources.accelerators")
        else:
            why = "machines have no features: name GPU types in `accelerators`, or restrict `regions`"
            self._conversion.lost(option.line, option.text, why)

    def _gpus_of_one(self, in_node: int, is_spread: bool) -> int:
        if self.gpus_of_task is not None:
            return self.gpus_of_task * in_node
        if not self.gpus_of_node:
            return 0
        if not is_spread:
            return self.gpus_of_node
        name = next(name for name in ("gres", "gpus-per-node", "gpus") if name in self._options)
        gpus = self._shared(name, self.gpus_of_node, self.in_node)
        if self.in_node > 1:
            option = self._options[name]
            why = f"each task sees only its own GPUs, as devices from 0, and not all {self.gpus_of_node} of the node"
            self._conversion.changed(option.line, option.text, "jobs[0].resources.accelerators", why)
        return gpus

    def _shared(self, name: str, gpus: int, among: int) -> int:
        if gpus % among:
            option = self._options[name]
            message = f"{option.text}: {gpus} GPUs cannot be divided among {among} tasks or nodes"
            raise CannotConvert(option.line, f"{message}; each task has GPUs of its own: give a multiple of {among}")
        return gpus // among

    def _cpus(self, in_node: int, gpus: int) -> int | float:
        if option := self._options.get("cpus-per-task"):
            self._say(option, "jobs[0].resources.cpus")
        if option := self._options.get("cpus-per-gpu"):
            self._say(option, "jobs[0].resources.cpus")
            return (number_of(self._options, "cpus-per-gpu") or 1) * max(1, gpus)
        return cores(Fraction(self.cores * in_node))

    def _memory(self, is_spread: bool, cpus: int | float, gpus: int) -> str:
        given = [self._options[name] for name in ("mem", "mem-per-cpu", "mem-per-gpu") if name in self._options]
        if len(given) > 1:
            raise CannotConvert(given[1].line, f"{given[1].text}: {given[0].text} is given, too; give one of them")
        for name, factor in (("mem", Fraction(1, self.in_node if is_spread else 1)), ("mem-per-cpu", Fraction(cpus)),
                             ("mem-per-gpu", Fraction(max(1, gpus)))):  # fmt: skip
            option = self._options.get(name)
            if option is None:
                continue
            size = size_of(option)
            if size == 0:
                why = "a task cannot ask for all the memory of a machine: give a size in `memory`"
                self._conversion.lost(option.line, option.text, why)
                continue
            self._say(option, "jobs[0].resources.memory")
            try:
                return memory_text(int(size * factor))
            except ValueError as error:
                raise CannotConvert(option.line, f"{option.text}: {error}") from None
        why = "4GiB for each core is written, because no option gives the memory, and a site's default is unknown"
        self._conversion.changed(1, "the memory", "jobs[0].resources.memory", why)
        return memory_text(int(_GUESS_BYTES_OF_CORE * cpus))

    def _say(self, option: SlurmOption, target: str, why: str = "") -> None:
        if why:
            self._conversion.changed(option.line, option.text, target, why)
        else:
            self._conversion.carried(option.line, option.text, target)
