"""`mizzen checkpoint`; and `mizzen cadence` and `mizzen checkpoint` from the wheel, without other libraries."""

import json
import os
import pty
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mizzen.checkpoint import Checkpointer, CheckpointId, CheckpointSettings, Manifest, Part, list_committed
from mizzen.checkpoint.log import Log
from mizzen.objects.files import FileStore
from mizzen_client.cli.app import run
from tests.cli.completions import completions

MAIN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from mizzen.cli.main import main
main()
"""
CADENCE = ["cadence", "--mtbf", "3h", "--save", "30s", "--step", "2s"]
STATE: dict[str, Any] = {"model": {"w": np.zeros((20, 30), "f4"), "b": np.ones(3, "i8")}, "raw": b"raw" * 99}

Plain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables of a scheduler and sets the platform, so that metadata servers are not probed."""
    for name in [*os.environ]:
        if name.startswith("MIZZEN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MIZZEN_PLATFORM", "sigterm")


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the SDK's wheel and returns the folder of its unpacked content."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=checkout / "sdk", check=True, capture_output=True, timeout=100)
    [built] = folder.glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture
def plain(wheel: Path) -> Plain:
    """Returns a function that runs the wheel's command without any other library."""

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-W", "error", "-S", "-I", "-c", MAIN, str(wheel), *arguments]
        return subprocess.run(line, capture_output=True, text=True, timeout=60)

    return command


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns a root with three checkpoints that share unchanged parts."""
    checkpointer = Checkpointer(tmp_path / "run", attempt=1, keep=9, settings=CheckpointSettings(checksum="sha256"))
    for step in (10, 20, 30):
        checkpointer.save(step, {**STATE, "progress": {"step": step}, "rng": step}, own={"rng"})
    return tmp_path / "run"


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert run([*arguments, "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Runs a command that must fail with `code` and print nothing on stdout; returns its stderr."""
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    return " ".join(err.split())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def place(root: Path, part: str, step: int = 30) -> Path:
    [manifest] = [known for known in list_committed(root) if known.step == step]
    return root / next(one.key for one in manifest.parts if one.name == part)


def test_the_plain_wheel_explains_the_cadence(plain: Plain, capsys: pytest.CaptureFixture[str]) -> None:
    """Without click, httpx and PyYAML, `mizzen cadence` has the same output, except for YAML, which is an error."""
    for more in ([], ["-o", "json"], ["-o", "name"], ["--platform", "spot"]):
        done = plain(*CADENCE, *more)
        assert run([*CADENCE, *more]) == 0
        assert (done.returncode, done.stdout, done.stderr) == (0, capsys.readouterr().out, "")
    wrong = plain("cadence", "--save", "30s", "--step", "soon")
    assert wrong.returncode == 2 and "Invalid value for '--step': 'soon' must be a duration" in wrong.stderr
    unprintable = plain(*CADENCE, "-o", "yaml")
    assert unprintable.returncode == 2 and "pip install mizzen-client" in unprintable.stderr
    assert unprintable.stdout == wrong.stdout == ""


def test_the_plain_wheel_looks_at_checkpoints(plain: Plain, root: Path, tmp_path: Path) -> None:
    """Without any other library, checkpoints with arrays can be listed, shown, verified and exported."""
    listed = json.loads(plain("checkpoint", "ls", str(root), "-o", "json").stdout)
    assert [(one["step"], one["whole"]) for one in listed] == [(30, True), (20, True), (10, True)]
    shown = plain("checkpoint", "show", str(root), "--step", "20")
    assert shown.returncode == 0 and "20x30" in shown.stdout and "part-model" not in shown.stderr
    verified = plain("checkpoint", "verify", f"file://{root}", "--all")
    assert (verified.returncode, verified.stdout.count("is intact"), verified.stderr) == (0, 3, "")
    exported = plain("checkpoint", "export", str(root), str(tmp_path / "out"), "-o", "name")
    assert exported.returncode == 0 and exported.stderr == ""
    assert {Path(line) for line in exported.stdout.splitlines()} == set((tmp_path / "out").iterdir())
    missing = plain("checkpoint", "ls", "s3://bucket/run")
    assert missing.returncode == 2 and "install mizzen[s3]" in missing.stderr
    for arguments in (["checkpoint"], ["checkpoint", "nonsense"], ["checkpoint", "ls"]):
        assert plain(*arguments).returncode == 2
    assert "export" in plain("checkpoint", "--help").stdout and "--step" in plain("checkpoint", "verify", "-h").stdout


def test_they_start_without_the_clients_libraries() -> None:
    """`mizzen cadence` does not import click, httpx, PyYAML and numpy even if they are installed."""
    code = "import sys; from mizzen.cli.main import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *CADENCE], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not {"click", "httpx", "yaml", "numpy"} & set(done.stderr.split())


def test_a_checksum_that_needs_a_library_names_it(plain: Plain, tmp_path: Path) -> None:
    """If the library of a checksum is missing, `ls` works, and `verify` is an error that names the extra."""
    Checkpointer(tmp_path / "run", settings=CheckpointSettings(checksum="xxh3_128")).save(1, {"a": 1})
    assert plain("checkpoint", "ls", str(tmp_path / "run")).returncode == 0
    done = plain("checkpoint", "verify", str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (2, "") and "install mizzen[fast]" in done.stderr


def test_a_list_says_what_is_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The list has the newest checkpoint first, and names missing and truncated parts."""
    place(root, "progress", 20).unlink()
    place(root, "rng", 10).write_bytes(b"")
    assert run(["checkpoint", "ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["STEP", "ATTEMPT", "SAVE", "SAVED", "(UTC)", "AGE", "SIZE", "RANKS", "INTACT"]
    assert [line.split()[:3] for line in lines[1:]] == [["30", "1", "3"], ["20", "1", "2"], ["10", "1", "1"]]
    day = time.strftime("%Y-%m-%d", time.gmtime(list_committed(root)[0].created_at_s))
    assert day in lines[1] and lines[1].endswith(" yes")
    assert lines[2].endswith("progress: missing") and lines[3].endswith("rng of rank 0: size")
    listed = told(capsys, "checkpoint", "ls", str(root))
    manifest = list_committed(root)[0]
    assert (listed[0]["name"], listed[0]["size_bytes"], listed[0]["ranks"]) == (manifest.name, manifest.size_bytes, 1)
    assert [[(p["part"], p["rank"], p["what"]) for p in one["problems"]] for one in listed] == [
        [], [("progress", None, "missing")], [("rng", 0, "size")]
    ]  # fmt: skip
    assert run(["checkpoint", "ls", str(root), "-o", "name"]) == 0
    assert capsys.readouterr().out.splitlines() == [one["name"] for one in listed]
    assert run(["checkpoint", "ls", str(root), "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == listed


def test_one_is_shown_with_its_tensors(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show` prints parts with kind, size, checksum and sharing checkpoints, and tensors with type and shape."""
    shown = told(capsys, "checkpoint", "show", str(root), "--step", "20")
    manifest = list_committed(root)[1]
    parts = {part["name"]: part for part in shown["parts"]}
    assert {name: (p["kind"], p["size_bytes"], p["checksum"], p["key"]) for name, p in parts.items()} == {
        part.name: (part.kind, part.size_bytes, part.checksum, part.key) for part in manifest.parts
    }
    assert {(t["name"], t["dtype"], tuple(t["shape"])) for t in parts["model"]["tensors"]} == {
        ("w", "F32", (20, 30)), ("b", "I64", (3,))
    }  # fmt: skip
    others = [known.name for known in list_committed(root) if known.step != 20]
    assert parts["raw"]["shared_with"] == parts["model"]["shared_with"] == others
    assert parts["progress"]["shared_with"] == [] and parts["raw"]["tensors"] is None
    assert run(["checkpoint", "show", str(root)]) == 0
    page = capsys.readouterr().out
    for text in (list_committed(root)[0].name, "20x30", "F32", "sha256:", others[1], "tensors of model"):
        assert text in page
    place(root, "model", 20).unlink()
    assert "is missing" in told(capsys, "checkpoint", "show", str(root))["parts"][0]["problem"]


def test_damage_has_an_exit_code_of_its_own(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` exits with 0 if all is intact, and with 8 if a part is damaged, and prints the part and the problem."""
    changed = place(root, "progress", 20)
    changed.write_bytes(b"?" * changed.stat().st_size)
    assert told(capsys, "checkpoint", "verify", str(root))["whole"]
    assert run(["checkpoint", "verify", str(root)]) == 0
    assert capsys.readouterr().out.startswith(f"{list_committed(root)[0].name} is intact")
    one = told(capsys, "checkpoint", "verify", str(root), "--step", "20", code=8)
    [problem] = one["problems"]
    assert (problem["part"], problem["what"]) == ("progress", "checksum")
    assert str(changed).endswith(problem["key"])
    every = told(capsys, "checkpoint", "verify", str(root), "--all", code=8)
    assert [(found["step"], found["whole"]) for found in every] == [(30, True), (20, False), (10, True)]
    assert run(["checkpoint", "verify", str(root), "--all"]) == 8
    out, err = capsys.readouterr()
    assert f"progress: {problem['key']} does not match its checksum" in out and err == ""


def test_a_damaged_record_is_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged record, which may be of a newer checkpoint, makes `verify` exit with 8, unless a step is given."""
    record = max((root / "log").iterdir())
    record.write_bytes(record.read_bytes()[1:])
    assert run(["checkpoint", "verify", str(root)]) == 8
    out, err = capsys.readouterr()
    assert "is intact" in out and f"record {int(record.stem)} of the log is damaged" in err
    assert run(["checkpoint", "verify", str(root), "--step", "20"]) == 0
    assert run(["checkpoint", "verify", str(root), "--all"]) == 8


def test_an_export_is_the_parts_as_files(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`export` writes each part to a file. The target folder must be missing or empty."""
    target = tmp_path / "new" / "folder"
    body = told(capsys, "checkpoint", "export", str(root), str(target), "--step", "20")
    manifest = list_committed(root)[1]
    wanted = {Path(part.key).name: (root / part.key).read_bytes() for part in manifest.parts}
    assert files(target) == wanted and "part-model.safetensors" in wanted
    assert body["step"] == 20 and {Path(one["file"]) for one in body["files"]} == set(target.iterdir())
    message = refused(capsys, "checkpoint", "export", str(root), str(target))
    assert f"{str(target)!r} is not empty: give a folder that does not exist yet" in message
    assert files(target) == wanted
    (tmp_path / "empty").mkdir()
    assert run(["checkpoint", "export", str(root), str(tmp_path / "empty")]) == 0
    assert len(files(tmp_path / "empty")) == len(capsys.readouterr().out.splitlines()) - 1 == 4
    assert "is not a folder" in refused(capsys, "checkpoint", "export", str(root), str(target / "part-raw.bin"))


def test_a_damaged_export_leaves_nothing(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a part does not match its checksum, the export fails and leaves the target folder unchanged."""
    changed = place(root, "rng")
    changed.write_bytes(b"?" * changed.stat().st_size)
    message = refused(capsys, "checkpoint", "export", str(root), str(tmp_path / "a" / "b"), code=8)
    assert "part-rng.json does not match its checksum" in message
    assert not (tmp_path / "a").exists()
    (tmp_path / "empty").mkdir()
    refused(capsys, "checkpoint", "export", str(root), str(tmp_path / "empty"), code=8)
    assert list((tmp_path / "empty").iterdir()) == []


def commit(root: Path, *parts: Part, world_size: int = 1) -> None:
    """Commits a handwritten record of step 1 with these parts."""
    store = FileStore(root)
    for part in parts:
        store.put(part.key, part.name.encode())
    log = Log(store)
    log.refresh()
    assert log.append(Manifest(CheckpointId(1, 1, 1), 0.0, parts, world_size))


def by_hand(name: str, rank: int | None = None, kind: str = "bytes") -> Part:
    import hashlib

    digest = hashlib.sha256(name.encode()).hexdigest()
    return Part(name, f"parts/{len(name)}-{rank}-{kind}", kind, len(name), f"sha256:{digest}", rank)


def test_parts_of_ranks_do_not_collide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of equal name go to a folder for each rank; `--rank` exports only the parts that this rank loads."""
    commit(tmp_path / "run", by_hand("model"), by_hand("rng", 0), by_hand("rng", 1), world_size=2)
    export = ["checkpoint", "export", str(tmp_path / "run")]
    assert run([*export, str(tmp_path / "all")]) == 0
    every = {"part-model.bin": b"model", "rank-0000/part-rng.bin": b"rng", "rank-0001/part-rng.bin": b"rng"}
    assert files(tmp_path / "all") == every
    assert run([*export, str(tmp_path / "one"), "--rank", "1"]) == 0
    assert files(tmp_path / "one") == {"part-model.bin": b"model", "part-rng.bin": b"rng"}
    capsys.readouterr()
    assert "was saved by ranks 0 to 1" in refused(capsys, *export, str(tmp_path / "no"), "--rank", "2")


@pytest.mark.parametrize(
    "bad",
    [
        [by_hand("../../escaped")], [by_hand("/tmp/escaped")], [by_hand("a/b")], [by_hand("a", kind="unknown")],
        [by_hand("a", 1), by_hand("a", 1)], [by_hand("twice"), by_hand("twice")], [replace(by_hand("a"), rank="../x")],  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_names_of_a_forged_record_lead_nowhere(
    bad: list[Part], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts with a path as name, with equal file names or of an unknown kind are errors, and no file is written."""
    commit(tmp_path / "deep" / "run", *bad, world_size=2)
    before = files(tmp_path)
    assert run(["checkpoint", "export", str(tmp_path / "deep" / "run"), str(tmp_path / "deep" / "out")]) == 8
    assert "step-0000000001" in capsys.readouterr().err
    assert files(tmp_path) == before and not (tmp_path / "deep" / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "right"),
    [
        (["ls", "nowhere"], 3, "not a checkpoint root"),
        (["show", "run", "--step", "7"], 3, "no checkpoint of step 7; available steps: 10, 20, 30"),
        (["verify", "run", "--step", "x"], 2, "'--step': 'x' is not a valid integer"),
        (["verify", "run", "--step", "-1"], 2, "'--step': -1 is not in the range x>=0"),
        (["verify", "run", "--step", "10", "--all"], 2, "'--step' and '--all' cannot be used together"),
        (["ls", "az://run"], 2, "the scheme 'az' is not supported; use a path, file://, s3:// or gs://"),
        (["ls", "run", "-o", "xml"], 2, "'-o' / '--output': 'xml' is not one of 'table'"),
        (["ls", "run", "--steps"], 2, "No such option: --steps"),
        (["export", "run"], 2, "Missing argument 'DEST'"),
        (["nonsense", "run"], 2, "No such command 'nonsense'; the commands are ls, show, verify, export"),
        (["export", "run", "/dev/null/here"], 5, "cannot write to /dev/null/here"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: list[str], code: int, right: str, root: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Invalid arguments give the exit code, no output on stdout, and the value and the valid values on stderr."""
    monkeypatch.chdir(root.parent)
    assert right in refused(capsys, "checkpoint", *arguments, code=code)


def test_a_store_that_cannot_be_read_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a file cannot be read for lack of permission, the error is not reported as damage."""

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FileStore, "size", denied)
    assert "Permission denied" in refused(capsys, "checkpoint", "verify", str(root), code=6)


def test_a_claimed_root_lists_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first save, `ls` and `verify --all` print nothing and `show` exits with 3."""
    Checkpointer(tmp_path, attempt=1)
    assert told(capsys, "checkpoint", "ls", str(tmp_path)) == []
    assert told(capsys, "checkpoint", "verify", str(tmp_path), "--all") == []
    assert "the root has no committed checkpoint" in refused(capsys, "checkpoint", "show", str(tmp_path), code=3)


def test_looking_never_stops_the_training(root: Path, tmp_path: Path) -> None:
    """No command changes the root, so the training can commit its next save."""
    trainer = Checkpointer(root, attempt=2)
    before = files(root)
    for command in (["ls"], ["show"], ["verify"], ["verify", "--all"], ["export", str(tmp_path / "out")]):
        assert run(["checkpoint", command[0], str(root), *command[1:]]) == 0
    assert files(root) == before
    assert trainer.save(40, {"a": 1}).attempt == 2


def test_progress_is_for_terminals(root: Path) -> None:
    """Progress is printed only if stderr is a terminal; stdout is the same."""
    code = "import sys, time; time.monotonic = iter(range(9**9)).__next__; from mizzen.cli.main import main; main()"
    line = [sys.executable, "-c", code, "checkpoint", "verify", str(root)]
    terminal, end = pty.openpty()
    shown = subprocess.run(line, stdout=subprocess.PIPE, stderr=end, text=True, timeout=60)
    os.close(end)
    told = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    piped = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert "100%" in told and piped.stderr == ""
    assert shown.returncode == piped.returncode == 0 and shown.stdout == piped.stdout


def test_they_are_completed() -> None:
    """Shell completion offers the names, options and choices of these commands."""
    assert completions([], "ca") == ["cancel", "cadence"]
    assert completions(["checkpoint"], "") == ["ls", "show", "verify", "export", "repair", "prune", "copy"]
    assert completions(["checkpoint", "verify"], "--a") == ["--all"]
    assert completions(["cadence", "--platform"], "aws") == ["aws-spot"]


def test_prune_keeps_the_newest_and_the_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`prune` prints what it removes; with --dry-run nothing goes; kept checkpoints stay whole."""
    root = tmp_path / "run"
    checkpointer = Checkpointer(root, keep=9, best=("loss", 1))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        checkpointer.save(step, {"frozen": b"same" * 999, "progress": {"step": step, "loss": loss}})
    arguments = ("checkpoint", "prune", str(root), "--keep", "1", "--best", "loss")
    before = files(root)
    assert [one["step"] for one in told(capsys, *arguments, "--dry-run")] == [3, 1]
    assert files(root) == before
    assert [one["step"] for one in told(capsys, *arguments)] == [3, 1]
    assert [(one.step, dict(one.scores)) for one in list_committed(root, verify=True)] == [
        (4, {"loss": 4.0}),
        (2, {"loss": 1.0}),
    ]
    assert "--keep" in refused(capsys, "checkpoint", "prune", str(root), "--keep", "0")


def test_copy_commits_whole_checkpoints(capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path) -> None:
    """A copy has the same checkpoints, can be repeated, and does not mix two trainings."""
    target = str(tmp_path / "copy")
    assert [one["step"] for one in told(capsys, "checkpoint", "copy", str(root), target, "--step", "20")] == [20]
    assert [one["step"] for one in told(capsys, "checkpoint", "copy", str(root), target)] == [30, 20, 10]
    assert list_committed(target, verify=True) == list_committed(root)
    Checkpointer(tmp_path / "other").save(5, {"a": 1})
    message = refused(capsys, "checkpoint", "copy", str(tmp_path / "other"), target, code=5)
    assert "has checkpoints of another training" in message


def test_exports_for_other_libraries(capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path) -> None:
    """`--safetensors` writes only tensors, `--hf` the model or a Trainer's files by their names, and no other path."""
    told(capsys, "checkpoint", "export", str(root), str(tmp_path / "tensors"), "--safetensors")
    assert set(files(tmp_path / "tensors")) >= {"model.safetensors"}
    told(capsys, "checkpoint", "export", str(root), str(tmp_path / "hf"), "--hf")
    assert set(files(tmp_path / "hf")) == {"model.safetensors"}
    index = {"file.0": "config.json", "file.1": "../escaped", "file.2": "model.safetensors"}
    state = {"file.0": b"{}", "file.1": b"x", "file.2": b"weights", "files": index}
    Checkpointer(tmp_path / "trainer").save(1, state)
    told(capsys, "checkpoint", "export", str(tmp_path / "trainer"), str(tmp_path / "files"), "--hf")
    assert files(tmp_path / "files") == {"config.json": b"{}", "model.safetensors": b"weights"}
    Checkpointer(tmp_path / "plain").save(1, {"a": 1})
    message = refused(capsys, "checkpoint", "export", str(tmp_path / "plain"), str(tmp_path / "none"), "--hf")
    assert "no part can be written with --hf" in message and not (tmp_path / "none").exists()
