"""Checks values that a conversion copied from its source: values that the API would refuse are reported as errors."""

import re
from collections.abc import Iterator
from typing import Any

from mizzen_client.convert.conversion import CannotConvert, Conversion, shown

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
_IMAGE = re.compile(
    rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)
_MOST_IMAGE = 512
_ACCELERATOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}:([1-9]|[1-5][0-9]|6[0-2])")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
_DAYS = re.compile(r"([0-9]+)d")
_MOST_SCRIPT_BYTES = 96 << 10
_MOST_CORES, _MOST_TASKS, _MOST_DAYS, _MOST_LABEL = 10_000, 100_000, 365, 256


def check(conversion: Conversion) -> None:
    """Check the workloads of a conversion; services are checked by the API only, whose fields they copy.

    Raises:
        CannotConvert: a value is not possible. The message names the line that it is from.
    """
    for document in conversion.documents:
        for path, value, right in _wrong(document) if "jobs" in document else ():
            fitting = [one.line for one in conversion.remarks if one.target and path.startswith(one.target)]
            raise CannotConvert(max(fitting, default=1), f"{path}: {shown(value)!r} {right}")


def _wrong(document: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the path of each invalid value, the value, and a description of valid values."""
    for key, text in document.get("labels", {}).items():
        if not _LABEL.fullmatch(key) or len(text) > _MOST_LABEL:
            yield f"labels.{key}", text, f"a key has letters and digits, and a label at most {_MOST_LABEL} characters"
    limit = document.get("limits", {}).get("max_runtime", "")
    if (days := _DAYS.match(limit)) and int(days[1]) > _MOST_DAYS:
        yield "limits.max_runtime", limit, f"must be at most {_MOST_DAYS} days; leave it out for no limit"
    for number, job in enumerate(document["jobs"]):
        at, resources, image = f"jobs[{number}]", job.get("resources", {}), job.get("image")
        if image is not None and (len(image) > _MOST_IMAGE or not _IMAGE.fullmatch(image)):
            yield f"{at}.image", image, "must be [HOST/]NAME[:TAG][@sha256:DIGEST] in lower case"
        given = resources.get("accelerators", [])
        for one in [given] if isinstance(given, str) else given:
            if not _ACCELERATOR.fullmatch(one):
                yield f"{at}.resources.accelerators", one, "must be a type and a number of 1 to 62, such as a100:8"
        if resources.get("cpus", 1) > _MOST_CORES:
            yield f"{at}.resources.cpus", resources["cpus"], f"must be at most {_MOST_CORES}"
        for key in ("setup", "run"):
            if len(str(job.get(key, "")).encode()) > _MOST_SCRIPT_BYTES:
                yield f"{at}.{key}", job[key], f"must have at most {_MOST_SCRIPT_BYTES} bytes: use files of `workdir`"
        if job.get("tasks", 1) > _MOST_TASKS:
            yield f"{at}.tasks", job["tasks"], f"must be at most {_MOST_TASKS}"


def with_escaped_braces(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with an array in which two opening braces stand for themselves, and not for a parameter."""
    jobs = [{key: _escaped(value) if key in ("run", "setup", "env") else value for key, value in job.items()}
            for job in document["jobs"]]  # fmt: skip
    files = {"files": _escaped(document["files"])} if "files" in document else {}
    return {**document, **files, "jobs": jobs}


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("{{", "{{{{")
    if isinstance(value, list):
        return [_escaped(one) for one in value]
    return {name: _escaped(one) for name, one in value.items()}
