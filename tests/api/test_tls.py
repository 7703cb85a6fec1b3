"""The API over TLS: certificates, their renewal, unusable files, and clients that trust an authority of their own."""

import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509 import load_pem_x509_certificate

from infra.config.settings import load_settings
from infra.errors import ConfigurationError
from infra.stack.certificate import write_certificate
from infra.stack.ports import free_port
from mizzen_client import Client, NotConfigured, Unreachable
from mizzen_client.cli.app import run
from tests.api.world import ApiWorld
from tests.depth import few

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Returns a certificate of 127.0.0.1 and its key."""
    found = tmp_path / "api.crt", tmp_path / "api.key"
    write_certificate(*found)
    return found


def _api(database_url: str, folder: Path, port: int, *options: str) -> subprocess.Popen[str]:
    config = folder / "config.yaml"
    config.write_text(f"data_dir: {folder}\ndatabase: {database_url}\n")
    command = [sys.executable, "-m", "server", "api", "--config", str(config), "--port", str(port), *options]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def url(world: ApiWorld, database_url: str, files: tuple[Path, Path], tmp_path: Path) -> Iterator[str]:
    """Yields the URL of an API process with the certificate."""
    port = free_port()
    process = _api(database_url, tmp_path, port, "--tls-cert", str(files[0]), "--tls-key", str(files[1]))
    try:
        while True:
            try:
                httpx.get(f"https://127.0.0.1:{port}/healthz", verify=False)
                break
            except httpx.ConnectError:
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.1)
        yield f"https://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def _serial(url: str) -> int:
    """Returns the serial number of the certificate that a new connection gets."""
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    return load_pem_x509_certificate(ssl.get_server_certificate(address).encode()).serial_number


@pytest.mark.rotating
def test_clients_trust_the_authority_that_they_are_given(
    url: str, world: ApiWorld, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the file, client and command work; without it, or in plain HTTP, no request and no key is sent."""
    key = world.raw_keys["operator"]
    with Client(url, key, ca=str(files[0])) as client:
        assert client.whoami()["role"] == "operator"
    with Client(url, key, patience_s=0) as client, pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        client.whoami()
    with pytest.raises(NotConfigured, match="contains no certificate in PEM"):
        Client(url, key, ca=str(files[1]))
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https", "http") + "/healthz")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for name in ("MIZZEN_API", "MIZZEN_API_KEY", "MIZZEN_API_CA"):
        monkeypatch.delenv(name, raising=False)
    assert run(["login", url, "--key", key, "--ca", str(files[0])]) == 0
    assert run(["machines", "list"]) == 0
    monkeypatch.setenv("MIZZEN_API", url)
    monkeypatch.setenv("MIZZEN_API_KEY", key)
    assert run(["machines", "list", "--patience", "0"]) == 6
    monkeypatch.setenv("MIZZEN_API_CA", str(files[0]))
    assert run(["machines", "list"]) == 0


@pytest.mark.rotating
def test_renewed_files_are_used_without_a_restart(url: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    """New connections get the new certificate; while the files do not fit together, the earlier one."""
    first = _serial(url)
    write_certificate(tmp_path / "new.crt", tmp_path / "new.key")
    shutil.move(tmp_path / "new.crt", files[0])
    assert _serial(url) == first, "the key is still the old one"
    shutil.move(tmp_path / "new.key", files[1])
    second = _serial(url)
    assert second == load_pem_x509_certificate(files[0].read_bytes()).serial_number != first
    files[1].unlink()
    assert _serial(url) == second


@pytest.mark.rotating
def test_probes_and_slow_handshakes(url: str) -> None:
    """The probes of `mizzen up` find the API; open connections without a handshake keep no one else out."""
    port = int(url.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    command = f"import asyncio; from infra.stack.probes import http; print(asyncio.run(http('{url}/readyz').ask()))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    for one in silent:
        one.close()


def _encrypted(files: tuple[Path, Path]) -> str:
    key = load_pem_private_key(files[1].read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    files[1].write_bytes(locked)
    return "is encrypted with a password"


def _other(files: tuple[Path, Path]) -> str:
    write_certificate(files[0].with_name("other.crt"), files[1])
    return "does not belong to the certificate"


def _text(files: tuple[Path, Path]) -> str:
    files[0].write_text("no certificate")
    return "must contain a certificate in PEM"


def _missing(files: tuple[Path, Path]) -> str:
    files[1].unlink()
    return "No such file or directory"


@pytest.mark.rotating
@pytest.mark.parametrize("damage", few([_encrypted, _other, _text, _missing], 1))
def test_unusable_files_are_named(
    files: tuple[Path, Path], damage: Callable[[tuple[Path, Path]], str], database_url: str, tmp_path: Path
) -> None:
    """The API does not start; the error says which file is wrong and why."""
    why = damage(files)
    options = ("--tls-cert", str(files[0]), "--tls-key", str(files[1]))
    _, said = _api(database_url, tmp_path, 1, *options).communicate(timeout=60)
    (line,) = [one for one in said.splitlines() if one.startswith("mizzen: ")]
    assert why in line and str(files[0].parent) in line


def test_half_a_pair_is_refused() -> None:
    """A certificate without a key is an error of the configuration."""
    with pytest.raises(ConfigurationError, match="set both or neither"):
        load_settings(overrides={"api": {"tls_cert": "api.crt"}})
