"""Converts `--mail-type` and `--mail-user` to `notify`."""

import re
from typing import Any

from mizzen_client.convert.conversion import Conversion
from mizzen_client.convert.slurm_options import SlurmOption

_ENDS = {
    "ALL": ("succeeded", "failed", "cancelled"), "END": ("succeeded", "failed", "cancelled"), "FAIL": ("failed",),
    "INVALID_DEPEND": ("cancelled",), "TIME_LIMIT": ("failed",),
}  # fmt: skip
"""Slurm's e-mail events as ends of a workload. END includes jobs that fail or are cancelled."""
_ORDER = _ENDS["ALL"]
_ADDRESS = re.compile(
    r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"  # As in the API.
)


def notify_of(
    conversion: Conversion, kinds: SlurmOption | None, user: SlurmOption | None, *, is_array: bool
) -> list[dict[str, Any]]:
    """Return the receivers of e-mail, with a remark about each of the two options."""
    if kinds is None:
        if user is not None:
            conversion.dropped(user.line, user.text, "Slurm sends no e-mail without --mail-type, either")
        return []
    words = [word.strip().upper() for word in kinds.value.split(",") if word.strip()]
    ends = {end for word in words for end in _ENDS.get(word, ())}
    addresses = [] if user is None else [one.strip() for one in user.value.split(",") if one.strip()]
    why = _why_not(words, ends, addresses)
    if why is not None:
        for option in filter(None, (kinds, user)):
            conversion.dropped(option.line, option.text, why)
        return []
    assert user is not None
    others = [word for word in words if word not in _ENDS and word != "ARRAY_TASKS"] + ["BEGIN"] * ("ALL" in words)
    if others:
        conversion.changed(kinds.line, kinds.text, "notify", f"e-mail is sent at ends, not for {', '.join(others)}")
    else:
        conversion.carried(kinds.line, kinds.text, "notify")
    conversion.carried(user.line, user.text, "notify")
    on = [] if ends == {*_ORDER} else [end for end in _ORDER if end in ends]
    each = "ARRAY_TASKS" in words and is_array
    return [
        {"email": address, **({"on": on} if on else {}), **({"each": True} if each else {})} for address in addresses
    ]


def _why_not(words: list[str], ends: set[str], addresses: list[str]) -> str | None:
    """Return why no e-mail is sent; None: it is sent."""
    if words == ["NONE"]:
        return "Slurm sends no e-mail, either"
    if not ends:
        return "e-mail is sent at ends only; `mizzen events NAME` has all changes"
    wrong = next((one for one in addresses if _ADDRESS.fullmatch(one) is None), None)
    if wrong is not None or not addresses:
        return "mizzen needs a complete e-mail address: add `notify: [{email: NAME@DOMAIN}]` to the document"
    return None
