"""Converts SkyPilot's tasks, pipelines of tasks, and services."""

import re
from pathlib import PurePath
from typing import Any

from mizzen_client.convert import skypilot_fields as table
from mizzen_client.convert.conversion import (
    RESERVED,
    SET_BY_MIZZEN,
    VARIABLE,
    CannotConvert,
    Conversion,
    fitting_name,
    named,
)
from mizzen_client.convert.skypilot_resources import convert_resources
from mizzen_client.convert.source_tree import KeyedSection, Located, as_text, read_trees
from mizzen_client.documents import without_empty

_PROLOGUE = """\
export SKYPILOT_NODE_RANK="$RANK" SKYPILOT_NUM_NODES="$WORLD_SIZE"
export SKYPILOT_NODE_IPS="${{MIZZEN_TASK_ADDRS:-$MASTER_ADDR}}"
export SKYPILOT_NUM_GPUS_PER_NODE={gpus} SKYPILOT_TASK_ID="$MIZZEN_WORKLOAD"
"""
_VENV = "[ -d .venv ] || python3 -m venv .venv\n. .venv/bin/activate\n"
_PIP = re.compile(r"^\s*(?:python3? -m )?pip3? install", re.MULTILINE)
_OWN_PYTHON = re.compile(r"\bconda\b|\bvenv\b|\bvirtualenv\b|\buv\b|\bmamba\b|\bpoetry\b")
_UNKNOWN = re.compile(r"\$\{?(SKYPILOT_(?!NODE_RANK|NUM_NODES|NODE_IPS|NUM_GPUS_PER_NODE|TASK_ID)\w+)")
_NOT_EMPTY = re.compile(r"^\s*[^\s#]", re.MULTILINE)


def convert(text: str, name: str) -> Conversion:
    """Convert the YAML `text`; `name` is that of its file, without the folder.

    Raises:
        CannotConvert: see the message.
    """
    conversion = Conversion("skypilot")
    trees = read_trees(text)
    if not trees:
        raise CannotConvert(1, "the file has no document")
    default = fitting_name(PurePath(name).stem)
    head = trees[0] if len(trees) > 1 and not trees[0].keys.keys() - {"name", "execution"} else None
    is_parallel = head is not None and head.within("execution") == "parallel"
    if head is not None:
        section = KeyedSection(conversion, head)
        for key in ("name", "execution"):
            if node := section.take(key):
                section.changed(key, node, "after", "each task is a workload of its own; a pipeline has no name")
        section.close({}, {})
        default = fitting_name(str(head.within("name") or default))
        trees = trees[1:]
    for number, tree in enumerate(trees):
        own = default if len(trees) == 1 else f"{default[:50]}-{number + 1}"
        document = _Task(conversion, tree, own).convert()
        if number and not is_parallel:
            document = _after(document, conversion.documents[-1]["name"], conversion, tree.line)
        conversion.documents.append(document)
    return conversion


def _after(document: dict[str, Any], before: str, conversion: Conversion, line: int) -> dict[str, Any]:
    conversion.carried(line, "the order of the pipeline", "after")
    fields = {"version": 1, "name": document["name"], "after": [{"workload": before, "condition": "succeeded"}]}
    return {**fields, **{key: value for key, value in document.items() if key not in fields}}


class _Task:
    def __init__(self, conversion: Conversion, tree: Located, default: str) -> None:
        self._conversion = conversion
        self._section = KeyedSection(conversion, tree)
        self._default = default

    def convert(self) -> dict[str, Any]:
        if "service" in self._section:
            return self._service()
        section = self._section
        name = self._name()
        resources = convert_resources(section.section("resources"))
        tasks = section.number("num_nodes", 1)
        if tasks is not None:
            why = "tasks with the resources of a node; several can be on one machine if it has room for them"
            section.changed("num_nodes", tasks, "jobs[0].tasks", why if tasks.value > 1 else "one task")
        env, secrets = self._env(), self._secrets("jobs[0].secrets")
        setup, run = self._scripts(resources.gpus, has_image=resources.image is not None)
        workdir = self._workdir()
        for target, source in section.entries("file_mounts").items():
            why = f"mizzen mounts nothing: use `tables`, or copy {target} in setup; local files are in `workdir`"
            self._conversion.lost(source.line, f"file_mounts.{target}", why)
        section.close(table.DROPPED, table.LOST)
        job = {"name": "main", "tasks": tasks.value if tasks else None, "resources": resources.fields,
               "image": resources.image, "setup": setup, "run": run, "env": env, "secrets": secrets}  # fmt: skip
        return without_empty({
            "version": 1, "name": name, "labels": resources.labels, "priority": None, "workdir": workdir,
            "regions": {"allow": resources.regions} if resources.regions else None, "capacity": resources.capacity,
            "limits": {"retries": resources.retries} if resources.retries else None,
            "jobs": [without_empty(job)],
        })  # fmt: skip

    def _name(self) -> str:
        node = self._section.text("name")
        if node is None:
            self._conversion.changed(
                self._section.line, "no name", "name", f"the name is {self._default}, after the file"
            )
            return self._default
        return named(self._conversion, node.line, f"name: {node.value}", node.value)

    def _workdir(self) -> str | None:
        node = self._section.take("workdir")
        if node is None:
            return None
        if isinstance(node.value, dict):
            why = "git repositories are not supported: clone it in setup, or give a folder"
            self._conversion.lost(node.line, f"workdir: {node.within('url')}", why)
            return None
        self._section.carried("workdir", node, "workdir")
        return as_text(node.value)

    def _env(self) -> dict[str, str]:
        env: dict[str, str] = {}
        for variable, value in self._section.entries("envs").items():
            path = f"envs.{variable}"
            if RESERVED.match(variable):
                self._conversion.dropped(value.line, path, SET_BY_MIZZEN)
            elif value.value is None:
                why = f"the value is given at the launch: use `mizzen submit --env {variable}=VALUE`"
                self._conversion.lost(value.line, path, why)
            elif not VARIABLE.fullmatch(variable) or isinstance(value.value, (dict, list)):
                raise CannotConvert(value.line, f"{path}: must be a variable's name and a single value")
            else:
                env[variable] = str(value.value)  # SkyPilot writes True, where YAML has true.
                self._conversion.carried(value.line, path, f"jobs[0].env.{variable}")
        return env

    def _secrets(self, at: str) -> dict[str, str]:
        secrets: dict[str, str] = {}
        for variable, value in self._section.entries("secrets").items():
            if not VARIABLE.fullmatch(variable) or RESERVED.match(variable):
                raise CannotConvert(
                    value.line, f"secrets.{variable}: must be a variable's name that mizzen does not set"
                )
            secrets[variable] = fitting_name(variable)
            why = (
                f"store the value with `mizzen tenants secrets` under the name {secrets[variable]}; no value is copied"
            )
            self._conversion.changed(value.line, f"secrets.{variable}", f"{at}.{variable}", why)
        return secrets

    def _scripts(self, gpus: int, *, has_image: bool) -> tuple[str | None, str]:
        setup, run = self._section.text("setup"), self._section.text("run")
        given = [node for node in (setup, run) if node is not None and _NOT_EMPTY.search(node.value)]
        if not given:
            raise CannotConvert(self._section.line, "the task has no run: a document needs a command")
        texts = {
            key: self._script(key, node) for key, node in (("setup", setup), ("run", run)) if node in given and node
        }
        both = "\n".join(texts.values())
        start = "#!/bin/bash\n" + _PROLOGUE.format(gpus=gpus)
        if _PIP.search(both) and not _OWN_PYTHON.search(both) and not has_image:
            start += _VENV
            line = given[0].line
            why = (
                "pip installs into a virtual environment (.venv in the working directory), which setup and run activate"
            )
            self._conversion.changed(line, "pip install", "jobs[0].setup", why)
        elif has_image and _PIP.search(both):
            why = "the image is read-only: install the packages in it, or with --target into the working directory"
            self._conversion.lost(given[0].line, "pip install", why)
        if setup is None or "setup" not in texts:
            return None, start + texts["run"]
        if has_image or "run" not in texts:
            why = "it is the beginning of run" + (", because a job with an image has no setup" if has_image else "")
            self._conversion.changed(setup.line, "setup", "jobs[0].run", why)
            inner = f"(\n{texts['setup'].rstrip()}\n) || exit\n"
            return None, start + (inner + texts["run"] if "run" in texts else texts["setup"])
        why = "it runs at each attempt, and its files are gone when the attempt has ended"
        self._conversion.changed(setup.line, "setup", "jobs[0].setup", why)
        return start + texts["setup"], start + texts["run"]

    def _script(self, key: str, node: Located) -> str:
        """Return a script with SkyPilot's folders replaced, and add remarks about SkyPilot features that it uses."""
        text = str(node.value)
        if key == "run":
            self._conversion.carried(node.line, "run", "jobs[0].run")
        for name in dict.fromkeys(_UNKNOWN.findall(text)):
            self._conversion.lost(node.line, f"{key}: ${name}", "mizzen has no such value: write it into `env`")
        if re.search(r"\bsky\s+(?:launch|exec|status|jobs|serve|start|stop|down|queue|logs|cancel|check)\b", text):
            self._conversion.lost(
                node.line, f"{key}: sky", "SkyPilot does not run this task: use `mizzen` outside of it"
            )
        if re.search(r"\bconda\s+\w+", text):
            why = "machines have no conda: use a virtual environment or an `image`"
            self._conversion.lost(node.line, f"{key}: conda", why)
        if re.search(r"\bsudo\s|\bapt(?:-get)?\s+install\b", text):
            why = "a task has no rights of root: give the job an `image` with the packages"
            self._conversion.lost(node.line, f"{key}: sudo or apt", why)
        edited = re.sub(r"(?:~|\$HOME|\$\{HOME\})/sky_workdir\b", '"$PWD"', text)
        if edited != text:
            why = "the working directory has the files of `workdir`"
            self._conversion.changed(node.line, f"{key}: ~/sky_workdir", f"jobs[0].{key}", why)
        elif re.search(r"(?<![\w./])~/|\$\{?HOME\b", edited):
            why = "HOME is the working directory of the task"
            self._conversion.changed(node.line, f"{key}: ~/", f"jobs[0].{key}", why)
        return edited if edited.endswith("\n") else f"{edited}\n"

    def _service(self) -> dict[str, Any]:
        """Return a service document: mizzen reads SkyPilot's fields, and runs the scripts as SkyPilot does."""
        document: dict[str, Any] = {"name": self._name()}
        if secrets := self._secrets("secrets"):
            document["secrets"] = secrets
        self._copy(self._section, "", document)
        return document

    def _copy(self, section: KeyedSection, at: str, into: dict[str, Any]) -> None:
        """Copy the fields that mizzen's services have, with a remark for each."""
        refused, ignored = table.SERVICE_REFUSED.get(at, {}), table.SERVICE_IGNORED.get(at, {})
        for key in table.SERVICE_FIELDS.get(at, ()):
            node = section.take(key)
            if node is None:
                continue
            path = f"{at}.{key}" if at else key
            if path in table.SERVICE_FIELDS and isinstance(node.value, dict):
                into[key] = {}
                self._copy(KeyedSection(self._conversion, node, path), path, into[key])
            else:
                into[key] = node.plain
                section.carried(key, node, path)
        section.close(ignored, refused)
