"""The field `file_mounts` of the service document: archive files at other paths, and files copied from buckets."""

import re
from typing import Any

from api.documents.forms import TRUTH, Field, Keys, cases, map_of, one_of, section, text
from api.documents.position import At
from api.documents.workload import PATH_PART
from domain.patterns import in_any_case
from domain.spec import MOUNTS, MountSpec

_MOST = 64
_BUCKET = r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}"
_SCHEMES = {"s3": "s3", "gcs": "gs"}
_SYSTEM = "bin|boot|dev|etc|lib|lib32|lib64|libx32|nix|opt|proc|run|sbin|sys|tmp|usr|var"
_TARGET = Keys(
    rf"^(~/|\./|/)?{PATH_PART}(/{PATH_PART})*/?$",
    "must be a normalised path: relative to the working directory, below ~/, or absolute",
    {
        f"^/({_SYSTEM})(/|$)": "{} is in a folder of the system; give another path, such as ~/data",
        "[^/]{201,}|.{801,}": "a path has at most 800 characters, and at most 200 in each part",
        rf"^(~/|\./)?{MOUNTS.replace('.', '[.]')}(/|$)": f"{{}} is in {MOUNTS}, which has the files of absolute paths",
    },
)
_URL = text(
    "the URL of a bucket", 1000, rf"^(s3|gs)://{_BUCKET}(/[^\x00-\x1f\x7f]*)?$",
    "must be s3://BUCKET/PATH or gs://BUCKET/PATH. The API accepts no local path: `mizzen serve up` uploads the file. "
    "For other services that understand S3, write s3:// and set AWS_ENDPOINT_URL",
)  # fmt: skip
_MODE = text(
    "a mode", 20, f"^{in_any_case(('copy',))}$",
    "must be COPY: the files are copied when a replica starts. MOUNT needs a FUSE program, which machines do not have",
)  # fmt: skip
_SOURCE = "A mapping has one of these: archive; source; name with store"
_DIFFERENT = "All paths are different, also without ./, ~/ and a / at the end"
_IN_ARCHIVE = "A path with archive needs a workdir"


def _source(at: At, values: dict[str, Any]) -> Any:
    """Returns the source of a mapping; empty: the files are in the archive."""
    given = [key for key in ("archive", "source", "name") if at.get(key).value is not None]
    if at.get("store").value is not None and "name" not in given:
        at.get("store").wrong("needs the name of a bucket; or omit it, and give source", rule=_SOURCE)
    elif len(given) != 1:
        at.wrong("must have one of archive, source and name", rule=_SOURCE)
    elif given == ["name"] and at.get("store").value is None:
        at.missing("store", "s3 or gcs", rule=_SOURCE)
    elif "archive" in values:
        return "" if values["archive"] else at.get("archive").wrong("must be true", rule=_SOURCE)
    elif "name" in values and "store" in values:
        return f"{_SCHEMES[values['store']]}://{values['name']}"
    if "mode" not in values and at.get("mode").value is None:
        at.found.notes.append(f"{at.path} is copied when a replica starts, because mizzen mounts no buckets")
    return values.get("source")


_MOUNT = section({
    "source": Field(_URL, "s3://BUCKET/PATH or gs://BUCKET/PATH"),
    "name": Field(text("the name of a bucket", 222, f"^{_BUCKET}$", "must be the name of a bucket")),
    "store": Field(one_of(tuple(_SCHEMES), "s3 or gcs", folded=True), f"One of {', '.join(_SCHEMES)}"),
    "mode": Field(_MODE, "COPY. The files are copied when a replica starts"),
    "archive": Field(TRUTH, f"true: the archive of workdir has the files, below {MOUNTS}/"),
}, ignored={"persistent": "mizzen deletes no bucket"}).checked(_source, _SOURCE)  # fmt: skip


def _mounts(at: At, sources: dict[str, str]) -> tuple[MountSpec, ...]:
    found: dict[str, MountSpec] = {}
    for given, source in sources.items():
        target = re.sub("^([.]|~/sky_workdir|~)/", "", given).rstrip("/")
        if target in found:
            at.child(given, at.value[given]).wrong("is the same path as another one", rule=_DIFFERENT)
        found[target] = MountSpec(target=target, source=source.rstrip("/") or None)
    return tuple(found.values())


FILE_MOUNTS = Field(
    map_of(_TARGET, cases({str: _URL, dict: _MOUNT}, "must be the URL of a bucket or a mapping, it is {}"),
           "a mapping of paths to sources", _MOST).checked(_mounts, _DIFFERENT, _IN_ARCHIVE),
    "Path to the bucket from which files are copied before setup. Absolute paths need sandboxes, or an image", "mounts",
)  # fmt: skip


def check_mounts(at: At, fields: dict[str, Any]) -> None:
    """Adds an error for each mount whose source is missing or not allowed in the document `at`."""
    for mount in fields.get("mounts", ()):
        if mount.source is None and at.get("workdir").value is None:
            at.get("file_mounts").wrong(f"{mount.target}: archive needs a workdir", rule=_IN_ARCHIVE)
