"""Reads the resources of a service's replicas: `resources`, with its alternatives."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from api.documents.at import At
from api.documents.skypilot import either, section
from api.documents.values import accelerator, cpus_milli, size_bytes
from domain.service import ResourceOption
from domain.spec import ResourceSpec

MAX_OPTIONS = 64
HIGHEST_PORT = 65535
_GIB = 1 << 30
_LARGEST_GIB = 1 << 20
"""A smaller number is GiB, as in SkyPilot's files; a larger one is bytes. So few bytes are never enough."""
_AT_LEAST = re.compile(r"([0-9]+(?:\.[0-9]+)?)\+?")
_PORT = re.compile(r"[0-9]{1,5}")
_OPTION_KEYS = (
    "accelerators", "cpus", "memory", "ports", "use_spot", "provider", "cloud", "region", "zone", "infra",
)  # fmt: skip
_KEYS = (*_OPTION_KEYS, "any_of", "ordered")
SCRIPTS = ("setup", "run")
"""SkyServe's paper has these keys below `resources`; they belong to the top level."""
_Gpus = list[list[tuple[At, str, int]]]
"""Alternatives in order of preference; those of one inner list have equal numbers of GPUs."""


@dataclass
class Replicas:
    """The valid resources of a replica, with positions of values that are checked further."""

    options: list[ResourceOption] = field(default_factory=lambda: [ResourceOption()])
    spot: bool | None = None
    """Whether replicas use spot machines; None: `use_spot` is not given."""
    types_at: list[tuple[At, str]] = field(default_factory=list)
    ports_at: list[tuple[At, int]] = field(default_factory=list)
    scripts: dict[str, At] = field(default_factory=dict)


def read_replicas(at: At, notes: list[str]) -> Replicas:
    """Reads the section `resources`. Each note is a sentence about a field without effect."""
    found = Replicas()
    members = section(at, "resources", (*_KEYS, *SCRIPTS), notes)
    found.scripts = {key: members[key] for key in SCRIPTS if key in members}
    base = _read_option(members, found)
    if "any_of" in members and "ordered" in members:
        members["ordered"].wrong("means the same as any_of; give one of them")
    alternatives = members.get("any_of", members.get("ordered"))
    read: list[dict[str, Any]] = []
    if alternatives is not None:
        for place in alternatives.items("mappings, one for each alternative", MAX_OPTIONS):
            # An entry replaces values of the section. A cloud of its own also excludes the section's region and zone.
            own = _read_option(section(place, "resources", _OPTION_KEYS, notes), found)
            kept = {k: v for k, v in base.items() if "provider" not in own or k not in ("region", "zone")}
            read.append({**kept, **own})
        if alternatives.value == []:
            alternatives.wrong("must have at least one alternative; omit it if there is only one")
    read = read or [base]
    spots = {one.get("spot", False) for one in read} - {None}
    if len(spots) > 1:
        at.child("use_spot", None).wrong(
            "must be the same in all alternatives; for on-demand replicas beside spot ones, use "
            "replica_policy.dynamic_ondemand_fallback or replica_policy.base_ondemand_fallback_replicas"
        )
    if any("spot" in one for one in read):
        found.spot = spots != {
            False
        }  # An invalid value counts as true. Otherwise fields that need spot would be errors, too.
    found.options = [option for one in read for option in _options(one)]
    if len(found.options) > MAX_OPTIONS:
        at.wrong(f"may have at most {MAX_OPTIONS} alternatives, these are {len(found.options)}")
    return found


def _read_option(members: Mapping[str, At], found: Replicas) -> dict[str, Any]:
    """Returns the valid values of one alternative. Keys that are not given are absent."""
    values: dict[str, Any] = {}
    if "accelerators" in members:
        values["gpus"] = _accelerators(members["accelerators"])
        found.types_at += [(place, name) for group in values["gpus"] for place, name, _ in group]
    if "cpus" in members:
        values["cpus_milli"] = _cpus_milli(members["cpus"])
    if "memory" in members:
        values["memory_bytes"] = _memory_bytes(members["memory"])
    if "use_spot" in members:
        values["spot"] = members["use_spot"].truth()
    if "ports" in members:
        found.ports_at += read_ports(members["ports"])
    provider = either(members, "provider", "cloud")
    if "infra" in members:
        for key in ("provider", "cloud", "region", "zone"):
            if key in members:
                members[key].wrong("is also part of infra; give one of them")
        values |= _infra(members["infra"])
    elif provider is not None:
        # SkyPilot accepts the names of clouds in any case.
        text = provider.text("the name of a provider in the installation's settings")
        values["provider"] = None if text is None else _name(provider, text.lower())
    for key in ("region", "zone"):
        if key in members and "infra" not in members:
            values[key] = members[key].name()
    return values


def _options(values: Mapping[str, Any]) -> list[ResourceOption]:
    default = ResourceSpec()
    place = {key: values.get(key) for key in ("provider", "region", "zone")}
    return [
        ResourceOption(
            resources=ResourceSpec(
                gpus=group[0][2] if group else 0,
                gpu_types=tuple(name for _, name, _ in group),
                cpus_milli=values.get("cpus_milli") or default.cpus_milli,
                memory_bytes=values.get("memory_bytes") or default.memory_bytes,
            ),
            spot=bool(values.get("spot")),
            **place,
        )
        for group in values.get("gpus") or [[]]
    ]


def _accelerators(at: At) -> _Gpus:
    """Reads `A100:8`, a list of such strings, or a mapping: `{A100: 8}`, or `{A100:8}` without a space."""
    if isinstance(at.value, dict):
        places = []
        for key, place in at.entries("accelerators such as a100:8", MAX_OPTIONS).items():
            number = place.value
            if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
                place.wrong("must be a whole number of GPUs")
                continue
            text = key if number is None else f"{key}:{number}"
            places.append(At(place.path, text, at.problems))
    elif isinstance(at.value, list):
        places = at.items("accelerators such as a100:8", MAX_OPTIONS)
    else:
        places = [at]
    seen: set[tuple[str, int]] = set()
    read: list[tuple[At, str, int]] = []
    for place in places:
        one = accelerator(place)
        if one is None:
            continue
        if one in seen:
            place.wrong("is given twice")
            continue
        seen.add(one)
        read.append((place, *one))
    return [list(group) for _, group in groupby(read, key=lambda one: one[2])]


def _cpus_milli(at: At) -> int | None:
    if isinstance(at.value, str):
        match = _AT_LEAST.fullmatch(at.value)
        if match is None:
            at.wrong("must be a number of CPUs such as 4, or 4+ for at least 4")
            return None
        at = At(at.path, float(match[1]), at.problems)
    return cpus_milli(at)


def _memory_bytes(at: At) -> int | None:
    text = at.value.removesuffix("+") if isinstance(at.value, str) else at.value
    match = _AT_LEAST.fullmatch(text) if isinstance(text, str) else None
    number = float(match[1]) if match is not None else text
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < _LARGEST_GIB:
        return size_bytes(At(at.path, round(number * _GIB), at.problems))
    if isinstance(text, str) and match is None and text[-1:] == "x":
        at.wrong("must be a size such as 64GiB; multiples of the CPUs are not supported")
        return None
    return size_bytes(At(at.path, text, at.problems))


def read_ports(at: At) -> list[tuple[At, int]]:
    """Reads one or more ports, as numbers or strings."""
    places = at.items("ports", MAX_OPTIONS) if isinstance(at.value, list) else [at]
    ports = []
    for place in places:
        value = place.value
        if isinstance(value, str) and _PORT.fullmatch(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= HIGHEST_PORT:
            place.wrong(f"must be one port from 1 to {HIGHEST_PORT}; ranges are not supported")
        else:
            ports.append((place, value))
    return ports


def _infra(at: At) -> dict[str, Any]:
    text = at.text("provider/region/zone")
    parts = text.split("/") if text is not None else []
    if text is not None and len(parts) > 3:
        at.wrong("must be provider, provider/region or provider/region/zone, with * for any")
        return {}
    parts[:1] = [part.lower() for part in parts[:1]]
    keys = ("provider", "region", "zone")
    return {key: _name(at, part) for key, part in zip(keys, parts, strict=False) if part != "*"}


def _name(at: At, text: str) -> str | None:
    return At(at.path, text, at.problems).name()
