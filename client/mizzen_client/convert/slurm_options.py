"""The options of `#SBATCH` lines: their names, and the conversion of options that need no calculation."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from mizzen_client.convert.conversion import CannotConvert

LETTERS: Mapping[str, str] = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help",
    "I": "immediate", "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet",
    "q": "qos", "S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose", "W": "wait",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""The options with one letter."""
FLAGS = frozenset({
    "contiguous", "help", "hold", "ignore-pbs", "no-kill", "no-requeue", "overcommit", "oversubscribe", "parsable",
    "quiet", "reboot", "requeue", "spread-job", "stepmgr", "test-only", "usage", "use-min-nodes", "verbose", "version",
    "wait",
})  # fmt: skip
"""The options without a value."""
OPTIONAL = frozenset({"exclusive", "get-user-env", "nice", "propagate", "resv-ports"})
"""The options whose value, if there is one, follows `=`."""
READ = frozenset({
    "array", "begin", "chdir", "constraint", "cpus-per-gpu", "cpus-per-task", "dependency", "error", "export", "gpus",
    "gpus-per-node", "gpus-per-task", "gres", "input", "job-name", "mail-type", "mail-user", "mem", "mem-per-cpu",
    "mem-per-gpu", "nodes", "no-requeue", "ntasks", "ntasks-per-gpu", "ntasks-per-node", "open-mode", "output",
    "requeue", "signal", "time", "tres-per-task",
})  # fmt: skip
"""The options that `slurm` reads."""

_TENANT = "the API key, or `tenant` in the document, decides who pays and which limits apply"
_SPEED = "it concerns the layout on a node or the speed only; mizzen has no such setting"
_OF_SBATCH = "it concerns the command sbatch, not the job"
_WHERE = "mizzen chooses the machines itself and keeps the tasks of a job near each other"
DROPPED: Mapping[str, str] = {
    "account": _TENANT, "qos": _TENANT, "wckey": _TENANT, "mcs-label": _TENANT,
    "partition": "mizzen has no partitions: resources and `regions` decide where it runs; `capacity: [spot]` asks for "
                 "machines that may be taken away",
    "clusters": "mizzen chooses among all clusters; restrict it with `regions`",
    "comment": "add `labels` for filters", "extra": "add `labels` for filters",
    "nice": "give `priority`, a level from 1 (the highest) to 7", "priority": "give `priority`, 1 (the highest) to 7",
    "open-mode": "the output of every attempt is kept: `mizzen logs NAME`",
    **dict.fromkeys(("acctg-freq", "batch", "cores-per-socket", "core-spec", "cpu-freq", "delay-boot", "distribution",
                     "extra-node-info", "gpu-bind", "gpu-freq", "gres-flags", "hint", "mem-bind", "mincpus",
                     "ntasks-per-core", "ntasks-per-socket", "oversubscribe", "overcommit", "power", "profile",
                     "reboot", "sockets-per-node", "thread-spec", "threads-per-core", "tres-bind", "network",
                     "stepmgr", "immediate"), _SPEED),
    **dict.fromkeys(("contiguous", "exclude", "prefer", "segment", "spread-job", "switches", "use-min-nodes",
                     "wait-all-nodes"), _WHERE),
    **dict.fromkeys(("help", "ignore-pbs", "parsable", "quiet", "usage", "verbose", "version"), _OF_SBATCH),
    "wait": "it concerns sbatch; use `mizzen submit --wait`",
    "test-only": "it concerns sbatch; use `mizzen submit --dry-run`",
    "kill-on-invalid-dep": "a dependency that can never hold ends the workload with a reason",
    "time-min": "`limits.max_runtime` is the time of --time",
    "resv-ports": "MASTER_PORT is a free port on the machine of the first task",
    "propagate": "the limits of the submitting shell do not apply on the machines",
}  # fmt: skip
"""By option: why the result is the same without it, or what to use instead."""
LOST: Mapping[str, str] = {
    "exclusive": "no task gets a whole machine by name: ask for all its GPUs, cores and memory in `resources`",
    "nodelist": "a document cannot name machines; restrict it with `regions`",
    "nodefile": "a document cannot name machines; restrict it with `regions`",
    "reservation": "mizzen has no reservations by name; give `priority`",
    "licenses": "mizzen does not count licences; limit an array with `throttle`",
    "hold": "run `mizzen hold NAME` after the submission",
    "deadline": "give `limits.max_runtime`, and `limits.max_pending` for the time in the queue",
    "tmp": "a document cannot ask for disk space; operators see to it",
    "bb": "name the input data in `tables`: mizzen copies it near the machines",
    "bbf": "name the input data in `tables`: mizzen copies it near the machines",
    "container": "give the job an `image` from a registry", "container-id": "give the job an `image` from a registry",
    "cluster-constraint": "clusters have no features; restrict it with `regions`",
    "gpus-per-socket": "give --gpus-per-node or --gpus-per-task",
    "get-user-env": "no profile is read: put the variables into `env`",
    "export-file": "put the variables into `env`",
    "uid": "tasks run as the user of the tenant", "gid": "tasks run as the user of the tenant",
    "no-kill": "a gang that loses a machine starts again from its checkpoint",
    "wrap": "it is an option of the command line; put the command into the script",
}  # fmt: skip
"""By option: what to do, because the result may differ."""
NAMES = READ | DROPPED.keys() | LOST.keys()
"""All long options."""


@dataclass(frozen=True)
class SlurmOption:
    """One option of a `#SBATCH` line."""

    line: int
    name: str
    """The long name without hyphens."""
    value: str
    text: str
    """The option as the line writes it."""


def options_of(line: int, text: str) -> list[SlurmOption]:
    """Return the options after `#SBATCH`.

    Raises:
        CannotConvert: the text is not a list of options, or a value is missing.
    """
    words = _words(line, text)
    found = []
    while words:
        word = words.pop(0)
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = _full(name)
            needs = not equals and name not in FLAGS and name not in OPTIONAL
        elif word.startswith("-") and len(word) > 1:
            letter, value = word[1], word[2:].removeprefix("=")
            if letter not in LETTERS:
                raise CannotConvert(line, f"#SBATCH {text}: sbatch has no option -{letter}")
            name = LETTERS[letter]
            if name in FLAGS and value:
                words.insert(0, f"-{value}")
                value = ""
            needs = not value and name not in FLAGS and name not in OPTIONAL
        else:
            raise CannotConvert(line, f"#SBATCH {text}: {word!r} is not an option; options begin with - or --")
        if needs:
            if not words or re.match(r"--?[A-Za-z]", words[0]):
                raise CannotConvert(line, f"#SBATCH {text}: the option {word} needs a value")
            value = words.pop(0)
            word = f"{word} {value}"
        found.append(SlurmOption(line, name, value, word))
    return found


def _words(line: int, text: str) -> list[str]:
    for given in (text, re.sub(r"(^|\s)#.*", "", text)):
        try:
            words = shlex.split(given, posix=True)
        except ValueError:
            continue
        ends = next((n for n, word in enumerate(words) if word.startswith("#")), len(words))
        return words[:ends]
    raise CannotConvert(line, f"#SBATCH {text}: a quotation mark is not closed")


def _full(name: str) -> str:
    """Return the full name of a long option: sbatch accepts unambiguous beginnings, and _ is not -."""
    if name in NAMES:
        return name
    fitting = [one for one in sorted(NAMES) if one.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    return name
