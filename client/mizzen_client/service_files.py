"""The files that a service document names on the user's machine: `file_mounts`, git repositories and a certificate.

Local files and repositories become part of the archive of the working directory, so that all replicas have the same
files. The text of the certificate becomes part of the document.
"""

import base64
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mizzen_client.archives import PackedFolder, pack
from mizzen_client.documents import Document
from mizzen_client.errors import DocumentError

MOUNTS = ".mounts"
"""Folder in the archive with the files for absolute paths, as the API expects it."""
_URL = re.compile("[a-z0-9+.-]+://")
_HOME = re.compile("^([.]|~/sky_workdir|~)/")


def with_files(document: Document) -> tuple[dict[str, Any], Path | PackedFolder | None, list[str]]:
    """Return the body of a service document as the API reads it, the working directory, and notes for the user.

    Raises:
        DocumentError, ArchiveError: the document names a local file or a repository that cannot be read.
    """
    body = _with_certificate(document)
    mounts: dict[str, Path] = {}
    given = body.get("file_mounts")
    if isinstance(given, dict):
        body["file_mounts"], mounts = _split(document, given)
    workdir = body.get("workdir")
    if isinstance(workdir, dict) and isinstance(workdir.get("url"), str):
        del body["workdir"]
        with tempfile.TemporaryDirectory(prefix="mizzen-git-") as folder:
            commit = _clone(document.source, workdir, folder)
            note = f"workdir is commit {commit} of {workdir['url']}"
            return body, pack(Path(folder), mounts=mounts), [note]
    if not mounts:
        return body, document.workdir, []
    if workdir is not None:
        raise DocumentError(f"{document.source}: file_mounts: local files need a workdir that is a folder, or none")
    return body, pack(document.workdir, mounts=mounts), []


def _with_certificate(document: Document) -> dict[str, Any]:
    """Return the body with the texts of the PEM files in the place of their paths."""
    body = dict(document.body)
    service = body.get("service")
    if not isinstance(service, dict) or not isinstance(service.get("tls"), dict):
        return body
    tls = dict(service["tls"])
    for key in ("keyfile", "certfile"):
        if isinstance(tls.get(key), str) and "-----BEGIN " not in tls[key]:
            path = document.folder / Path(tls[key]).expanduser()
            try:
                tls[key] = path.read_text(encoding="ascii", errors="replace")
            except OSError as error:
                why = error.strerror or "cannot be read"
                raise DocumentError(f"{document.source}: service.tls.{key}: {path}: {why.lower()}") from None
    return body | {"service": service | {"tls": tls}}


def _split(document: Document, given: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, Path]]:
    """Split `file_mounts` into the part that is sent to the API, and the local files by their path in the archive."""
    told: dict[Any, Any] = {}
    local: dict[str, Path] = {}
    for target, one in given.items():
        source = one.get("source") if isinstance(one, dict) else one
        if not isinstance(target, str) or not isinstance(source, str) or _URL.match(source):
            told[target] = one
            continue
        path = document.folder / Path(source).expanduser()
        if not path.exists():
            raise DocumentError(f"{document.source}: file_mounts.{target}: {path} does not exist")
        place = _HOME.sub("", target).rstrip("/")
        local[f"{MOUNTS}{place}" if place.startswith("/") else place] = path
        mode = {"mode": one["mode"]} if isinstance(one, dict) and "mode" in one else {}
        if place.startswith("/") or mode:
            told[target] = {"archive": True, **mode}
    return told, local


def _clone(source: str, workdir: Mapping[str, Any], folder: str) -> str:
    """Clone a repository into a folder, and return the commit."""
    url, ref = workdir["url"], workdir.get("ref")
    if ref is not None and (not isinstance(ref, str) or ref.startswith("-") or not ref):
        raise DocumentError(f"{source}: workdir.ref: {ref!r}: must be a branch, a tag or a commit, as a string")
    if unknown := workdir.keys() - {"url", "ref"}:
        raise DocumentError(f"{source}: workdir.{min(unknown)}: unknown key; a repository has url and ref")
    _git(source, url, "clone", "--quiet", "--", url, folder)
    if ref is not None:
        _git(source, url, "-C", folder, "checkout", "--quiet", ref, "--")
    return _git(source, url, "-C", folder, "rev-parse", "HEAD").strip()


def _git(source: str, url: str, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], env=_environment(url), capture_output=True, text=True, check=False)
    except OSError as error:
        raise DocumentError(f"{source}: workdir.url: git cannot be run: {error.strerror}") from None
    if done.returncode:
        raise DocumentError(f"{source}: workdir: {url}: {done.stderr.strip() or 'git failed'}")
    return done.stdout


def _environment(url: str) -> dict[str, str]:
    """Return the environment of git. As in SkyPilot, GIT_TOKEN is a login, which is sent to the URL's host only."""
    token, parts = os.environ.get("GIT_TOKEN"), urlsplit(url)
    if not token or parts.scheme != "https":
        return dict(os.environ)
    login = base64.b64encode(f"x-access-token:{token}".encode()).decode()
    return os.environ | {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"http.https://{parts.netloc}/.extraHeader",
        "GIT_CONFIG_VALUE_0": f"Authorization: Basic {login}",
    }
