"""Converts files of other schedulers into mizzen's documents, with a remark for each line or option of the file.

One module reads each kind of file: `slurm_job` batch scripts, `skypilot` tasks and services, `kubernetes` Jobs and
JobSets, and `submitit` the Python files that submit functions. No file is executed.
"""

import re
from collections.abc import Callable

from mizzen_client.convert.checks import check, with_escaped_braces
from mizzen_client.convert.conversion import CannotConvert, Conversion

KINDS = ("slurm", "skypilot", "kubernetes", "submitit")
MOST_BYTES = 1 << 20
"""Bytes of a file."""


def convert(data: bytes, name: str, kind: str | None = None) -> Conversion:
    """Convert the bytes of the file `name`. `kind` is one of `KINDS`; by default it is recognised.

    Raises:
        CannotConvert: the file is not of this kind, or it has something for which no document can be written.
    """
    text = _text(data)
    conversion = _module(kind or _kind_of(text, name))(text, name)
    check(conversion)
    conversion.documents = [with_escaped_braces(one) if "array" in one else one for one in conversion.documents]
    if b"\r\n" in data:
        why = "the lines ended with a carriage return, as in DOS; it was removed"
        conversion.changed(1, "the line ends", "the document", why)
    # Several documents of one file share options.
    conversion.remarks = sorted(dict.fromkeys(conversion.remarks), key=lambda remark: remark.line)
    return conversion


def _text(data: bytes) -> str:
    if len(data) > MOST_BYTES:
        raise CannotConvert(1, f"the file has {len(data)} bytes; at most {MOST_BYTES} are read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CannotConvert(line, f"byte {data[error.start]:#04x} is not UTF-8: save the file as UTF-8") from None
    if "\0" in text:
        raise CannotConvert(text.count("\n", 0, text.index("\0")) + 1, "a NUL character: the file must be text")
    if not text.strip():
        raise CannotConvert(1, "the file is empty")
    return text.replace("\r\n", "\n")


def _kind_of(text: str, name: str) -> str:
    if re.search(r"^#SBATCH\b", text, re.MULTILINE):
        return "slurm"
    if re.search(r"^\s*(?:import|from)\s+submitit\b", text, re.MULTILINE):
        return "submitit"
    if text.startswith("#!"):
        return "slurm"
    if re.search(r"^[\"']?apiVersion[\"']?:", text, re.MULTILINE) or re.match(r'\s*\{\s*"(?:apiVersion|kind)"', text):
        return "kubernetes"
    if re.search(r"^(?:run|setup|resources|service|num_nodes|file_mounts|envs|workdir|name):", text, re.MULTILINE):
        return "skypilot"
    kinds = ", ".join(KINDS)
    raise CannotConvert(
        1, f"{name} has neither #SBATCH lines, submitit calls, apiVersion nor fields of SkyPilot; give --from {kinds}"
    )


def _module(kind: str) -> Callable[[str, str], Conversion]:
    # Imported here because PyYAML is slow to import.
    if kind == "slurm":
        from mizzen_client.convert.slurm_job import convert
    elif kind == "skypilot":
        from mizzen_client.convert.skypilot import convert
    elif kind == "kubernetes":
        from mizzen_client.convert.kubernetes import convert
    elif kind == "submitit":
        from mizzen_client.convert.submitit import convert
    else:
        raise CannotConvert(1, f"--from {kind}: must be one of {', '.join(KINDS)}")
    return convert
