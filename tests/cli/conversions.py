"""The sources of other schedulers in `converted`, and what `mizzen convert` makes of each.

`NAME.expected` has the remarks and the documents. `python -m tests.cli.conversions` writes these files: read the
difference before you commit it.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from api.documents.service import read_service
from api.documents.syntax import load_yaml
from api.documents.workload import LIMITS, WORKLOAD, read_workload
from api.problems import FieldError
from mizzen_client.convert import convert
from mizzen_client.convert.conversion import CannotConvert, Conversion
from mizzen_client.convert.written import write_documents

FOLDER = Path(__file__).parent / "converted"
_DIGEST = "0" * 64
TASK_ENV = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "MIZZEN_WORKLOAD": "wl-1", "MIZZEN_WORKLOAD_NAME": "name",
    "MIZZEN_GANG_MACHINES": "1", "MIZZEN_TENANT": "vision", "MIZZEN_ATTEMPT": "1",
}  # fmt: skip


def sources() -> list[Path]:
    """Returns the files to convert."""
    return sorted(path for path in FOLDER.glob("*/*") if path.suffix != ".expected")


def source(name: str) -> Path:
    """Returns the file with this name, without its ending."""
    [found] = [path for path in sources() if path.stem == name]
    return found


def converted(path: Path) -> Conversion:
    """Converts a file of `converted`, whose kind must be recognised."""
    found = convert(path.read_bytes(), path.name)
    assert found.kind == path.parent.name
    return found


def report(path: Path) -> str:
    """Returns the remarks and the documents for a file."""
    found = converted(path)
    lines = [f"{path.name}:{remark}" for remark in found.remarks]
    return "\n".join([*lines, "", write_documents(found.documents)])


def problems(document: dict[str, Any]) -> list[FieldError]:
    """Returns the errors of the API about a document, read as it receives the document from `mizzen submit`."""
    [text] = [write_documents([document])]
    body = load_yaml(text.encode())
    assert body == document, "the written document is another one"
    if "workdir" in body:
        body["workdir"] = _DIGEST
    if "service" in body:
        body["service"].pop("tls", None)  # `mizzen serve up` sends the texts of its files.
        return read_service(body, "vision").problems
    known = WORKLOAD.schema["properties"]
    body = {name: value for name, value in body.items() if name in known}
    if isinstance(body.get("limits", {}).get("retries"), dict) and not _takes_mapping(LIMITS.schema):
        del body["limits"]["retries"]
    return read_workload(body, "vision").problems


def each_of(paths: list[Path]) -> pytest.MarkDecorator:
    """Returns the mark of a test that runs for each file, as `path`."""
    return pytest.mark.parametrize("path", paths, ids=[f"{one.parent.name}-{one.stem}" for one in paths])


def batch(*options: str, body: str = "echo hello") -> Conversion:
    """Converts a script with these lines of `#SBATCH`."""
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    return convert(f"#!/bin/bash\n{lines}\n{body}\n".encode(), "job.sbatch", "slurm")


def refusal(text: str | bytes, name: str = "file", kind: str | None = None) -> str:
    """Returns the message with which a file is refused."""
    with pytest.raises(CannotConvert) as error:
        convert(text.encode() if isinstance(text, str) else text, name, kind)
    return str(error.value)


def execute(script: str, folder: Path, **env: str) -> str:
    """Runs a script as an agent does: by its first line, or by bash with -e."""
    file = folder / "script"
    file.write_text(script)
    interpreter = script[2:].split("\n", 1)[0].split() if script.startswith("#!") else ["bash", "-e"]
    done = subprocess.run([*interpreter, str(file)], cwd=folder, capture_output=True, text=True, check=True,
                          env={"PATH": os.environ["PATH"], **TASK_ENV, **env})  # fmt: skip
    return done.stdout


def _takes_mapping(schema: dict[str, Any]) -> bool:
    return "object" in str(schema["properties"]["retries"])


if __name__ == "__main__":
    for path in sources():
        Path(f"{path}.expected").write_text(report(path))
