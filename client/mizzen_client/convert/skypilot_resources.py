"""The section `resources` of SkyPilot's tasks."""

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mizzen_client.convert import skypilot_fields as table
from mizzen_client.convert.conversion import CannotConvert, fitting_name, shown
from mizzen_client.convert.quantities import cores, memory_text
from mizzen_client.convert.source_tree import KeyedSection, Located, as_text

_AMOUNT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([KMGT]i?B?)?(\+|x)?", re.IGNORECASE)
_ACCELERATOR = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})(?::([0-9]{1,3})(?:\.0+)?)?")
_SHIFT = {"K": 10, "M": 20, "G": 30, "T": 40}
_ON_DEMAND = ["reserved", "on_demand"]
_GUESSED_CORES, _GUESSED_BYTES = 8, 32 << 30
_MOST_RETRIES = 1000
_KINDS_DIFFER = (
    "alternatives differ in more than accelerators and use_spot: the first is used; submit the others as documents"
)


@dataclass
class SkyPilotResources:
    """The resources that a task requests, as fields of a document."""

    fields: dict[str, Any] = field(default_factory=dict)
    """The resources of its job."""
    gpus: int = 0
    image: str | None = None
    regions: list[str] = field(default_factory=list)
    capacity: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    retries: Any = None


def convert_resources(section: KeyedSection) -> SkyPilotResources:
    """Return the resources that the section requests.

    Raises:
        CannotConvert: a value is invalid.
    """
    wanted = SkyPilotResources()
    types = _accelerators(section, section.take("accelerators"))
    spot = section.take("use_spot")
    kinds = [] if spot is None else [_spot(section, spot)]
    is_silent = False
    for key in ("any_of", "ordered"):
        for option in section.each(key):
            known = len(kinds)
            types, kinds = _alternative(option, types, kinds)
            is_silent |= len(kinds) == known
    if is_silent and spot is None and kinds:  # An alternative without use_spot is on demand.
        kinds = [False, *kinds]
    if types:
        counts = {count for _, count in types}
        if len(counts) > 1:
            raise CannotConvert(
                section.line, "resources: alternatives with different numbers of GPUs; give the same number for all"
            )
        wanted.gpus = counts.pop()
        names = [f"{name}:{count}" for name, count in dict.fromkeys(types)]
        wanted.fields["accelerators"] = names[0] if len(names) == 1 else names
    wanted.capacity = _capacity(kinds)
    if not kinds:
        why = "SkyPilot uses no spot machines by default; leave the field out to allow them"
        section.conversion.changed(section.line, "no use_spot", "capacity", why)
    _sizes(section, wanted)
    _places(section, wanted)
    _recovery(section, wanted)
    section.close(table.RESOURCES_DROPPED, table.RESOURCES_LOST)
    return wanted


def _spot(section: KeyedSection, node: Located) -> bool:
    if not isinstance(node.value, bool):
        raise CannotConvert(
            node.line, f"{section.name('use_spot')}: must be true or false, it is {shown(node.plain)!r}"
        )
    section.carried("use_spot", node, "capacity")
    return node.value


def _capacity(kinds: list[bool]) -> list[str]:
    found = [kind for spot in dict.fromkeys(kinds or [False]) for kind in (["spot"] if spot else _ON_DEMAND)]
    return list(dict.fromkeys(found))


def _alternative(
    option: KeyedSection, types: list[tuple[str, int]], kinds: list[bool]
) -> tuple[list[tuple[str, int]], list[bool]]:
    """Add the accelerators and the capacity of one of `any_of`."""
    if node := option.take("accelerators"):
        types = [*types, *_accelerators(option, node)]
    if (spot := option.take("use_spot")) is not None:
        kinds = [*kinds, _spot(option, spot)]
    for key in ("cloud", "infra", "region", "zone"):
        if node := option.take(key):
            why = (
                "all regions are allowed: mizzen's regions are names of the installation, restrict them with `regions`"
            )
            option.changed(key, node, "regions", why)
    option.close(table.RESOURCES_DROPPED, {**table.RESOURCES_LOST, **dict.fromkeys(_SIZES, _KINDS_DIFFER)})
    return types, kinds


_SIZES = ("cpus", "memory", "image_id", "ports", "job_recovery")


def _accelerators(section: KeyedSection, node: Located | None) -> list[tuple[str, int]]:
    if node is None:
        return []
    if isinstance(node.value, dict):
        given = [f"{name}:{as_text(one.value)}" if one.value is not None else name for name, one in node.keys.items()]
    else:
        given = [as_text(one.value) for one in node.items]
    found = []
    for text in given:
        match = _ACCELERATOR.fullmatch(text)
        if match is None or not 1 <= int(match[2] or 1) <= 62:
            raise CannotConvert(
                node.line,
                f"{section.name('accelerators')}: {shown(text)!r} must be a type and a number, such as A100:8",
            )
        found.append((match[1].lower(), int(match[2] or 1)))
    is_tpu = any(name.startswith("tpu") for name, _ in found)
    if is_tpu:
        section.lost("accelerators", node, "TPUs are not supported: give a GPU type")
        return []
    why = "the type is in lower case: write it as `mizzen machines` shows it"
    section.changed("accelerators", node, "jobs[0].resources.accelerators", why)
    return found


def _sizes(section: KeyedSection, wanted: SkyPilotResources) -> None:
    guess = max(1, wanted.gpus)
    cpus = _amount(section, "cpus", _GUESSED_CORES * guess)
    wanted.fields["cpus"] = cores(Fraction(cpus[0]))
    memory, unit = _amount(section, "memory", 0)
    size = int(memory * (1 << _SHIFT[unit or "G"])) if memory else _GUESSED_BYTES * guess
    try:
        wanted.fields["memory"] = memory_text(size)
    except ValueError as error:
        raise CannotConvert(section.line, f"resources.memory: {error}") from None


def _amount(section: KeyedSection, key: str, default: int) -> tuple[Fraction, str]:
    """Return the number and the unit of `cpus` or `memory`."""
    node = section.text(key)
    target = f"jobs[0].resources.{key}"
    if node is None:
        why = (
            f"SkyPilot gives the whole machine; {_GUESSED_CORES} cores and 32GiB (for each GPU) are written: adapt them"
        )
        section.conversion.changed(section.line, f"no resources.{key}", target, why)
        return Fraction(default), ""
    found = _AMOUNT.fullmatch(node.value)
    if found is None or found[3] == "x":
        raise CannotConvert(node.line, f"{section.name(key)}: {node.value!r} must be a number such as 8, or 8+")
    if found[3]:
        section.changed(key, node, target, f"exactly {found[1]}, because a document states what a task needs")
    else:
        section.carried(key, node, target)
    return Fraction(found[1]), (found[2] or "")[:1].upper()


def _places(section: KeyedSection, wanted: SkyPilotResources) -> None:
    for key in ("cloud", "infra", "region", "zone"):
        node = section.text(key)
        if node is None:
            continue
        parts = node.value.split("/")
        region = node.value if key == "region" else parts[1] if key == "infra" and len(parts) > 1 else ""
        if region and region != "*":
            wanted.regions = [fitting_name(region)]
            why = "regions are names of the installation (`mizzen regions`): replace it if it has another name"
            section.changed(key, node, "regions.allow", why)
        else:
            why = "mizzen has no clouds and zones in documents: restrict it with `regions`, names of the installation"
            section.lost(key, node, why)
    if node := section.take("image_id"):
        image = as_text(node.plain)
        if image.startswith("docker:"):
            wanted.image = image.removeprefix("docker:")
            section.carried("image_id", node, "jobs[0].image")
        else:
            section.lost(
                "image_id", node, "machine images are the providers' settings: give docker:IMAGE, or use setup"
            )
    if node := section.take("labels"):
        wanted.labels = {key: as_text(one.plain) for key, one in node.keys.items()}
        section.carried("labels", node, "labels")


def _recovery(section: KeyedSection, wanted: SkyPilotResources) -> None:
    """Read `job_recovery`, and `spot_recovery`, its older name: a strategy, or a mapping."""
    for name in ("job_recovery", "spot_recovery"):
        node = section.take(name)
        if node is None:
            continue
        if not isinstance(node.value, dict):
            section.dropped(name, node, "a preempted workload returns to the queue, and is placed in the best region")
            continue
        inner = KeyedSection(section.conversion, node, section.name(name))
        if strategy := inner.take("strategy"):
            inner.dropped(
                "strategy", strategy, "a preempted workload returns to the queue, and is placed in the best region"
            )
        retries = inner.number("max_restarts_on_errors")
        if retries is not None:
            wanted.retries = min(retries.value, _MOST_RETRIES)
            inner.carried("max_restarts_on_errors", retries, "limits.retries")
        if codes := inner.take("recover_on_exit_codes"):
            exits = {as_text(one.value): _MOST_RETRIES for one in codes.items}
            wanted.retries = {"exit": {**exits, "other": wanted.retries or 0}}
            inner.changed("recover_on_exit_codes", codes, "limits.retries.exit", f"at most {_MOST_RETRIES} times each")
        inner.close({}, {})
