"""API keys, TLS, and options that are refused."""

import contextlib
import hashlib
import os
import signal
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from bench.balance_api import BalanceApi
from infra.stack.ports import free_port
from tests.proxies.balance.world import Balancer, Replica, wait_for

Start = Callable[..., Balancer]


@pytest.mark.rotating
def test_clients_need_a_key_of_the_file(api: BalanceApi, replicas: list[Replica], start: Start, tmp_path: Path) -> None:
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


FORGED = {
    "authorization": "Bearer mzn-one", "forwarded": "for=9.9.9.9", "x-real-ip": "9.9.9.9",
    "x_forwarded_for": "9.9.9.9", "x_real_ip": "9.9.9.9", "true-client-ip": "9.9.9.9",
    "proxy-authorization": "Basic b25l",
    "x-forwarded-for": "9.9.9.9", "x-forwarded-host": "evil", "x-forwarded-proto": "https", "x-forwarded-port": "1",
}  # fmt: skip


def _seen(balancer: Balancer) -> dict[str, str]:
    """Returns those headers of `FORGED` that a replica gets."""
    answer = httpx.get(f"{balancer.url}/headers", headers=FORGED)
    if answer.status_code != 200:
        return {}
    lines = (line.partition(": ") for line in answer.text.splitlines())
    return {name: value for name, _, value in lines if name in FORGED}


def test_a_replica_gets_no_key_and_no_forged_address(
    api: BalanceApi, replicas: list[Replica], start: Start, tmp_path: Path
) -> None:
    """With `--keys`, replicas do not get the client's key. Where a request comes from is taken from the connection."""
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"mzn-one").hexdigest())
    api.set([replicas[0].entry()])
    balancer = start("--keys", str(keys))
    seen = wait_for("the replica is ready", lambda: _seen(balancer))
    assert seen == {"x-forwarded-for": "127.0.0.1", "x-forwarded-proto": "http"}


@pytest.mark.parametrize("trusted", ["10.0.0.0/8,127.0.0.1", "10.0.0.0/8"])
def test_headers_of_trusted_proxies_are_kept(
    api: BalanceApi, replicas: list[Replica], start: Start, trusted: str
) -> None:
    """A trusted proxy's headers are kept, and its address is added. Without `--keys`, Authorization passes."""
    api.set([replicas[0].entry()])
    balancer = start("--trusted-proxies", trusted)
    seen = wait_for("the replica is ready", lambda: _seen(balancer))
    if "127" in trusted:
        assert seen == FORGED | {"x-forwarded-for": "9.9.9.9, 127.0.0.1"}
    else:
        known = {"x-forwarded-for": "127.0.0.1", "x-forwarded-proto": "http"}
        assert seen == {name: FORGED[name] for name in ("authorization", "proxy-authorization")} | known


def test_requests_are_counted_by_the_owner_of_their_key(
    api: BalanceApi, replicas: list[Replica], start: Start, tmp_path: Path
) -> None:
    """The metrics have the owners that the file names. A new name takes effect; refused requests have no owner."""
    keys, port = tmp_path / "keys", free_port()
    one, two, three = (hashlib.sha256(key).hexdigest() for key in (b"one", b"two", b"three"))
    keys.write_text(f"{one} vision\n{two} speech\n{three}\n")
    api.set([replicas[0].entry()])
    balancer = start("--keys", str(keys), "--metrics", f"127.0.0.1:{port}")

    def ask(key: str, times: int = 1) -> int:
        for _ in range(times):
            status = httpx.get(balancer.url, headers={"authorization": f"Bearer {key}"}).status_code
        return status

    def counted() -> dict[str, float]:
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        name = 'mizzen_balancer_owner_requests_total{owner="'
        found = (line.removeprefix(name).split('",service="chat"} ') for line in lines if line.startswith(name))
        return {owner: float(count) for owner, count in found}

    wait_for("the replica is ready", lambda: ask("three") == 200)
    assert (ask("one", 3), ask("two", 2), ask("four")) == (200, 200, 401)
    wait_for("the requests are counted", lambda: counted() == {"vision": 3, "speech": 2})
    keys.write_text(f"{one} robotics\n")
    wait_for("the other key is revoked", lambda: ask("two") == 401)
    assert ask("one") == 200
    wait_for("the new name is used", lambda: counted().get("robotics") == 1)
    keys.write_text(f"{one} vision team\n")
    wait_for("the error is logged", lambda: "may be followed by the name of its owner" in balancer.log.read_text())


def _certificate(folder: Path, name: str) -> tuple[Path, str]:
    """Returns the path of a new certificate, and its text with the private key."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, certificate.read_text() + key.read_text()


def _accepts(url: str, certificate: Path) -> bool:
    """Returns whether a replica answers a client that accepts only this certificate."""
    with contextlib.suppress(httpx.ConnectError):
        return httpx.get(url, verify=ssl.create_default_context(cafile=str(certificate))).status_code == 200
    return False


@pytest.mark.rotating
def test_a_service_has_its_own_certificate(
    api: BalanceApi, replicas: list[Replica], start: Start, tmp_path: Path
) -> None:
    """The API's certificate is used, also after a restart without the API; another one replaces it, or none."""
    (first, first_pem), (second, second_pem) = (_certificate(tmp_path, name) for name in ("first", "second"))
    api.certificates = {"one": first_pem, "two": second_pem}
    api.set([replicas[0].entry()], certificate="one")
    balancer = start()
    url = f"https://127.0.0.1:{balancer.port}"
    wait_for("the replica is ready", lambda: _accepts(url, first))
    haproxy = balancer.haproxy()
    api.set([replicas[0].entry()], certificate="two")
    wait_for("the new certificate is used", lambda: _accepts(url, second))
    assert not _accepts(url, first) and balancer.haproxy() == haproxy
    api.set([replicas[0].entry()], certificate="none of them")  # The API answers nothing: the last list stays.
    balancer.stop()
    api.stop()
    balancer.start()
    wait_for("it is used again", lambda: _accepts(url, second))
    api.set([replicas[0].entry()])
    api.start()
    wait_for("clients use no TLS", lambda: httpx.get(balancer.url).status_code == 200)
    assert {path.stat().st_mode & 0o77 for path in balancer.data.glob("chat/*.pem")} == {0}


@pytest.mark.rotating
def test_a_new_certificate_is_used_without_a_restart(
    api: BalanceApi, replicas: list[Replica], start: Start, tmp_path: Path
) -> None:
    """New connections get the certificate of the changed file, and running answers continue.

    A file that HAProxy cannot use is logged once, and changes nothing, also when HAProxy is restarted.
    """
    (first, first_pem), (second, second_pem) = (_certificate(tmp_path, name) for name in ("first", "second"))
    link, served = tmp_path / "link.pem", tmp_path / "served.pem"
    served.write_text(first_pem)
    link.symlink_to(served)
    api.set([replicas[0].entry()])
    balancer = start("--cert", str(link))
    url = f"https://127.0.0.1:{balancer.port}"

    def accepts(certificate: Path) -> bool:
        return _accepts(url, certificate)

    wait_for("the replica is ready", lambda: accepts(first))
    haproxy, errors = balancer.haproxy(), list[str]()
    context = ssl.create_default_context(cafile=str(first))
    with httpx.stream("GET", f"{url}/events?count=1000000&every_s=0.01", verify=context) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        renewed = tmp_path / "renewed.pem"
        renewed.write_text(second_pem.replace("-----BEGIN PRIVATE", "\nA comment\n\n-----BEGIN PRIVATE"))
        link.unlink()
        link.symlink_to(renewed)
        wait_for("the new certificate is used", lambda: accepts(second))
        assert not accepts(first)
        next(chunks)
        lone, no_pair, long = first.read_text(), first.read_text() + second_pem, first_pem + first.read_text() * 20
        for bad, said in (
            (lone, "must have PEM blocks of a certificate and its private key"),
            ("no certificate", "must have PEM blocks of a certificate and its private key"),
            (no_pair, "(key values mismatch)"),
            (long, "needs a restart of the balancer"),
        ):
            errors.append(f"the certificate stays as it was: --cert: {link}: ")
            renewed.write_text(bad)
            wait_for("the error is logged", lambda: balancer.log.read_text().count(errors[0]) == len(errors))
            assert said in balancer.log.read_text().splitlines()[-1]
            assert accepts(second)
        next(chunks)
        assert balancer.haproxy() == haproxy
    assert "PRIVATE KEY" not in balancer.log.read_text()
    os.kill(haproxy, signal.SIGKILL)
    wait_for("HAProxy is restarted", lambda: accepts(second))
    renewed.write_text(first_pem)
    wait_for("the next certificate is used", lambda: accepts(first))
    assert balancer.log.read_text().count("stays as it was") == len(errors)


def test_tls_with_http_1_and_2(api: BalanceApi, replicas: list[Replica], start: Start, tmp_path: Path) -> None:
    """Clients that accept the certificate get HTTP/1.1 or HTTP/2, as they ask."""
    certificate, text = _certificate(tmp_path, "cert")
    both = tmp_path / "both.pem"
    both.write_text(text)
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
        (["--service", "a=:8000", "--trusted-proxies", "10.0.0.1/8"], "--trusted-proxies: '10.0.0.1/8': must be an IP"),
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
    balancer = Balancer(BalanceApi(), tmp_path / "data")
    done = balancer.run_with(*options)
    assert done.returncode == 2 and said in done.stderr
