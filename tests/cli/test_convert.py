"""`mizzen convert`: everything in a source is accounted for, and the documents are those that the API accepts."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen_client.cli.app import run
from mizzen_client.convert import MOST_BYTES, convert
from mizzen_client.convert.conversion import CannotConvert, Carryover, Conversion
from mizzen_client.convert.source_tree import MAX_VALUES, Located, read_trees
from tests.cli.conversions import converted, each_of, execute, problems, refusal, report, source, sources
from tests.cli.service import Service
from tests.depth import examples

SOURCES = sources()
YAML = [path for path in SOURCES if path.suffix in (".yaml", ".json")]
NAMES = "\n".join(f"a{n} = [{', '.join([f'a{n - 1}'] * 10)}]" for n in range(1, 10))
"""Names of lists that stand for a thousand million values."""
SCRIPT = "#!/bin/bash\n{}\necho hello\n"


def test_at_least_ten_sources_of_each_kind() -> None:
    found = Counter(path.parent.name for path in SOURCES)
    assert found.keys() == {"slurm", "skypilot", "kubernetes", "submitit"} and min(found.values()) >= 10


@each_of(SOURCES)
def test_remarks_and_documents_are_the_expected_ones(path: Path) -> None:
    assert report(path) == Path(f"{path}.expected").read_text()


@each_of(SOURCES)
def test_documents_are_valid(path: Path) -> None:
    """The API has no errors in what is written, and scripts are valid for their interpreters."""
    for document in converted(path).documents:
        assert problems(document) == []
        jobs = document.get("jobs", [document])
        for script in [job[key] for job in jobs for key in ("setup", "run") if isinstance(job.get(key), str)]:
            if script.startswith("#!/usr/bin/env python3"):
                compile(script, path.name, "exec")
            else:
                subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@each_of([path for path in SOURCES if path.parent.name == "slurm"])
def test_each_line_of_a_script_has_a_remark(path: Path) -> None:
    remarks = converted(path).remarks
    noted = {line for one in remarks for line in range(one.line, (one.last_line or one.line) + 1)}
    text = path.read_text().replace("\\\n", "\\")  # A remark on a line is also one on its continuation lines.
    number = 1
    for line in text.splitlines():
        assert number in noted or not line.strip(), f"line {number}: {line}"
        number += 1 + line.count("\\")


def mappings(node: Located, above: tuple[int, ...] = ()) -> list[tuple[Located, tuple[int, ...]]]:
    """Returns each mapping of a tree, with the lines of the keys above it."""
    if isinstance(node.value, list):
        return [one for item in node.value for one in mappings(item, (*above, item.line))]
    found = [(node, above)] if isinstance(node.value, dict) else []
    return found + [one for inner in node.keys.values() for one in mappings(inner, (*above, inner.line))]


@each_of(YAML)
def test_each_field_has_a_remark(path: Path) -> None:
    """A field that nobody knows, in any mapping of a file, is named, unless a field around it has a remark."""
    for number in range(sum(len(mappings(tree)) for tree in read_trees(path.read_text()))):
        trees = read_trees(path.read_text())
        target, above = [one for tree in trees for one in mappings(tree, (tree.line,))][number]
        if not target.value:
            continue
        target.value["zzUnknown"] = Located(target.line, 7)
        text = "---\n".join(json.dumps(tree.plain) + "\n" for tree in trees)
        try:
            remarks = convert(text.encode(), path.name, path.parent.name).remarks
        except CannotConvert:
            continue
        if not any("zzUnknown" in one.source for one in remarks):
            assert {one.line for one in converted(path).remarks} & {*above, target.line}, (path.name, target)


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(SOURCES), st.data())
def test_a_damaged_file_gives_a_document_or_a_message(path: Path, data: st.DataObject) -> None:
    text = path.read_text()
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 60)))
    damaged = text[:at] + data.draw(st.text(max_size=12)) + text[end:]
    try:
        found = convert(damaged.encode("utf-8", "ignore"), path.name)
    except CannotConvert as error:
        assert error.line >= 1 and error.reason
        return
    assert found.documents and found.remarks
    if "service" not in path.stem:  # The fields of services are copied, and the API checks their values.
        assert [problem for document in found.documents for problem in problems(document)] == []


def test_a_submitted_function_runs_with_the_arguments_of_its_element(tmp_path: Path) -> None:
    path = source("batch")
    [document] = converted(path).documents
    (tmp_path / "batch.py").write_text(path.read_text())
    shown = execute(document["jobs"][0]["run"], tmp_path, MIZZEN_ARRAY_INDEX="11")
    assert shown == "s3://bucket/in 11 16\n"


def test_loops_become_the_elements_of_an_array(tmp_path: Path) -> None:
    """The elements are the calls of nested loops, in their order, with all arguments."""
    text = (
        "import submitit\nfrom work import show\nmore = {'k': 1}\nex = submitit.AutoExecutor('x')\n"
        "for rate in [10**-i for i in range(1, 3)]:\n    for n, name in enumerate(['a', 'b']):\n"
        "        ex.submit(show, rate, n, tag=f'{name}-{rate}', **more)\n"
    )
    (tmp_path / "work.py").write_text("def show(*given, **named):\n    print(given, named)\n")
    [document] = convert(text.encode(), "program.py").documents
    assert document["array"] == {"indexes": "0-3"}
    found = [execute(document["jobs"][0]["run"], tmp_path, MIZZEN_ARRAY_INDEX=str(n)) for n in range(4)]
    wanted = [(rate, n, name) for rate in (0.1, 0.01) for n, name in enumerate(["a", "b"])]
    assert found == [f"{(rate, n)} {{'tag': '{name}-{rate}', 'k': 1}}\n" for rate, n, name in wanted]


def test_what_only_submitit_gives_is_lost() -> None:
    text = (
        "import submitit\n\n\nclass Job(submitit.helpers.Checkpointable):\n    def __call__(self, x):\n"
        "        print(x)\n\n\nif __name__ == '__main__':\n"
        "    submitit.AutoExecutor('x').map_array(Job(), ['{{ x }}'])\n"
    )
    lost = {one.line: one.source for one in convert(text.encode(), "job.py").remarks if one.outcome == Carryover.LOST}
    assert lost == {4: "class Job"}


def test_generic_resources_that_are_not_gpus_are_lost() -> None:
    text = "import submitit\nfrom a import f\nsubmitit.AutoExecutor('x', slurm_gres='gpu:a100:2,nvme:1').submit(f)\n"
    found = convert(text.encode(), "job.py")
    assert found.documents[0]["jobs"][0]["resources"]["accelerators"] == "a100:2"
    assert [one.source for one in found.remarks if one.outcome == Carryover.LOST] == ["slurm_gres: nvme:1"]
    found = convert(text.replace("gpu:a100:2,", "").encode(), "job.py")
    assert "accelerators" not in found.documents[0]["jobs"][0]["resources"]


@pytest.mark.parametrize(
    ("body", "right"),
    [
        ("def f(:\n", "not Python"),
        ("ex = submitit.AutoExecutor('x')\n", "nothing is submitted"),
        ("ex = submitit.AutoExecutor('x')\ndef f(): pass\nex.submit(f)\n", "put it below"),
        ("from a import f\nex = submitit.AutoExecutor('x')\nex.map_array(f, load())\n", "is not a literal"),
        ("from a import f\nex = submitit.AutoExecutor('x')\nex.map_array(f, [])\n", "is empty"),
        ("from a import f\nex = submitit.AutoExecutor('x')\nex.submit(*f)\n", "must be written out"),
        ("ex = submitit.AutoExecutor('x')\nex.submit(lambda: 1)\n", "write a def"),
        ("ex = submitit.AutoExecutor('x')\nex.submit(f)\n", "neither defined nor imported"),
        ("from a import f\nex = submitit.AutoExecutor('x')\nwhile g():\n    ex.submit(f)\n", "submit without it"),
        ("from a import f\nex = submitit.AutoExecutor('x')\nex.map_array(f, range(10**9))\n", "at most 100000"),
        ("from a import f\nex = submitit.AutoExecutor('x')\nif g():\n    ex.submit(f)\n", "submit without it"),
        ("from a import f\nex = submitit.AutoExecutor('x')\nfor i in []:\n    ex.submit(f, i)\n", "submits 0 calls"),
        (f"from a import f\nex = submitit.AutoExecutor('x')\na0 = [1]\n{NAMES}\nex.map_array(f, a9)\n", "parts"),
        ("from a import f\nex = submitit.AutoExecutor('x', nodes='a')\nex.submit(f)\n", "must be a whole number"),
        ("from a import f\nex = submitit.AutoExecutor('x', mem_gb='a')\nex.submit(f)\n", "mem_gb"),
    ],
)
def test_wrong_programs_are_refused(body: str, right: str) -> None:
    message = refusal(f"import submitit\n{body}", "program.py")
    assert re.match("[0-9]+: refused: ", message) and right in message


def test_a_program_is_never_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"import submitit\nopen({str(mark)!r}, 'w')\nfrom a import f\nsubmitit.AutoExecutor('x').submit(f, 1)\n"
    assert converted_text(text).documents
    assert not mark.exists()


def converted_text(text: str) -> Conversion:
    return convert(text.encode(), "program.py")


@pytest.mark.parametrize(
    ("data", "line", "right"),
    [
        (b"", 1, "the file is empty"),
        (b" \n\n", 1, "the file is empty"),
        (b"name: x\nrun: \xff\n", 2, "is not UTF-8"),
        ("name: x".encode("utf-16"), 1, "is not UTF-8"),
        (b"#!/bin/bash\n#SBATCH -n 1\necho \0\n", 3, "a NUL character"),
        (b"x" * (MOST_BYTES + 1), 1, f"at most {MOST_BYTES} are read"),
        (b"#!/bin/bash\n#SBATCH -n 1\n" + b"echo\n" * 40_000, 1, "a script has at most"),
        (b"hello\n", 1, "give --from slurm"),
        (b"[" * 5000 + b"\nrun: x\n", 1, ""),
        (b"run: x\na: " + b"[" * 5000, 1, ""),
        (b"run: &a [*a]\n", 1, "levels deep"),
        (b"echo hello\n#SBATCH -n 1\n", 1, "must name the interpreter"),
    ],
)
def test_hostile_files_are_refused(data: bytes, line: int, right: str) -> None:
    message = refusal(data)
    assert message.startswith(f"{line}: refused: ") and right in message


def test_a_bomb_of_aliases_is_refused() -> None:
    """A file of some lines whose aliases stand for a thousand million values is refused after a few thousand."""
    lines = ["run: x", "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert f"more than {MAX_VALUES} values" in refusal("\n".join(lines))
    lines = ["run: x", "a0: &a0 {k: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9)]
    assert f"more than {MAX_VALUES} values" in refusal("\n".join(lines))


@pytest.mark.parametrize(
    "unit", ["$(", "a=", ";a=", "srun -n ", "trap x A ", "`", "'", "\\", "/home/", "((", "module "]
)
def test_long_lines_take_no_time(unit: str) -> None:
    """No pattern backtracks over a long line: the test would run into its time limit."""
    text = SCRIPT.format("#SBATCH -n 1") + unit * (16_000 // len(unit)) + "\n"
    try:
        convert(text.encode(), "job.sbatch")
    except CannotConvert as error:
        assert error.reason


def test_dos_line_ends_are_replaced() -> None:
    found = convert(SCRIPT.format("#SBATCH -J x").replace("\n", "\r\n").encode(), "job.sbatch")
    assert "\r" not in found.documents[0]["jobs"][0]["run"]
    assert any("carriage return" in one.why for one in found.remarks)


def test_no_secret_is_copied() -> None:
    found = converted(source("managed-spot"))
    assert "not-a-real-key" not in json.dumps([found.documents, [str(one) for one in found.remarks]])


def test_command_writes_the_document_and_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "job.sbatch", tmp_path / "job.yaml"
    source.write_text(SCRIPT.format("#SBATCH --job-name=job --mem=1G"))
    assert run(["convert", str(source)]) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["name"] == "job"
    assert f"{source}:2: carried: --job-name=job -> name\n" in shown.err
    assert run(["convert", str(source), "-o", str(out)]) == 0
    assert capsys.readouterr().out == "" and out.read_text() == shown.out


def test_exit_codes_and_the_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """9 if something is lost, 2 with no document if the source is refused or cannot be read."""
    source = tmp_path / "job.sbatch"
    source.write_text(SCRIPT.format("#SBATCH --licenses=x"))
    assert run(["convert", str(source), "--report", "json"]) == 9
    shown = capsys.readouterr()
    body = json.loads(shown.err)
    assert body["kind"] == "slurm" and body["counts"]["lost"] == 1
    [lost] = [one for one in body["remarks"] if one["outcome"] == Carryover.LOST]
    assert (lost["line"], lost["last_line"], lost["source"]) == (2, 2, "--licenses=x") and lost["why"]
    source.write_text(SCRIPT.format("#SBATCH --time=soon"))
    assert run(["convert", str(source), "--report", "json", "-o", str(tmp_path / "out")]) == 2
    assert json.loads(capsys.readouterr().err)["refused"]["line"] == 2
    assert not (tmp_path / "out").exists()
    assert run(["convert", str(tmp_path / "absent")]) == 2 and "No such file" in capsys.readouterr().err
    assert run(["convert", str(tmp_path)]) == 2 and "directory" in capsys.readouterr().err
    assert run(["convert", str(source), "-o", str(tmp_path / "no" / "out")]) == 2


def test_a_converted_script_is_accepted_by_the_api(
    as_vision: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mizzen submit` takes what `mizzen convert` has written, with the files of the script's folder."""
    source, out = tmp_path / "job.sbatch", tmp_path / "job.yaml"
    source.write_text(
        SCRIPT.format("#SBATCH --job-name=converted --ntasks=2 --mem=1G -t 10").replace("echo", "srun echo")
    )
    assert run(["convert", str(source), "-o", str(out)]) == 0
    assert run(["submit", str(out), "-o", "json"]) == 0
    workload = json.loads(capsys.readouterr().out)[0]
    assert workload["name"] == "converted" and workload["spec"]["jobs"][0]["tasks"] == 2
    assert workload["spec"]["limits"]["max_runtime"] == 600


def test_stdin_and_the_kind_that_is_given(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mizzen.cli.main", "convert", "-", "--from", "slurm"]
    done = subprocess.run(command, input="#!/bin/sh\necho hello\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "name: stdin" in done.stdout
    assert "stdin:2: carried: echo hello" in done.stderr
