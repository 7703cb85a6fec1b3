"""Regenerates the lock files of `make test-integrations` (`make lock`): `python lock.py path/to/uv`.

Torch has separate lock files. `requirements-torch-cpu.lock` is for a build without CUDA, if pip can find one.
`requirements-torch.lock` is for the registry's build, with its dependencies on Linux. The two cannot be one file: pip
would prefer the registry's build, whose hash the registry provides, to a local file of the same version.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILE = (
    "pip", "compile", "-q", "--universal", "--python-version", "3.11", "--generate-hashes", "--no-emit-index-url",
    "--no-emit-find-links", "--no-header", "--no-annotate", "--upgrade", "--group", "integrations",
    "--constraint", "requirements.lock",
)  # fmt: skip
OF_TORCH = re.compile(r"(torch|triton|cuda-\w+|nvidia-[\w-]+)==")


def main(uv: str) -> None:
    """Compiles the group `integrations` of pyproject.toml, and writes the pins of torch to a separate file."""
    text = subprocess.run([uv, *COMPILE], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    pins = re.split(r"\n(?=\S)", text.rstrip("\n"))
    for file, chosen in [
        ("requirements-torch.lock", [pin for pin in pins if OF_TORCH.match(pin)]),
        ("requirements-integrations.lock", [pin for pin in pins if not OF_TORCH.match(pin)]),
    ]:
        (ROOT / file).write_text("\n".join(chosen) + "\n")
    [version] = re.findall(r"^torch==(\S+)", text, re.MULTILINE)
    cpu = (ROOT / "requirements-torch-cpu.lock").read_text()
    if f"torch=={version}+cpu " not in cpu:
        raise SystemExit(f"requirements-torch-cpu.lock is not for torch {version}: update it by hand")


if __name__ == "__main__":
    main(sys.argv[1])
