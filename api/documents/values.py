"""Parsers for values with a special syntax: durations, sizes, accelerators, variables and relative paths."""

import contextlib
import re

from api.documents.at import At
from domain.slots import MAX_SLOTS
from domain.units import parse_duration_s, parse_size_bytes

_MIN_MEMORY = 1 << 20
_MAX_MEMORY = 1 << 46
_ACCELERATOR = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})(?::([0-9]{1,4}))?")
_MAX_TYPES = 16
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
OWN_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
     "CUDA_VISIBLE_DEVICES"}
)  # fmt: skip
"""Variables that mizzen sets for every task, in addition to those that begin with `MIZZEN_`."""
_MAX_PATH = 1024
_MAX_PATH_PART = 255


def duration_s(at: At, low_s: float, high_s: float) -> float | None:
    """Returns the seconds of a number or of a string such as `90s`, `10m`, `1h30m` or `2d`."""
    if isinstance(at.value, str):
        try:
            seconds = parse_duration_s(at.value)
        except ValueError as error:
            at.wrong(f"{error}, or a number of seconds")
            return None
    else:
        if isinstance(at.value, bool) or not isinstance(at.value, int | float):
            at.wrong("must be a duration such as 30s, 10m, 2h or 1d, or a number of seconds")
            return None
        seconds = float(at.value)
    if not low_s <= seconds <= high_s:
        at.wrong(f"must be from {low_s:g} to {high_s:g} seconds")
        return None
    return seconds


def size_bytes(at: At) -> int | None:
    """Returns the bytes of an integer or of a string such as `512MiB`, `1.5Gi` (1024) or `16GB` (1000)."""
    found: int | None = None
    if isinstance(at.value, int) and not isinstance(at.value, bool):
        found = at.value
    elif isinstance(at.value, str):
        with contextlib.suppress(ValueError):
            found = parse_size_bytes(at.value)
    if found is None:
        at.wrong("must be a size such as 512MiB or 16GB, or a whole number of bytes")
        return None
    if not _MIN_MEMORY <= found <= _MAX_MEMORY:
        at.wrong(f"must be from 1MiB to 64TiB, it is {found} bytes")
        return None
    return found


def cpus_milli(at: At) -> int | None:
    """Returns thousandths of a core for a number of cores."""
    cores = at.number(0.001, 10_000)
    return None if cores is None else max(1, round(cores * 1000))


def accelerators(at: At) -> "tuple[int, list[tuple[At, str]]] | None":
    """Returns the number of GPUs per task and the acceptable types in order of preference.

    The value is `a100:8`, or a list of such strings with equal numbers.
    """
    places = [at] if isinstance(at.value, str) else at.items("accelerators such as a100:8", _MAX_TYPES)
    types: dict[str, At] = {}
    counts: list[int] = []
    ok = isinstance(at.value, str | list)
    for place in places:
        found = accelerator(place)
        if found is None:
            ok = False
            continue
        name, count = found
        if counts and count != counts[0]:
            place.wrong(f"all entries must have the same number of GPUs; the first has {counts[0]}, this has {count}")
        elif name in types:
            place.wrong("is given twice")
        else:
            counts.append(count)
            types[name] = place
            continue
        ok = False
    if not ok:
        return None
    return (counts[0] if counts else 0), [(place, name) for name, place in types.items()]


def accelerator(at: At) -> tuple[str, int] | None:
    """Returns the GPU type and the number of GPUs of a string such as `a100:8`; `a100` means one."""
    text = at.text("an accelerator such as a100:8")
    if text is None:
        return None
    match = _ACCELERATOR.fullmatch(text)
    if match is None:
        at.wrong("must be an accelerator and a number of them, such as a100:8")
        return None
    count = int(match[2] or 1)
    if not 1 <= count <= MAX_SLOTS:
        at.wrong(f"a task can have 1 to {MAX_SLOTS} GPUs, this asks for {count}")
        return None
    return match[1], count


def variable(at: At, name: str) -> bool:
    """Returns whether the user may set the environment variable `name`; if not, adds an error at `at`."""
    if not _VARIABLE.fullmatch(name):
        at.wrong("a variable's name must have letters, digits and underscores, and not begin with a digit")
    elif name.startswith("MIZZEN_"):
        at.wrong("variables that begin with MIZZEN_ are reserved")
    elif name in OWN_VARIABLES:
        at.wrong(f"{name} is set by mizzen for each task")
    else:
        return True
    return False


def relative_path(at: At, path: str) -> bool:
    """Returns whether `path` is a relative path inside the working directory; if not, adds an error at `at`."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        at.wrong("must be a relative path that stays in the working directory")
    elif any(part in ("", ".") for part in parts) or not path.isprintable():
        at.wrong("must be a normalised relative path, such as configs/model.yaml")
    elif len(path.encode()) > _MAX_PATH or any(len(part.encode()) > _MAX_PATH_PART for part in parts):
        at.wrong(f"must have at most {_MAX_PATH} bytes, and at most {_MAX_PATH_PART} in each part")
    else:
        return True
    return False
