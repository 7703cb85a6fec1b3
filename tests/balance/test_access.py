"""API keys, TLS, and options that are refused."""

import hashlib
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from bench.balance_api import Api
from tests.balance.world import Balancer, Replica, wait_for

Start = Callable[..., Balancer]


def test_clients_need_a_key_of_the_file(api: Api, replicas: list[Replica], start: Start, tmp_path: Path) -> None:
    """Only the hashes of the keys are stored. Refused requests are not counted. Changes of the file take effect."""
    keys = tmp_path / "keys"
    keys.write_text(f"# tenants\n{hashlib.sha256(b'mzn-one').hexdigest()} vision\n")
    api.set([replicas[0].entry()])
    balancer = start("--keys", str(keys))

    def status(**headers: str) -> int:
        return httpx.get(balancer.url, headers=headers).status_code

    wait_for("the replica is ready", lambda: status(authorization="Bearer mzn-one") == 200)
    assert [status(authorization=f"{kind} mzn-one") for kind in ("bearer", "Bearer")] == [200, 200]
    refused: list[dict[str, str]] = [
        {}, {"authorization": "Bearer two"}, {"authorization": "Bearer"}, {"authorization": "Bearer mzn-one two"},
    ]  # fmt: skip
    assert [status(**headers) for headers in refused] == [401] * 4
    assert b"mzn-one" not in b"".join(
        path.read_bytes() for path in (balancer.data / "chat").iterdir() if path.is_file()
    )
    wait_for("admitted requests are counted", lambda: api.total("requests") == 3)
    haproxy = balancer.haproxy()
    keys.write_text(hashlib.sha256(b"two").hexdigest())
    wait_for("the new key is admitted", lambda: status(authorization="Bearer two") == 200)
    assert status(authorization="Bearer mzn-one") == 401
    keys.write_text("no key")
    said = "line 1: 'no key': must be the SHA-256 of a key in hexadecimal"
    wait_for("the error is logged", lambda: said in balancer.log.read_text())
    assert status(authorization="Bearer two") == 200 and balancer.haproxy() == haproxy


def test_tls_with_http_1_and_2(api: Api, replicas: list[Replica], start: Start, tmp_path: Path) -> None:
    """Clients that accept the certificate get HTTP/1.1 or HTTP/2, as they ask."""
    key, certificate, both = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    both.write_text(certificate.read_text() + key.read_text())
    api.set([replicas[0].entry()])
    balancer = start("--cert", str(both))
    url = f"https://127.0.0.1:{balancer.port}"
    with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate))) as client:
        answer = wait_for("the replica is ready", lambda: (got := client.get(url)).status_code == 200 and got)
    assert answer.text == "0 https"
    said = ["-o", "/dev/null", "-w", "%{http_version}"]
    for version in ("1.1", "2"):
        done = subprocess.run(
            ["curl", "-sS", "--cacert", certificate, f"--http{version}", *said, url],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout == version, done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--service", "chat"], "--service: 'chat': must be NAME=HOST:PORT"),
        (["--service", "Chat=:8000"], "--service: 'Chat=:8000': must be NAME=HOST:PORT, where NAME has lower-case"),
        (["--service", "chat=127.0.0.1"], "'127.0.0.1' is not an address to listen on: must be HOST:PORT"),
        (["--service", "a=:8000", "--service", "a=:8001"], "--service: 'a' is given twice"),
        (["--service", "a=:8000", "--zone", "east"], "--zone: 'east': must be REGION/ZONE"),
        (
            ["--service", "a=:8000", "--haproxy", "/bin/true"],
            "--haproxy: /bin/true: must be the program of HAProxy 2.6",
        ),
        (["--service", "a=:8000", "--connections", "99999999"], "--connections: 99999999: the limit on open files"),
    ],
)
def test_invalid_options_are_named(tmp_path: Path, options: list[str], said: str) -> None:
    """An invalid option ends the command with exit code 2 and a message."""
    balancer = Balancer(Api(), tmp_path / "data")
    done = balancer.run_with(*options)
    assert done.returncode == 2 and said in done.stderr
