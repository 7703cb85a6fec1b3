"""Service files of SkyPilot, as its documentation writes them, with `mizzen serve up` and the real API."""

import json
import subprocess
from pathlib import Path

import pytest

from infra.db.services import ServiceVersion
from infra.db.session import transaction
from mizzen_client import Client
from mizzen_client.cli.app import run
from tests.cli.service import Capture, Service
from tests.cli.skypilot_services import FILES, REFUSED
from tests.proxies.gateway.site import certificate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the documents name."""
    for name in ("code/server.py", "prompts/system.txt", "config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    made = certificate(tmp_path)
    made.chain.rename(tmp_path / "cert.pem")
    made.key.rename(tmp_path / "key.pem")
    git = ["git", "-C", str(tmp_path / "code"), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_files_of_skypilots_documentation(
    as_vision: Service, client: Client, folder: Path, name: str, capsys: Capture
) -> None:
    """Each file is accepted as it is written, or refused for want of hardware or of an engine, with the field."""
    file = folder / f"{name}.yaml"
    file.write_text(FILES[name].replace("{repository}", f"file://{folder}/code"))
    before = client.services(ended=True)
    code = run(["serve", "up", str(file), "-o", "json"])
    shown = capsys.readouterr()
    if name in REFUSED:
        assert code == 2 and REFUSED[name] in shown.err
        assert client.services(ended=True) == before
        return
    assert code == 0, shown.err
    (made,) = json.loads(shown.out)
    with transaction(as_vision.engine) as session:
        spec = session.get_one(ServiceVersion, (made["id"], 1)).spec
    told = repr(spec) + shown.out + shown.err
    assert [one for one in ("hf_abc", "sk-0123", "BEGIN") if one in told] == []


def test_a_certificate_is_a_secret_of_the_tenant(
    as_vision: Service, client: Client, folder: Path, capsys: Capture
) -> None:
    """Balancers get its name. A file that is no certificate, or the key of another, is an error without a value."""
    file = folder / "tls.yaml"
    text = "service: {{replicas: 1, tls: {{keyfile: {key}, certfile: cert.pem}}}}\nrun: x\n"
    file.write_text(text.format(key="key.pem"))
    name = _spec(as_vision, capsys, file)["certificate"]
    assert name in client.secrets("vision") and client.endpoints("tls")["certificate"] == name
    certificate(folder, "other").key.replace(folder / "key.pem")
    assert run(["serve", "update", "tls", str(file)]) == 2
    shown = capsys.readouterr().err
    assert "service.tls: certfile and keyfile must be a certificate and its private key" in shown
    assert "BEGIN" not in shown
    for line, complaint in (("{certfile: cert.pem}", "service.tls.keyfile: missing"),
                            ("{certfile: none.pem, keyfile: key.pem}", "none.pem: no such file"),
                            ("{certfile: config.yaml, keyfile: key.pem}", "service.tls.certfile: must be the text of"),
                            ("key.pem", "service.tls: must be a mapping")):  # fmt: skip
        file.write_text(f"service: {{replicas: 1, tls: {line}}}\nrun: x\n")
        assert run(["serve", "up", str(file)]) == 2
        assert complaint in capsys.readouterr().err


def _spec(as_vision: Service, capsys: Capture, file: Path, *options: str, command: str = "up") -> dict[str, object]:
    assert run(["serve", command, *options, str(file), "-o", "json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    with transaction(as_vision.engine) as session:
        found: dict[str, object] = session.get_one(ServiceVersion, (made["id"], made["version"])).spec
    return found


def test_a_literal_secret_is_a_secret_of_the_tenant(
    as_vision: Service, client: Client, folder: Path, capsys: Capture
) -> None:
    """The same value keeps its name, so that nothing is replaced; another one has another name; names stay names."""
    client.set_secret("vision", "own-token", "x")
    file = folder / "tokens.yaml"
    text = "service: {replicas: 1}\nrun: x\nsecrets: {HF_TOKEN: %s, OWN: own-token}\n"
    file.write_text(text % "hf_first")
    first = _spec(as_vision, capsys, file)["secrets"]
    again = _spec(as_vision, capsys, file, "tokens", command="update")["secrets"]
    file.write_text(text % "hf_second")
    other = _spec(as_vision, capsys, file, "tokens", command="update")["secrets"]
    assert isinstance(first, dict) and isinstance(other, dict)
    assert first == again and first["OWN"] == "own-token"
    assert other["HF_TOKEN"] != first["HF_TOKEN"] and other["HF_TOKEN"].startswith("tokens-hf-token-")
    assert {*first.values(), *other.values()} <= set(client.secrets("vision"))


def test_wrong_local_files_are_named(as_vision: Service, folder: Path, capsys: Capture) -> None:
    """A missing file, a repository that cannot be cloned and a wrong key are errors with their fields."""
    file = folder / "wrong.yaml"
    for line, complaint in (
        ("file_mounts: {~/a: ./missing}", "file_mounts.~/a"),
        ("file_mounts: {/etc/passwd: ./config.yaml}", "file_mounts./etc/passwd"),
        ("file_mounts: {/a: ./config.yaml}\nworkdir: " + "0" * 64, "workdir that is a folder"),
        (f"workdir: {{url: 'file://{folder}/none'}}", "not appear to be a git repository"),
        (f"workdir: {{url: 'file://{folder}/code', ref: none}}", "none"),
        (f"workdir: {{url: 'file://{folder}/code', ref: --help}}", "workdir.ref"),
        (f"workdir: {{url: 'file://{folder}/code', branch: main}}", "workdir.branch"),
    ):
        file.write_text(f"service: {{replicas: 1}}\nrun: x\n{line}\n")
        assert run(["serve", "up", str(file)]) == 2
        assert complaint in capsys.readouterr().err
