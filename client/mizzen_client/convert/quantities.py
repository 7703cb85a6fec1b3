"""Durations, sizes, numbers of cores and GPU types, as mizzen's documents write them."""

import re
from fractions import Fraction

_UNITS_S = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_BINARY = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20))
_FACTORS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50,
}  # fmt: skip
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(?:[eE]([0-9]{1,2}))?(m|[kMGTP]|[KMGTP]i)?")
_GPU_MODELS = re.compile(
    r"(?:nvidia|tesla|amd|geforce|accelerators?)?[-_. ]?"
    r"((?:gh?|gb|[abhlvpkt])[0-9]{1,3}[gs]?|rtx[-_ ]?[a-z]?[0-9]{4}|a[0-9]{4}|mi[0-9]{2,3}[a-z]?|2080ti|[345]0[0-9]0)"
    r"(?:[-_. ](?:[0-9]{1,3}g[bi]?|sxm[0-9]?|pcie|nvl|tensor.?core|ti|hbm[0-9]e?|x))*",
    re.IGNORECASE,
)
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 46


def duration_text(seconds: int) -> str:
    """Return a duration such as `1d2h`."""
    parts = []
    for size, unit in _UNITS_S:
        if seconds >= size:
            parts.append(f"{seconds // size}{unit}")
            seconds %= size
    return "".join(parts) or "0s"


def memory_text(size_bytes: int) -> str:
    """Return a size such as `16GiB`, rounded up to MiB.

    Raises:
        ValueError: mizzen does not accept this size of a task's memory.
    """
    size_bytes = -(-size_bytes // _LEAST_BYTES) * _LEAST_BYTES
    if not _LEAST_BYTES <= size_bytes <= _MOST_BYTES:
        raise ValueError("the memory of a task must be from 1MiB to 64TiB")
    return next(f"{size_bytes // unit}{name}" for name, unit in _BINARY if size_bytes % unit == 0)


def quantity(text: str) -> Fraction:
    """Return the number of a quantity of Kubernetes, such as `500m`, `1.5Gi` or `1e9`.

    Raises:
        ValueError: `text` is not a quantity.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or (found[2] and found[3]):
        raise ValueError("must be a quantity such as 500m, 4, 16Gi or 512M")
    unit = found[3] or ""
    number = Fraction(found[1]) * Fraction(10) ** int(found[2] or 0)
    return number / 1000 if unit == "m" else number * _FACTORS[unit]


def cores(number: Fraction) -> int | float:
    """Return a number of cores, at least a thousandth, with at most three decimal places."""
    rounded = max(1, round(number * 1000))
    return rounded // 1000 if rounded % 1000 == 0 else rounded / 1000


def gpu_model(text: str) -> str | None:
    """Return the GPU type in a label or a product's name, such as `NVIDIA-A100-SXM4-80GB`; None: there is none."""
    found = _GPU_MODELS.fullmatch(text.strip())
    return None if found is None else found[1].lower().replace("_", "").replace(" ", "").replace("-", "")
