"""`mizzen get` with a real API: what is written, and what is not when the archive or the connection breaks."""

import io
import tarfile
from pathlib import Path

import pytest

from domain import ids
from mizzen.objects import ObjectStore, open_store
from mizzen_client import Client
from mizzen_client.cli.app import run
from tests.cli.service import DOCUMENT, Capture, Service
from tests.stored_outputs import store_output, tar_of


@pytest.fixture
def placed(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A running workload with the output `model`; commands run with a key of its tenant, in an empty folder."""
    monkeypatch.setenv("MIZZEN_API", service.url)
    monkeypatch.setenv("MIZZEN_API_KEY", service.keys["vision"])
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with Client(service.url, service.keys["vision"]) as client:
        id_ = client.submit({**DOCUMENT, "outputs": {"model": "./out"}})["id"]
    service.place(id_)
    return str(id_)


def bucket(service: Service) -> ObjectStore:
    return open_store(service.folder.as_uri())


def halves(body: bytes) -> list[bytes]:
    return [body[: len(body) // 2], body[len(body) // 2 :]]


def test_a_response_that_breaks_off_is_continued(
    placed: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that cannot be read for a while only delays the files; the connection goes on where it broke."""
    archive = tar_of(weights=bytes(range(256)) * 100)
    store_output(bucket(service), placed, halves(archive))
    key = ids.output_part_key(placed, 1, "trainer", 0, "model", 1)
    bucket(service).delete(key)

    def repair(*_: object) -> None:
        bucket(service).put(key, halves(archive)[1])

    monkeypatch.setattr("mizzen_client.transport.time.sleep", repair)
    assert run(["get", placed, "model"]) == 0
    assert Path("model/weights").read_bytes() == bytes(range(256)) * 100


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("file", "../evil"), ("file", "/tmp/evil-of-mizzen"), ("file", "file"), ("file", "link"),
        ("..", "link/evil"), ("/tmp", "link/evil-of-mizzen"), ("link", "link/evil"),
    ],
)  # fmt: skip
def test_an_archive_that_leaves_its_folder_writes_nothing(
    placed: str, service: Service, target: str, name: str, capsys: Capture
) -> None:
    """An agent that is not trusted may have written it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("file"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, target
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo(name))
    store_output(bucket(service), placed, [out.getvalue()])
    assert run(["get", placed, "model"]) == 2
    assert "the archive of the output is not valid" in capsys.readouterr().err
    assert list(Path.cwd().parent.rglob("*evil*")) == [] and list(Path.cwd().iterdir()) == []


def test_an_output_that_was_not_stored(placed: str, service: Service, capsys: Capture) -> None:
    """The newest attempt that has stored it counts; the reasons of later ones are printed."""
    assert run(["get", placed, "model"]) == 2
    assert "is not stored yet" in capsys.readouterr().err
    store_output(bucket(service), placed, [], attempt=2, error="out has 9 GiB")
    assert run(["get", placed, "model"]) == 2
    assert "output model was not stored: out has 9 GiB" in capsys.readouterr().err
    store_output(bucket(service), placed, [tar_of(weights=b"w")], left_out=["a: pipe"], left_out_count=3)
    assert run(["get", placed, "model", "--to", "new/best"]) == 0
    said = capsys.readouterr().err
    assert "without a: pipe; and 2 more" in said and "attempt 2 of trainer/0: not stored: out has 9 GiB" in said
    assert Path("new/best/weights").read_bytes() == b"w"
    assert run(["get", placed, "other"]) == 2
    assert "it has the outputs model" in capsys.readouterr().err
