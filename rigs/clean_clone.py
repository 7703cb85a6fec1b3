"""From a clean clone to a first workload that a form in the console submitted, timed: `make clean-clone`.

The repository is cloned as last committed. `make setup` runs once for the downloads, which do not count; then all
that it made is deleted, and the time of `make setup`, `mizzen up --console`, the log-in with its link, the form of a
tenant and the form of the workload counts until hello has ended. Compiling counts. The exit status is 1 if that takes
longer than three minutes.
"""

import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from infra.stack.ports import free_port

_ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 180.0
_PATIENCE_S = 900.0
_CSRF = re.compile(r'name="csrf" value="([0-9a-f]+)"')
_DOCUMENT = re.compile(r"<textarea[^>]*>\n(.*?)</textarea>", re.DOTALL)
_LINK = re.compile(r"console +(http\S+)")


class CleanCloneError(Exception):
    """A step did not do what it should."""


def _say(text: str) -> None:
    print(f"clean-clone: {text}", file=sys.stderr, flush=True)


def _run(folder: Path, *command: str) -> float:
    """Runs a command, and returns its duration in seconds."""
    began_s = time.monotonic()
    # A variable of the caller must not lead to the files of another clone.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(command, cwd=folder, check=True, env=environment)
    return time.monotonic() - began_s


def _until(text: re.Pattern[str], read: Callable[[], str], what: str) -> re.Match[str]:
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        if found := text.search(read()):
            return found
        time.sleep(0.2)
    raise CleanCloneError(f"{what} did not appear within {_PATIENCE_S:.0f} s:\n{read()[-2000:]}")


@contextmanager
def _stack(clone: Path, folder: Path) -> Iterator[str]:
    """Runs `mizzen up --console`; yields the link that it prints."""
    log = folder / "up.log"
    command = [str(clone / ".venv/bin/mizzen"), "up", "--console", "--data-dir", str(folder / "data")]
    environment = {**os.environ, "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(free_port())], cwd=clone, stdout=out, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield _until(_LINK, log.read_text, "the link to the console")[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def _hello(link: str) -> str:
    """Logs in by the link, creates a tenant and submits hello by forms, and returns the log of hello."""
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        first = browser.get(link)
        token = _CSRF.search(first.text)
        if token is None or "<h1>Overview</h1>" not in first.text:
            raise CleanCloneError(f"the link did not log in: {first.status_code}")
        base = str(first.url).rstrip("/")
        fields = {"csrf": token[1], "name": "vision", "level": "3", "gpus": "gpu=8"}
        browser.post(f"{base}/tenants", data=fields).raise_for_status()
        document = _DOCUMENT.search(browser.get(f"{base}/workloads/new").text)
        if document is None:
            raise CleanCloneError("the page has no form for a document")
        fields = {"csrf": token[1], "document": html.unescape(document[1])}
        shown = browser.post(f"{base}/workloads/new", data=fields)
        shown.raise_for_status()
        _until(re.compile("(succeeded|failed): "), lambda: browser.get(shown.url).text, "the end of hello")
        return _until(re.compile("rank 1 of 2.*"), lambda: browser.get(f"{shown.url}/logs").text, "its output")[0]


def main() -> int:
    """Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="mizzen-clean-") as name:
        folder = Path(name)
        clone = folder / "clone"
        _run(folder, "git", "clone", "--quiet", str(_ROOT), str(clone))
        _say(f"make setup with downloads: {_run(clone, 'make', 'setup'):.0f} s, not counted")
        _run(clone, "git", "clean", "-xfdq")
        setup_s = _run(clone, "make", "setup")
        began_s = time.monotonic()
        with _stack(clone, folder) as link:
            up_s = time.monotonic() - began_s
            said = _hello(link)
            hello_s = time.monotonic() - began_s - up_s
        whole_s = setup_s + up_s + hello_s
        load = os.getloadavg()[0]
        _say(f"make setup {setup_s:.0f} s, mizzen up {up_s:.0f} s, hello {hello_s:.0f} s ({said.strip()})")
        _say(f"{whole_s:.0f} s, at most {_LIMIT_S:.0f} s; load {load:.1f} on {os.cpu_count()} cores")
    return 0 if whole_s <= _LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
