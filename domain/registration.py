"""The limits on the registration of a machine. An agent of a volunteer's machine may send anything."""

import base64
import math

from domain.addresses import HOST_RULE, is_host
from domain.ids import RUN_RULE, is_run
from domain.isolation import Isolation
from domain.protocol.machines import MAX_RUNS, Hello
from domain.slots import MAX_SLOTS

MAX_CPUS_MILLI = 10_000_000
MAX_MEMORY_BYTES = 1 << 50
MAX_TEXT = 200
"""Maximum number of characters of a name in a registration."""
_KEY_BYTES = 32


def wrong_hello(hello: Hello) -> str | None:
    """Returns the error in a registration, with the field, its value and the allowed values; None: no error."""
    ranges = (
        ("gpus", hello.gpus, 0, MAX_SLOTS),
        ("cpus_milli", hello.cpus_milli, 1, MAX_CPUS_MILLI),
        ("memory_bytes", hello.memory_bytes, 1, MAX_MEMORY_BYTES),
        ("withheld", hello.withheld, 0, (1 << MAX_SLOTS) - 1),
        ("unfreed", hello.unfreed, 0, (1 << MAX_SLOTS) - 1),
    )
    for field, number, least, most in ranges:
        if not least <= number <= most:
            return f"{field}: {number} is not between {least} and {most}"
    if not 0 <= hello.word_at_s < math.inf:
        return f"word_at_s: {hello.word_at_s} is not a time in seconds since the epoch"
    texts = [("rack", hello.rack), ("gpu_type", hello.gpu_type or ""), ("incarnation", hello.incarnation)]
    texts += [("engine", hello.engine), ("native_id", hello.native_id)]
    fault = hello.gpu_fault
    if fault is not None:
        if not (0 <= fault.slot < MAX_SLOTS and 0 <= fault.at_s < math.inf):
            return f"gpu_fault: slot {fault.slot} at {fault.at_s} s: must be a slot and a time since the epoch"
        texts += [("gpu_fault.gpu", fault.gpu), ("gpu_fault.error", fault.error)]
    for field, text in texts:
        if len(text) > MAX_TEXT or not text.isprintable():
            return f"{field}: {text[:MAX_TEXT]!r}: must have at most {MAX_TEXT} characters, all printable"
    if hello.isolation not in set(Isolation):
        return f"isolation: {hello.isolation[:MAX_TEXT]!r}: must be {', '.join(Isolation)}"
    if not is_host(hello.address):
        return f"address: {hello.address[:MAX_TEXT]!r}: must be {HOST_RULE}"
    if not _is_key(hello.public_key):
        return f"public_key: {hello.public_key[:MAX_TEXT]!r}: must be the {_KEY_BYTES} bytes of an X25519 key in base64"
    return wrong_runs(hello.runs)


def wrong_runs(runs: list[str]) -> str | None:
    """Returns the error in the attempts that a registration names; None: there is no error."""
    if len(runs) > MAX_RUNS:
        return f"runs: has {len(runs)} entries; must have at most {MAX_RUNS}"
    # The machine's workflow stops runs by workload and number, and could not continue with another text.
    unknown = next((run for run in runs if not is_run(run)), None)
    return None if unknown is None else f"runs: {unknown[:MAX_TEXT]!r}: must be {RUN_RULE}"


def _is_key(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == _KEY_BYTES
    except ValueError:
        return False
