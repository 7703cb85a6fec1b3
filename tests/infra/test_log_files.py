"""Rotation of log files of running processes: no line that is written afterwards is lost or misplaced."""

import resource
import subprocess
import sys
from pathlib import Path

from infra.stack.log_files import rotate

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_process_goes_on_writing_to_a_file_that_was_cut(tmp_path: Path) -> None:
    """After a rotation, new lines start at offset 0 of the file; old lines are in parts, and the oldest is removed."""
    log = tmp_path / "part.log"
    with log.open("ab") as file:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    assert process.stdin is not None

    def write(text: str) -> None:
        assert process.stdin is not None
        process.stdin.write(text.encode())
        process.stdin.flush()
        while not log.read_text().endswith(text):
            pass

    for text in ("first\n" * 20, "second\n" * 20, "third\n" * 20):
        write(text)
        assert rotate([log], 100, 2) == [log]
        assert log.stat().st_size == 0
    write("fourth\n")
    assert rotate([log], 100, 2) == []
    process.stdin.close()
    process.wait()
    assert log.read_text() == "fourth\n"
    assert (tmp_path / "part.log.1").read_text() == "third\n" * 20
    assert (tmp_path / "part.log.2").read_text() == "second\n" * 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part.log", "part.log.1", "part.log.2"]


def test_without_room_for_a_copy_the_file_is_emptied(tmp_path: Path) -> None:
    """If the disk is full, the log is emptied without a copy."""
    log = tmp_path / "part.log"
    log.write_bytes(b"x" * 100_000)
    code = "import signal, sys; from pathlib import Path; from infra.stack.log_files import rotate;"
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); rotate([Path(sys.argv[1])], 100, 2)"
    subprocess.run(
        [sys.executable, "-c", code, str(log)],
        cwd=ROOT,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [("part.log", 0)]
