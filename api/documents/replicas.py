"""The section `resources` of the service document: the resources of a service's replicas, with their alternatives."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from typing import Any

from api.documents import forms
from api.documents.forms import NAME, TRUTH, Field, Form, cases, integer, is_number, list_of, text
from api.documents.position import At
from api.documents.skypilot import IGNORED, REFUSED, either, not_both, section
from api.documents.workload import (
    ACCELERATOR,
    COMMANDS,
    COMMON,
    CORES,
    LEAST_MEMORY_BYTES,
    MEMORY,
    MOST_MEMORY_BYTES,
    TYPE_PATTERN,
    milli,
)  # fmt: skip
from domain.ids import NAME_PATTERN, NAME_RULE
from domain.images import IMAGE_PATTERN, IMAGE_RULE, MAX_IMAGE
from domain.patterns import decimals, matching, sizes, whole_numbers
from domain.service import ResourceOption
from domain.slots import MAX_SLOTS
from domain.spec import ResourceSpec

MAX_OPTIONS = 64
_ALL_ALIKE = ("argv", "script", "setup", "image", "labels")
SCRIPTS = ("setup", "run")
"""SkyServe's paper has these keys below `resources`; they belong to the top level."""
_GIB = 1 << 30
_LEAST_GIB, _MOST_GIB = LEAST_MEMORY_BYTES / _GIB, MOST_MEMORY_BYTES // _GIB
_GIB_PATTERN = str(decimals(Fraction(_LEAST_GIB), Fraction(_MOST_GIB)))
_PORT_PATTERN = f"^{whole_numbers(1, 65535)}$"
_FOLDED_NAME = NAME_PATTERN.replace("a-z", "A-Za-z")
_PLACE = f"([*]|{NAME_PATTERN[1:-1]})"
_INFRA = f"^([*]|{_FOLDED_NAME[1:-1]})(/{_PLACE}(/{_PLACE})?)?$"
ONE_PORT = "All ports of the document are the same"
_DIFFERENT = "Accelerators differ in their types or numbers"
_NOT_WITH_INFRA = "infra is given without provider, cloud, region and zone"
_SAME_SPOT = "use_spot is the same in all alternatives"
_NOT_MORE = f"All alternatives together are at most {MAX_OPTIONS}"


@dataclass
class Replicas:
    """The valid resources of a replica."""

    options: list[ResourceOption] = field(default_factory=lambda: [ResourceOption()])
    spot: bool | None = None
    """Whether replicas use spot machines; None: `use_spot` is not given."""
    commands: dict[str, Any] = field(default_factory=dict)
    """`argv`, `script`, `setup`, `image` and `labels`, if they are given."""


def _mapped(at: At) -> list[tuple[str, int]]:
    """Reads `{A100: 8}`, or `{A100:8}` without a space, which YAML parses as the key `A100:8`."""
    found: list[tuple[str, int]] = []
    for key, place in at.entries("accelerators such as a100:8", MAX_OPTIONS).items():
        count = None if place.value is None else integer(1, MAX_SLOTS).read(At("", place.value))
        if count is None and place.value is not None:
            place.wrong(f"must be a whole number of GPUs from 1 to {MAX_SLOTS}")
        elif one := ACCELERATOR.read(place.with_value(key if count is None else f"{key}:{count}")):
            _another(place, one, found)
            found.append(one)
    return found


def _another(at: At, one: tuple[str, int], before: list[tuple[str, int]]) -> None:
    if one in before:
        at.wrong("is given twice", rule=_DIFFERENT)


def _groups(read: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Returns the alternatives in order of preference; those of one inner list have equal numbers of GPUs."""
    return [list(group) for _, group in groupby(read, key=lambda one: one[1])]


_MAPPING: dict[str, Any] = {
    "type": "object",
    "patternProperties": {
        f"^{TYPE_PATTERN}$": {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_SLOTS},
        f"^{TYPE_PATTERN}:{whole_numbers(1, MAX_SLOTS)}$": {"type": "null"},
    },
    "propertyNames": {"not": {"pattern": "\\n"}},
    "additionalProperties": False,
    "maxProperties": MAX_OPTIONS,
    "description": _DIFFERENT,
}
_ACCELERATORS = cases({
    str: ACCELERATOR.to(lambda one: [one]),
    list: list_of(ACCELERATOR, "accelerators such as a100:8", MAX_OPTIONS, each=(_another, _DIFFERENT)),
    dict: Form(_MAPPING, _mapped),
}, "must be accelerators such as a100:8, it is {}").to(_groups)  # fmt: skip
_CPUS = cases({
    (int, float): CORES.to(milli),
    str: text("a number of CPUs", 100, f"^{decimals(Fraction(1, 1000), Fraction(10_000))}[+]?$",
              "must be a number of CPUs from 0.001 to 10000 such as 4, or 4+ for at least 4")
    .to(lambda given: milli(float(given.removesuffix("+")))),
}, "must be a number of CPUs such as 4, or 4+, it is {}")  # fmt: skip


def _memory(at: At) -> Any:
    value: Any = at.value.removesuffix("+") if isinstance(at.value, str) else at.value
    value = float(value) if isinstance(value, str) and re.fullmatch(_GIB_PATTERN, value) else value
    if is_number(value) and _LEAST_GIB <= value <= _MOST_GIB:
        return round(value * _GIB)
    if isinstance(value, str) and value.endswith("x"):
        return at.wrong("must be a size such as 64GiB; multiples of the CPUs are not supported")
    return MEMORY.read(at.with_value(value))


_MEMORY = Form({"anyOf": [
    matching(f"^({_GIB_PATTERN}|{sizes(LEAST_MEMORY_BYTES, MOST_MEMORY_BYTES)})[+]?$"),
    {"type": "number", "minimum": _LEAST_GIB, "maximum": _MOST_GIB},
    integer(LEAST_MEMORY_BYTES, MOST_MEMORY_BYTES).schema,
]}, _memory)  # fmt: skip


def _port(at: At) -> Any:
    number = integer(1, 65535).read(At("", at.value))
    given = at.value if number is None else str(number)
    if not isinstance(given, str) or not re.fullmatch(_PORT_PATTERN, given):
        return at.wrong("must be one port from 1 to 65535; ranges are not supported")
    at.name("port", given)
    return int(given)


_PORT = Form({"anyOf": [integer(1, 65535).schema, matching(_PORT_PATTERN)]}, _port)
_LIST = list_of(_PORT, "ports", MAX_OPTIONS)
PORTS = Field(
    Form({"anyOf": [_PORT.schema, _LIST.schema]}, lambda at: (_LIST if isinstance(at.value, list) else _PORT).read(at)),
    "The port on which a replica listens. Without it, a replica reads its port from MIZZEN_PORT",
)


def _infra(given: str) -> dict[str, str]:
    provider, *rest = given.split("/")
    parts = zip(("provider", "region", "zone"), (provider.lower(), *rest), strict=False)
    return {key: part for key, part in parts if part != "*"}


_PROVIDER = text("the name of a provider in the installation's settings", 63, _FOLDED_NAME,
                 f"must be a name: {NAME_RULE}").to(str.lower)  # fmt: skip
_OPTION = {
    "accelerators": Field(
        _ACCELERATORS,
        "GPUs of each machine, such as a100:8; several are alternatives in order of preference", "gpus"),
    "cpus": Field(_CPUS, "4, or 4+ for at least 4", "cpus_milli", default=1),
    "memory": Field(_MEMORY, f"64GiB; a number up to {_MOST_GIB}, or a string such as 64+, is in GiB", "memory_bytes",
                    default="1GiB"),
    "ports": PORTS,
    "use_spot": Field(TRUTH, "Whether replicas run on spot machines", "spot", default=False),
    "provider": Field(_PROVIDER, "Name of a provider in the installation's settings"),
    "cloud": Field(_PROVIDER, not_both("provider", "cloud")),
    "region": Field(NAME),
    "zone": Field(NAME),
    "infra": Field(
        text("provider/region/zone", 191, _INFRA,
             "must be provider, provider/region or provider/region/zone, each a name, with * for any").to(_infra),
        f"provider/region/zone, with * for any. {_NOT_WITH_INFRA}"),
}  # fmt: skip


def _option(at: At, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that one alternative of `resources` sets; omitted fields have no key."""
    infra: dict[str, Any] = values.pop("infra", {})
    for key in ("provider", "cloud", "region", "zone"):
        if at.get("infra").value is not None and at.get(key).value is not None:
            at.get(key).wrong("is also part of infra; give one of them", rule=_NOT_WITH_INFRA)
    provider = either(at, values, "provider", "cloud")
    values.pop("ports", None)
    return values | ({} if provider is None else {"provider": provider}) | infra


def _replicas(at: At, values: dict[str, Any]) -> Replicas:
    alternatives = either(at, values, "any_of", "ordered")
    commands: dict[str, Any] = {key: values.pop(key) for key in _ALL_ALIKE if key in values}
    base = _option(at, values)
    # An entry replaces values of the section. A cloud of its own also excludes the section's region and zone.
    read = [
        {**{k: v for k, v in base.items() if "provider" not in own or k not in ("region", "zone")}, **own}
        for own in alternatives or [{}]
    ]
    spots = {one.get("spot", False) for one in read}
    if len(spots) > 1:
        at.child("use_spot", None).wrong(
            "must be the same in all alternatives; for on-demand replicas beside spot ones, use "
            "replica_policy.dynamic_ondemand_fallback or replica_policy.base_ondemand_fallback_replicas",
            rule=_SAME_SPOT,
        )
    spot = spots != {False} if any("spot" in one for one in read) else None
    if "spot" not in base and at.get("use_spot").value is not None:
        spot = True  # The value is invalid. Assume spot, so that fields that need spot machines are not reported too.
    options = [option for one in read for option in _options(one)]
    if len(options) > MAX_OPTIONS:
        at.wrong(f"may have at most {MAX_OPTIONS} alternatives, these are {len(options)}", rule=_NOT_MORE)
    return Replicas(options, spot, commands)


def _options(values: Mapping[str, Any]) -> list[ResourceOption]:
    place = {key: values.get(key) for key in ("provider", "region", "zone")}
    amounts = {key: values[key] for key in ("cpus_milli", "memory_bytes") if key in values}
    found = []
    for group in values.get("gpus") or [[]]:
        types = tuple(gpu_type for gpu_type, _ in group)
        resources = ResourceSpec(gpus=group[0][1] if group else 0, gpu_types=types, **amounts)
        found.append(ResourceOption(resources=resources, spot=bool(values.get("spot")), **place))
    return found


_SAME = "it is the same for all alternatives: give it in resources"
_ALTERNATIVES = list_of(
    forms.section(
        _OPTION, "", refused={**REFUSED["resources"], "image_id": _SAME, "labels": _SAME}, ignored=IGNORED["resources"]
    ).checked(_option), "mappings, one for each alternative", MAX_OPTIONS,
    empty="must have at least one alternative; omit it if there is only one",
)  # fmt: skip
RESOURCES = section("resources", {
    **_OPTION,
    "any_of": Field(_ALTERNATIVES, "Each replaces some of the values beside this list; in order of preference"),
    "ordered": Field(_ALTERNATIVES, not_both("any_of", "ordered")),
    "image_id": Field(
        text("a container image", MAX_IMAGE, f"^docker:{IMAGE_PATTERN[1:]}", f"must be docker:IMAGE, where IMAGE is "
             f"{IMAGE_RULE}; the provider's settings name the images of machines")
        .to(lambda given: given.removeprefix("docker:")),
        "docker: and a container image, in which the tasks run", "image"),
    "labels": COMMON["labels"],
    **{key: COMMANDS[key] for key in SCRIPTS},
}, "Resources of each machine of a replica").checked(_replicas, _SAME_SPOT, _NOT_MORE)  # fmt: skip
