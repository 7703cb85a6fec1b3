"""The variables and the command of a container."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from shlex import quote

from mizzen_client.convert.conversion import RESERVED, SET_BY_MIZZEN, VARIABLE, CannotConvert, fitting_name, shown
from mizzen_client.convert.source_tree import KeyedSection, Located, as_text

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_INDEX_FIELD = "metadata.labels['batch.kubernetes.io/job-completion-index']"
_JOBSET_FIELD = re.compile(r"metadata\.labels\['jobset\.sigs\.k8s\.io/job-(?:global-)?index'\]")
_FIELDS: Mapping[str, tuple[str, str]] = {
    "metadata.name": ('"$MIZZEN_WORKLOAD_NAME-$MIZZEN_JOB-$RANK"', "it is WORKLOAD-JOB-TASK"),
    "metadata.namespace": ('"$MIZZEN_TENANT"', "it is the tenant"),
    "metadata.uid": ('"$MIZZEN_RUN_ID"', "it is the id of the task's run"),
    "spec.nodeName": ('"$MIZZEN_MACHINE"', "it is REGION/CLUSTER/MACHINE"),
    "metadata.labels['batch.kubernetes.io/job-name']": ('"$MIZZEN_WORKLOAD_NAME"', ""),
    "metadata.labels['job-name']": ('"$MIZZEN_WORKLOAD_NAME"', ""),
    "metadata.labels['jobset.sigs.k8s.io/jobset-name']": ('"$MIZZEN_WORKLOAD_NAME"', ""),
    "metadata.labels['jobset.sigs.k8s.io/replicatedjob-name']": ('"$MIZZEN_JOB"', ""),
}
_ENTRY_POINT = "/entry-point-of-the-image"
"""Placeholder for a command that the user must write."""
_SHELLS = {"sh", "bash", "dash", "ash"}


@dataclass(frozen=True)
class PodIndex:
    """How a manifest numbers the pods of a job, and which host names it uses for them."""

    index: str
    """The completion index, in a shell."""
    replica: str = "0"
    """The index of the replica of a JobSet's job, in a shell."""
    is_indexed: bool = False
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Patterns of host names of first pods, to their addresses in a shell."""


@dataclass
class Variables:
    """The variables of a container."""

    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    """Variables to values in a shell."""
    own: set[str] = field(default_factory=set)
    """Variables of the container that mizzen sets."""


def variables_of(container: KeyedSection, at: str, index: PodIndex, configs: Mapping[str, Located]) -> Variables:
    """Return the variables in `env` and `envFrom`. `at` is the path of the job, `configs` are ConfigMaps by name.

    Raises:
        CannotConvert: an entry has no name.
    """
    found = Variables()
    if index.is_indexed:
        found.exported["JOB_COMPLETION_INDEX"] = index.index
    for source in container.each("envFrom"):
        _from_config(source, at, found, configs)
    for entry in container.each("env"):
        name = entry.text("name")
        if name is None:
            raise CannotConvert(entry.line, f"{entry.path}: needs the name of a variable")
        if not VARIABLE.fullmatch(name.value):
            why = "a variable's name has letters, digits and _: give it another name"
            entry.conversion.lost(entry.line, f"env: {name.value}", why)
            continue
        _variable(entry, name.value, at, found, index, configs)
        entry.close({}, {})
    return found


def _from_config(source: KeyedSection, at: str, found: Variables, configs: Mapping[str, Located]) -> None:
    prefix = source.text("prefix")
    reference = source.take("configMapRef")
    config = configs.get(str(reference.within("name"))) if reference is not None else None
    if config is not None and "data" in config.keys:
        for key, node in config.keys["data"].keys.items():
            variable = (prefix.value if prefix else "") + key
            if VARIABLE.fullmatch(variable) and not RESERVED.match(variable):
                found.env[variable] = as_text(node.plain)
        source.conversion.carried(
            source.line, f"envFrom: configMapRef: {shown(config.within('metadata', 'name'))}", f"{at}.env"
        )
    elif reference is not None:
        why = "the ConfigMap is not in this file: write its variables into `env`"
        source.conversion.lost(source.line, f"envFrom: configMapRef: {shown(reference.within('name'))}", why)
    source.close(
        {}, {"secretRef": "write `secrets: {VARIABLE: name}`, and store the values with `mizzen tenants secrets`"}
    )


def _variable(
    entry: KeyedSection, name: str, at: str, found: Variables, index: PodIndex, configs: Mapping[str, Located]
) -> None:
    note, value, origin = entry.conversion, entry.take("value"), entry.section("valueFrom")
    if RESERVED.match(name):
        found.own.add(name)
        for key in ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef"):
            origin.take(key)
        given = f": {shown(as_text(value.plain))}" if value is not None else ""
        note.changed(entry.line, f"env: {name}{given}", f"{at}.run", SET_BY_MIZZEN)
    elif node := origin.take("fieldRef"):
        _field(entry, name, as_text(node.within("fieldPath")), at, found, index)
    elif node := origin.take("secretKeyRef"):
        found.secrets[name] = fitting_name(f"{node.within('name')}-{node.within('key')}")
        why = f"store the value with `mizzen tenants secrets` under the name {found.secrets[name]}"
        note.changed(entry.line, f"env: {name}: secretKeyRef", f"{at}.secrets.{name}", why)
    elif node := origin.take("configMapKeyRef"):
        config = configs.get(str(node.within("name")))
        text = config.within("data", str(node.within("key"))) if config is not None else None
        if text is None:
            why = "the ConfigMap or its key is not in this file: write the value into `env`"
            note.lost(entry.line, f"env: {name}: configMapKeyRef", why)
        else:
            found.env[name] = as_text(text)
            note.carried(entry.line, f"env: {name}: configMapKeyRef", f"{at}.env.{name}")
    elif node := origin.take("resourceFieldRef"):
        note.lost(entry.line, f"env: {name}: resourceFieldRef", "write the number into `env`")
    else:
        _literal(entry, name, as_text(value.plain) if value is not None else "", at, found, index)
    origin.close({}, {})


def _literal(entry: KeyedSection, name: str, text: str, at: str, found: Variables, index: PodIndex) -> None:
    expanded = in_shell(text, found, index)
    if expanded is None:
        found.env[name] = _plain(text, found)
        entry.conversion.carried(entry.line, f"env: {name}: {shown(text, 40)}", f"{at}.env.{name}")
    else:
        found.exported[name] = expanded
        why = "the script sets it from mizzen's variables"
        entry.conversion.changed(entry.line, f"env: {name}: {shown(text, 40)}", f"{at}.run", why)


def _field(entry: KeyedSection, name: str, path: str, at: str, found: Variables, index: PodIndex) -> None:
    note, source = entry.conversion, f"env: {name}: fieldRef: {path}"
    path = path.replace("metadata.annotations[", "metadata.labels[", 1)  # Both have the same values.
    if path == _INDEX_FIELD:
        found.exported[name] = index.index
        note.carried(entry.line, source, f"{at}.run")
    elif _JOBSET_FIELD.fullmatch(path):
        found.exported[name] = index.replica
        note.carried(entry.line, source, f"{at}.run")
    elif path in _FIELDS:
        found.exported[name], why = _FIELDS[path]
        if why:
            note.changed(entry.line, source, f"{at}.run", why)
        else:
            note.carried(entry.line, source, f"{at}.run")
    else:
        note.lost(entry.line, source, "mizzen has no such value: write it into `env`")


def _plain(text: str, found: Variables) -> str:
    """Return a text with `$(NAME)` replaced as Kubernetes does: unknown names stay."""
    return _REFERENCE.sub(lambda one: "$" if one[0] == "$$" else found.env.get(one[1], one[0]), text)


def in_shell(text: str, found: Variables, index: PodIndex) -> str | None:
    """Return a text as a shell word, or None if it contains no value that is known only in the task."""
    pieces: list[str] = []
    is_dynamic = False
    position = 0
    hosts = [(re.compile(pattern), value) for pattern, value in index.hosts.items()]
    patterns = [(_REFERENCE, ""), *hosts]
    while True:
        matches = [(one, value) for pattern, value in patterns if (one := pattern.search(text, position))]
        if not matches:
            break
        one, value = min(matches, key=lambda pair: pair[0].start())
        before = text[position : one.start()]
        position = one.end()
        if value:
            is_dynamic, piece = True, f'"{value}"'
        elif one[0] != "$$" and (one[1] in found.exported or one[1] in found.own or one[1] in found.secrets):
            is_dynamic, piece = True, f'"${{{one[1]}}}"'
        else:
            piece = quote(_plain(one[0], found))
        pieces += [quote(before) if before else "", piece]
    rest = text[position:]
    return "".join([*pieces, quote(rest) if rest else ""]) if is_dynamic else None


def command_of(
    container: KeyedSection, at: str, variables: Variables, index: PodIndex, folder: str | None
) -> str | list[str] | None:
    """Return `run` for `command` and `args`: a list, or a script if a value is known to the task only."""
    command, args = container.take("command"), container.take("args")
    words = [as_text(node.plain) for given in (command, args) if given is not None for node in given.items]
    for key, node in (("command", command), ("args", args)):
        if node is not None and (key == "command" or command is not None):
            container.carried(key, node, f"{at}.run")
    if args is not None and command is None:
        why = f"the image's entry point is unknown here: write it into `run`, instead of {_ENTRY_POINT}"
        container.lost("args", args, why)
        words.insert(0, _ENTRY_POINT)
    prologue = [f"export {name}={value}" for name, value in variables.exported.items()]
    prologue += [f"cd {quote(folder)}"] if folder else []
    if not words:
        if prologue:
            why = "the image's own command is unknown here: write it into `run` after these lines"
            container.conversion.lost(container.line, "no command", why)
            return "\n".join([*prologue, "echo 'write the command of the image here' >&2; exit 1"]) + "\n"
        return None
    inner = _script_in(words)
    if inner is not None:
        text = in_shell_script(inner, variables, index)
        is_bash = words[0].rpartition("/")[2] == "bash"
        options = [word for word in words[1:-1] if word != "-c"]
        head = f"#!{'/bin/bash' if is_bash else '/bin/sh'}{''.join(f' {option}' for option in _options(options))}"
        return "\n".join([head, *prologue, text.rstrip("\n")]) + "\n"
    dynamic = [in_shell(word, variables, index) for word in words]
    if not prologue and not any(dynamic):
        return [_plain(word, variables) for word in words]
    shell = [
        one if one is not None else quote(_plain(word, variables)) for one, word in zip(dynamic, words, strict=True)
    ]
    return "\n".join([*prologue, f"exec {' '.join(shell)}"]) + "\n"


def _options(words: list[str]) -> list[str]:
    letters = "".join(word[1:].replace("c", "") for word in words)
    return [f"-{letters}"] if letters else []


def _script_in(words: list[str]) -> str | None:
    """Return the script of `sh -c SCRIPT`, or None."""
    is_shell = words[0].rpartition("/")[2] in _SHELLS and len(words) > 2
    if not is_shell or not all(re.fullmatch("-[a-z]+", word) for word in words[1:-1]):
        return None
    return words[-1] if any("c" in word for word in words[1:-1]) else None


def in_shell_script(text: str, variables: Variables, index: PodIndex) -> str:
    """Return a script with `$(NAME)` of Kubernetes and host names of pods replaced."""
    known = variables.env.keys() | variables.exported.keys() | variables.own | variables.secrets.keys()

    def expanded(one: re.Match[str]) -> str:
        return "$$" if one[0] == "$$" else f"${{{one[1]}}}" if one[1] in known else one[0]

    text = _REFERENCE.sub(expanded, text)
    for pattern, value in index.hosts.items():
        text = re.sub(pattern, lambda _, value=value: value, text)  # type: ignore[misc]
    return text
