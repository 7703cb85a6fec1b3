"""The service document, in mizzen's own form or in that of SkyPilot's service files.

A document with `version` is in mizzen's form: its scripts run as those of workloads. A document without it is in
SkyPilot's form: its scripts run as SkyPilot runs them (`skypilot.in_bash`). All fields are the same in both forms.
`checking.check_service` checks the document against the installation.
"""

import re
from collections.abc import Collection
from typing import Any

from api.documents.forms import MOST_WORD, UNICODE, Field, Form, Schema, constant, integer, is_number, name, text
from api.documents.mounts import FILE_MOUNTS, check_mounts
from api.documents.notify import SERVICE_NOTIFY
from api.documents.position import At
from api.documents.replicas import ONE_PORT, RESOURCES, SCRIPTS, Replicas
from api.documents.service_section import SERVING, SPREAD_ON_SPOT, read_policy, read_probe
from api.documents.skypilot import ESCAPED_SIZE, either, in_bash, not_both, section
from api.documents.syntax import Value
from api.documents.workload import (
    COMMANDS,
    COMMON,
    NO_PULL,
    NO_SETUP,
    VERSION,
    Draft,
    environment_of,
    secrets_of,
    set_once,
    workdir,
)
from api.problems import FieldError
from domain.ids import NAME_LENGTH, NAME_RULE, is_name
from domain.service import ReplicaSpread, ResourceOption, ServiceSpec
from domain.serving_spec import ServingSpec
from domain.spread import SpreadLevel

UP = "mizzen serve up"
_GIT = f"the API clones no repository: use `{UP}`, which clones and uploads it"
_NAME = f"must be a name: {NAME_RULE}"
_NAME_RULE = f"With version, it has {NAME_RULE}. Without it, other characters are replaced"
_NAMED = "It is needed unless the request gives it"
_ONE_RUN = "run and setup are given here or in resources, not in both; run is needed in one of them, or an image"
LABELS_ONCE = "No label has one value here and another one in resources"
_NO_VALUE = "Without a value, it is the variable in lower case with hyphens, which must be a valid name"
_SECRET = "must be the name of one of the tenant's secrets; `mizzen tenants secrets` stores a value under a name"
_SECRET_RULE = f"With version, a value {_SECRET}"
_LITERAL = text(most=32 << 10)
_TEXT = text(most=32 << 10)
_NUMBER: Schema = {"type": "number", "minimum": -MOST_WORD, "maximum": MOST_WORD}


def _as_text(at: At) -> Any:
    """Reads the value of a variable in SkyPilot's files, where numbers and booleans become strings."""
    is_scalar = isinstance(at.value, bool) or (is_number(at.value) and abs(at.value) <= MOST_WORD)
    return str(at.value) if is_scalar else _TEXT.read(at)


def _secret(at: At) -> Any:
    """Reads a secret, its name, or null. Errors do not repeat the value, because it may be the secret itself."""
    if at.value is None:
        return ""
    scratch = At(at.path, at.value)
    found = None if at.value == "" else _LITERAL.read(scratch)
    if found is None:
        rule = None if at.value == "" else scratch.problems[0].rule
        message = "must be a secret, or the name of one: a string of 1 to 32768 characters; put it in quotes"
        at.problems.append(FieldError(at.path, message, rule=rule))
    return found


def _folder(at: At) -> Any:
    return at.wrong(_GIT) if isinstance(at.value, dict) and "url" in at.value else _ARCHIVE.form.read(at)


_ARCHIVE = workdir(UP)
_SECRETS = secrets_of(Form({"anyOf": [_LITERAL.schema | {"minLength": 1}, {"type": "null"}]}, _secret))
SERVICE = section("", {
    "version": Field(
        constant(VERSION, f"must be {VERSION}, the only supported version, or absent in a file of SkyPilot"),
        "Without it, scripts run as in SkyPilot"),
    "name": Field(text("a name", 1000, "^[A-Za-z0-9][A-Za-z0-9._-]*$", _NAME), f"{_NAMED}. {_NAME_RULE}"),
    **COMMON,
    "notify": SERVICE_NOTIFY,
    "resources": Field(RESOURCES),
    "service": Field(SERVING, missing="the section with the readiness probe and the number of replicas"),
    "machines": Field(integer(1, 1000), "Machines of one replica, all in one zone", default=1),
    "num_nodes": Field(integer(1, 1000), not_both("machines", "num_nodes")),
    **COMMANDS,
    "envs": Field(environment_of(Form({"anyOf": [_TEXT.schema, _NUMBER, {"type": "boolean"}]}, _as_text)),
                  not_both("env", "envs")),
    "secrets": Field(_SECRETS.form, f"{_SECRETS.description}. {_NO_VALUE}. {_SECRET_RULE}. Without version, another "
                     "value is stored as a secret of the tenant until the service has ended"),
    "image_pull_secret": Field(name("secret"), "Name of the tenant's secret with USER:PASSWORD for the registry of "
                               f"resources.image_id. {NO_PULL}"),
    "file_mounts": FILE_MOUNTS,
    "config": Field(section("config", {}), "SkyPilot's settings of clouds"),
    "workdir": Field(Form(_ARCHIVE.form.schema, _folder), _ARCHIVE.description),
}, "A service: replicas of a server behind one endpoint. A SkyPilot service file is one too. "
   f"{_ONE_RUN}. {ESCAPED_SIZE}. {ONE_PORT}. {NO_SETUP}, if it has a version. {LABELS_ONCE}. {UNICODE}")  # fmt: skip


class ServiceDraft(Draft):
    """The valid fields of a service document, its errors, and the positions of values that must be checked further."""

    def __init__(self, value: Value, default_tenant: str | None, default_name: str | None = None) -> None:
        """Reads the document `value`.

        Args:
            value: the parsed document.
            default_tenant: the tenant of the caller's key, which is used if the document names no tenant.
            default_name: the name of the service if the document has none; SkyPilot's files often have none.
        """
        super().__init__(SERVICE, value, default_tenant)
        self.options: list[ResourceOption] = []
        self.literals: dict[str, str] = {}
        """Variables whose secret is in the document, as in SkyPilot's files. `spec` needs the names of the secrets."""
        self.certificate: str | None = None
        """The PEM text of the certificate and its private key, if given. `spec` needs the name of their secret."""
        if not isinstance(value, dict):
            return
        at, fields = self.at, self.fields
        self._is_ours = at.get("version").value is not None
        fields.pop("version", None)
        fields.pop("config", None)  # All its fields are refused, or have no effect.
        fields["name"] = self._name(default_name)
        fields["machines"] = either(at, fields, "machines", "num_nodes") or 1
        fields["env"] = either(at, fields, "env", "envs") or {}
        set_once(at, fields)
        fields["secrets"] = {one: self._named(one, given) for one, given in fields.get("secrets", {}).items()}
        replicas: Replicas = fields.pop("resources", Replicas())
        self._label(replicas.commands.pop("labels", {}))
        fields |= self._commands(replicas)
        check_mounts(at, fields)
        self._serve(replicas, fields.pop("service", {}))

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about valid fields that have no effect, or a different effect than in SkyPilot."""
        return self.at.found.notes

    def spell(self, gpu_types: Collection[str]) -> None:
        """Changes the GPU types to the spelling in `gpu_types`; documents may write them in any case."""
        known = {name.casefold(): name for name in gpu_types}
        for position, option in enumerate(self.options):
            types = tuple(known.get(name.casefold(), name) for name in option.resources.gpu_types)
            resources = option.resources.model_copy(update={"gpu_types": types})
            self.options[position] = option.model_copy(update={"resources": resources})

    def spec(self) -> ServiceSpec:
        """Returns the specification. Call it only if the document has no errors, and its secrets have names."""
        if self.literals or self.certificate:
            raise ValueError(f"the secrets {', '.join((*self.literals, 'tls'))} have no names")
        return ServiceSpec(**{**self.fields, "tenant": self.tenant, "options": tuple(self.options)})

    def _name(self, default: str | None) -> str:
        """Returns the name. SkyPilot's names may have capitals, dots and underscores, which are replaced."""
        at, name = self.at.get("name"), self.fields.get("name")
        if at.value is None and default is None:
            self.at.missing("name", "the service needs a name", rule=_NAMED)
        if name is None or is_name(name):
            return name or default or ""
        if self._is_ours:
            return at.wrong(_NAME, rule=_NAME_RULE) or ""
        changed = re.sub(r"[._]", "-", str(name)).lower()[:NAME_LENGTH].rstrip("-")
        self.notes.append(f"name: the service is named {changed}, because names have no capitals, dots and underscores")
        return changed

    def _named(self, variable: str, given: str) -> str:
        """Returns the name of a secret; empty if only the list of the tenant's secrets shows whether `given` is one."""
        place, found = self.at.get("secrets", variable), given or variable.lower().replace("_", "-")
        if given and not self._is_ours:
            self.literals[variable] = given
            return ""
        if is_name(found):
            place.name("secret", found)
        elif given:
            self.problems.append(FieldError(place.path, _SECRET, rule=_SECRET_RULE))
        else:
            place.wrong(f"must be the name of a secret; {found} is not a name", rule=_NO_VALUE)
        return found

    def _label(self, labels: dict[str, str]) -> None:
        """Adds the labels that the section `resources` sets."""
        own = self.fields.get("labels", {})
        for key in (key for key in labels if own.get(key, labels[key]) != labels[key]):
            place = self.at.get("resources", "labels", key)
            place.wrong(f"labels.{key} has another value; give it once", rule=LABELS_ONCE)
        if labels:
            self.fields["labels"] = labels | own

    def _commands(self, replicas: Replicas) -> dict[str, Any]:
        """Returns `argv`, `script` and `setup`."""
        at, fields = self.at, self.fields
        places = {key: at.get(key) for key in SCRIPTS if at.get(key).value is not None}
        for key in SCRIPTS:
            place = at.get("resources", key)
            if key in places and place.value is not None:
                place.wrong(f"is also given at the top level; give {key} only there", rule=_ONE_RUN)
            elif place.value is not None:
                places[key] = place
        image = at.get("resources", "image_id").value
        if "run" not in places and image is None:
            at.missing("run", "the command that starts the server", rule=_ONE_RUN)
        found = replicas.commands | {key: fields[key] for key in ("argv", "script", "setup") if key in fields}
        if image is None and "image_pull_secret" in fields:
            at.get("image_pull_secret").wrong("only possible with resources.image_id", rule=NO_PULL)
        elif image is not None and "setup" in found:
            self._set_up_in_container(found, places)
        for key, given in (("script", "run"), ("setup", "setup")):
            if key in found and not self._is_ours:
                found[key] = in_bash(places[given], found[key])
        return found

    def _set_up_in_container(self, found: dict[str, Any], places: dict[str, At]) -> None:
        """Prepends the setup script to `run`, because it must run in the image."""
        if self._is_ours:
            places["setup"].wrong("not possible with image_id: do it in run", rule=NO_SETUP)
        elif "script" in found:
            found["script"] = f"(\n{found.pop('setup')}\n) || exit\n{found['script']}"
        elif "argv" in found or "run" not in places:
            places["setup"].wrong("needs run as a script, because image_id is given", rule=NO_SETUP)

    def _serve(self, replicas: Replicas, values: dict[str, Any]) -> None:
        """Adds the fields of the section `service`."""
        at, fields = self.at.get("service"), self.fields
        ports = self.at.named("port")
        for place, port in ports:
            if port != ports[0][1]:
                first = f"{ports[0][0].path} is {ports[0][1]}"
                place.wrong(f"a replica has one port, and {first}; give the same port, or omit one", rule=ONE_PORT)
        spot, policy = read_policy(at, values.pop("replicas", None), values.pop("replica_policy", {}), replicas)
        spread: ReplicaSpread = values.get("spread", ReplicaSpread())
        if spot and spread.required and spread.over is not SpreadLevel.MACHINE:
            message = "must be preferred for replicas on spot machines: their policy chooses the zones"
            at.get("spread").wrong(message, rule=SPREAD_ON_SPOT)
        self.options = [option.model_copy(update={"spot": spot}) for option in replicas.options]
        probe = values.pop("readiness_probe", None)
        serving: dict[str, Any] = {
            "probe": read_probe(at.get("readiness_probe"), probe, fields["env"], fields.get("secrets", {})),
            "port": int(ports[0][1]) if ports else None,
        }
        serving |= {"drain_s": values.pop("drain_s")} if "drain_s" in values else {}
        values.pop("ports", None)
        self.certificate = values.pop("tls", None)
        fields |= {**values, "policy": policy, "serving": ServingSpec(**serving)}


read_service = ServiceDraft
