"""`mizzen convert` of batch scripts: each option of sbatch, and scripts that run as in Slurm."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen_client.convert import convert, slurm_options
from mizzen_client.convert.conversion import CannotConvert
from tests.cli.conversions import batch, converted, execute, problems, refusal, source
from tests.depth import examples

SBATCH_OPTIONS = """
-A --account=x --acctg-freq=task=1 -a --array=0-3 --batch=x --bb=x --bbf=x -b --begin=16:00 -D --chdir=/x
--cluster-constraint=x -M --clusters=x --comment=x -C --constraint=x --container=x --container-id=x --contiguous
-S --core-spec=1 --cores-per-socket=1 --cpu-freq=high --cpus-per-gpu=2 -c --cpus-per-task=2 --deadline=1
--delay-boot=1 -d --dependency=afterok:1 -m --distribution=block -e --error=x -x --exclude=x --exclusive --export=NONE
--export-file=x --extra=x -B --extra-node-info=1 --get-user-env --gid=1 --gpu-bind=none --gpu-freq=high
-G --gpus=2 --gpus-per-node=2 --gpus-per-socket=1 --gpus-per-task=1 --gres=gpu:2 --gres-flags=x -h --help
--hint=nomultithread -H --hold --ignore-pbs -i --input=x -J --job-name=x --kill-on-invalid-dep=yes -L --licenses=x
--mail-type=END --mail-user=x --mcs-label=x --mem=4G --mem-bind=none --mem-per-cpu=1G --mem-per-gpu=1G --mincpus=1
--network=x --nice=1 -k --no-kill --no-requeue -F --nodefile=x -w --nodelist=x -N --nodes=1 -n --ntasks=1
--ntasks-per-core=1 --ntasks-per-gpu=1 --ntasks-per-node=1 --ntasks-per-socket=1 --open-mode=append -o --output=x
-O --overcommit -s --oversubscribe --parsable -p --partition=x --power=x --prefer=x --priority=1 --profile=x
--propagate=ALL -q --qos=x -Q --quiet --reboot --requeue --reservation=x --resv-ports=1 --segment=2 --signal=USR1@60
--sockets-per-node=1 --spread-job --stepmgr --switches=1 --test-only --thread-spec=1 --threads-per-core=1
-t --time=10 --time-min=1 --tmp=1G --tres-bind=x --tres-per-task=gres/gpu:1 --uid=1 --usage --use-min-nodes
-v --verbose -V --version -W --wait --wait-all-nodes=1 --wckey=x --wrap=x
"""
"""All options of sbatch's manual, with a value where one is needed; a letter stands before its long option."""


def test_each_option_of_the_manual_is_accounted_for() -> None:
    """Each long option has a remark on its line, and its letter, if there is one, has the same."""
    words = SBATCH_OPTIONS.split()
    letters, long = [word[1] for word in words if len(word) == 2], [word for word in words if word.startswith("--")]
    assert {*letters} | {"I"} == {*slurm_options.LETTERS}
    assert {word[2:].partition("=")[0] for word in long} | {"immediate"} == slurm_options.NAMES
    for word in long:
        found = [one for one in batch("--gpus=2", word).remarks if one.line == 3]
        assert found, word
        assert not any("no such option" in one.why for one in found), word
    for letter, word in pairwise(words):
        if len(letter) == 2:
            value = word.partition("=")[2]
            short = [(one.outcome, one.why) for one in batch(f"{letter} {value}".strip()).remarks if one.line == 2]
            assert short == [(one.outcome, one.why) for one in batch(word).remarks if one.line == 2], word


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.sampled_from([word for word in SBATCH_OPTIONS.split() if word.startswith("--")]), max_size=8),
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), max_size=40), max_size=4),
)
def test_any_combination_is_converted_or_refused(options: list[str], body: list[str]) -> None:
    """Whatever a script says, each option has a remark, or the refusal names a line; a document is valid."""
    text = "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "true", *body])
    try:
        found = convert(text.encode(), "job.sbatch", "slurm")
    except CannotConvert as error:
        assert 1 <= error.line <= text.count("\n") + 1
        return
    assert {one.line for one in found.remarks} >= {*range(1, 2 + len(options))}
    assert [problem for document in found.documents for problem in problems(document)] == []


@pytest.mark.parametrize(
    ("options", "resources", "tasks"),
    [
        (["--gres=gpu:a100:4", "--mem=64G", "-c 8"], {"accelerators": "a100:4", "cpus": 8, "memory": "64GiB"}, 1),
        (["--gpus-per-task=v100:2", "-n 3", "--mem-per-gpu=10G"],
         {"accelerators": "v100:2", "cpus": 1, "memory": "20GiB"}, 3),
        (["-N 2", "-n 8", "--gpus=8", "--mem=40G"], {"accelerators": "gpu:1", "cpus": 1, "memory": "10GiB"}, 8),
        (["-N 2", "--ntasks-per-node=4", "--gres=gpu:h100:8", "--cpus-per-gpu=6", "--mem-per-cpu=500M"],
         {"accelerators": "h100:2", "cpus": 12, "memory": "6000MiB"}, 8),
        (["-n 4", "--ntasks-per-node=2", "--gres=gpu:2", "--mem=4G"],
         {"accelerators": "gpu:1", "cpus": 1, "memory": "2GiB"}, 4),
        (["--gpus=4", "--ntasks-per-gpu=1", "--mem=8G"], {"accelerators": "gpu:1", "cpus": 1, "memory": "2GiB"}, 4),
        (["--gres=gpu:1", "--constraint=a100|h100", "--mem=1T"],
         {"accelerators": ["a100:1", "h100:1"], "cpus": 1, "memory": "1TiB"}, 1),
    ],
)  # fmt: skip
def test_resources_of_a_task(options: list[str], resources: dict[str, Any], tasks: int) -> None:
    [document] = batch(*options, body="srun ./program").documents
    assert document["jobs"][0]["resources"] == resources
    assert document["jobs"][0]["tasks"] == tasks


@pytest.mark.parametrize(
    ("time", "limit"),
    [("30", "30m"), ("90:30", "1h30m30s"), ("12:00:00", "12h"), ("2-0", "2d"), ("1-2:30", "1d2h30m"),
     ("1-00:00:10", "1d10s"), ("UNLIMITED", None)],
)  # fmt: skip
def test_times(time: str, limit: str | None) -> None:
    [document] = batch(f"--time={time}").documents
    assert document.get("limits", {}).get("max_runtime") == limit


@pytest.mark.parametrize(
    ("array", "numbers"),
    [("0-3", [0, 1, 2, 3]), ("5-7%2", [5, 6, 7]), ("0-20:10", [0, 10, 20]), ("4", [4]), ("9,1,3-4", [9, 1, 3, 4])],
)
def test_elements_have_the_numbers_of_the_source(array: str, numbers: list[int], tmp_path: Path) -> None:
    """The script of each element prints the number that it has in Slurm."""
    [document] = batch(f"--array={array}", body="echo $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT").documents
    assert document["array"]["indexes"] == array.partition("%")[0]
    script = document["jobs"][0]["run"]
    found = [execute(script, tmp_path, MIZZEN_ARRAY_INDEX=str(n)) for n in numbers]
    assert found == [f"{number} of {len(numbers)}\n" for number in numbers]


def test_a_script_runs_in_each_task_as_in_slurm(tmp_path: Path) -> None:
    """Ranks, addresses and the signal's trap are those of the source."""
    body = (
        "nodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )\nmodule load cuda\n"
        "trap 'echo saved' USR1\nkill -TERM $$\n"
        "srun --label -c 4 bash -c 'echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURM_NTASKS' > out\n"
        "echo ${nodes[0]} $(cat out)\nif true; then module list; fi"
    )
    [document] = batch("-N 2", "--ntasks-per-node=2", "--signal=B:USR1@60", body=body).documents
    shown = execute(document["jobs"][0]["run"], tmp_path, RANK="3", WORLD_SIZE="4")
    assert shown == "saved\n10.0.0.1 3 1 1 4\n"
    assert document["checkpoint"] == {"grace": "1m"}


@pytest.mark.parametrize(
    ("options", "counts", "memory"),
    [
        (["-N4", "-n10", "--mem=12G"], [3, 3, 2, 2], "4GiB"),
        (["-N2", "-n3", "--mem=12G"], [2, 1], "6GiB"),
        (["-n10", "--ntasks-per-node=4", "--mem=12G"], [4, 4, 2], "3GiB"),
    ],
)
def test_uneven_tasks_have_nodes(options: list[str], counts: list[int], memory: str, tmp_path: Path) -> None:
    """If the numbers of tasks per node differ, tasks have the nodes of Slurm's block distribution."""
    found = batch(*options, body="srun bash -c 'echo $SLURM_NODEID $SLURM_LOCALID'")
    [job] = found.documents[0]["jobs"]
    wanted = [f"{node} {task}\n" for node, count in enumerate(counts) for task in range(count)]
    assert [execute(job["run"], tmp_path, RANK=str(rank)) for rank in range(job["tasks"])] == wanted
    assert job["resources"]["memory"] == memory
    is_said = any(f"count {', '.join(map(str, counts))} tasks" in remark.why for remark in found.remarks)
    assert is_said == ("--ntasks-per-node=4" not in options)


def test_srun_is_removed_wherever_it_stands(tmp_path: Path) -> None:
    """Options in a variable, `srun` in a variable, and after other commands; what is left of it is said."""
    body = (
        'ARGS=" --wait=60 \\\n  --label "\nLAUNCHER="srun --cpu-bind=none"\nCMD=\'srun echo c\'\n'
        "true; srun $ARGS --jobid $SLURM_JOBID bash -c 'echo a'\n$LAUNCHER echo b\n$CMD\n"
        "X=1 srun -l echo d && if true; then time srun echo e; fi\n"
    )
    found = batch("-n 2", body=body)
    assert execute(found.documents[0]["jobs"][0]["run"], tmp_path) == "a\nb\nc\nd\ne\n"
    left = batch("-n 2", body="srun a\ntimeout 9 srun b").remarks
    assert [one.line for one in left if "remove srun" in one.why] == [4]


def test_braces_in_arrays_are_escaped() -> None:
    body = "docker inspect -f '{{.Id}}' x"
    assert "{{{{.Id}}" in batch("--array=0-1", body=body).documents[0]["jobs"][0]["run"]
    assert "'{{.Id}}" in batch("-n 1", body=body).documents[0]["jobs"][0]["run"]


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--begin=now+2hours", "not_before", "2h"),
        ("--begin=2026-01-31", "not_before", "2026-01-31T00:00:00Z"),
        ("--dependency=singleton", "after", [{"workload": "job", "condition": "ended"}]),
        ("--dependency=afternotok:7", "after", [{"workload": "slurm-7", "condition": "failed"}]),
        ("--kill-on-invalid-dep=no", "if_never", "keep"),
    ],
)
def test_dependencies_and_times(option: str, field: str, value: Any) -> None:
    assert batch(option).documents[0][field] == value


def test_corresponding_elements() -> None:
    """`aftercorr` is about elements only if the job is an array."""
    found = [batch("--dependency=aftercorr:7", *more).documents[0]["after"][0] for more in (["--array=0-3"], [])]
    assert [one.get("same_index") for one in found] == [True, None]


def test_a_single_step_has_its_rank(tmp_path: Path) -> None:
    [document] = batch("-n 1", body="srun bash -c 'echo $SLURM_PROCID of $SLURM_NTASKS'").documents
    assert execute(document["jobs"][0]["run"], tmp_path) == "0 of 1\n"
    [document] = batch("-n 1", body="srun env").documents
    assert {"SLURM_PROCID=0", "SLURM_NTASKS=1"} <= {*execute(document["jobs"][0]["run"], tmp_path).split("\n")}


def test_a_script_in_python_runs_as_a_file(tmp_path: Path) -> None:
    [document] = converted(source("program")).documents
    for name, text in document["files"].items():
        (tmp_path / name).write_text(text)
    assert execute(document["jobs"][0]["run"], tmp_path, MIZZEN_ARRAY_INDEX="7") == "fits model 7\n"


@pytest.mark.parametrize(
    ("options", "body", "line", "right"),
    [
        (["--time=tomorrow"], "true", 2, "write minutes"),
        (["-N3", "-n8", "--gpus-per-node=2"], "srun true", 4, "cannot be divided among 3 tasks"),
        (["--nodes=two"], "true", 2, "write a number of nodes"),
        (["--array=5-1"], "true", 2, "write the lower number first"),
        (["--array=a"], "true", 2, "write indexes such as 0-15"),
        (["-Z"], "true", 2, "sbatch has no option -Z"),
        (["--mem=much"], "true", 2, "write a size"),
        (["--mem"], "true", 2, "needs a value"),
        (['--comment="x'], "true", 2, "a quotation mark is not closed"),
        (["hetjob"], "true", 2, "convert each part"),
        (["--dependency=soon"], "true", 2, "write afterok:JOB"),
        (["--signal=@"], "true", 2, "write a signal such as USR1@120"),
        (["--gres=gpu:3", "-n 2"], "srun ./x", 2, "give a multiple of 2"),
        (["--gres=gpu:a100:1,gpu:h100:1"], "true", 2, "write a job for each type"),
        (["--ntasks-per-gpu=2", "--gpus=1"], "true", 2, "write --ntasks-per-gpu=1"),
        (["-n 4"], "srun -n 2 ./x", 3, "write a job for each such step"),
        (["-N 2"], "for i in 1 2; do srun -N1 -n1 ./x & done", 3, "elements of an --array"),
        (["-n 2"], "srun --multi-prog conf", 3, "one job for each program"),
        (["-n 2"], "srun -n $N ./x", 3, "write a number"),
        (["-N 2"], "mpirun ./x", 3, "use one node"),
        (["--chdir=/x/%j"], "true", 2, "write a folder without %"),
        ([], "# only a comment", 3, "the script has no command"),
        (["--time=999-0"], "true", 2, "at most 365 days"),
        (["--gres=gpu:100"], "true", 2, "1 to 62"),
        (["--mem=1G", "--mem-per-cpu=1G"], "true", 3, "give one of them"),
        (["--mem=900T"], "true", 2, "1MiB to 64TiB"),
        ([], "echo " + "x" * 20000, 3, "break it into several"),
    ],
)
def test_wrong_scripts_are_refused(options: list[str], body: str, line: int, right: str) -> None:
    text = "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), body, ""])
    message = refusal(text, kind="slurm")
    assert message.startswith(f"{line - (not options and line == 3)}: refused: ") and right in message


@pytest.mark.parametrize(
    ("options", "notify", "outcomes"),
    [
        (("--mail-type=END,FAIL", "--mail-user=a@b.c"), [{"email": "a@b.c"}], {"carried"}),
        (("--mail-type=fail", "--mail-user=a@b.c,d@e.f"),
         [{"email": "a@b.c", "on": ["failed"]}, {"email": "d@e.f", "on": ["failed"]}], {"carried"}),
        (("--mail-type=ALL", "--mail-user=a@b.c"), [{"email": "a@b.c"}], {"changed", "carried"}),
        (("--mail-type=BEGIN,FAIL", "--mail-user=a@b.c"), [{"email": "a@b.c", "on": ["failed"]}],
         {"changed", "carried"}),
        (("--array=0-3", "--mail-type=END,ARRAY_TASKS", "--mail-user=a@b.c"), [{"email": "a@b.c", "each": True}],
         {"carried"}),
        (("--mail-type=END,ARRAY_TASKS", "--mail-user=a@b.c"), [{"email": "a@b.c"}], {"carried"}),
        (("--mail-type=BEGIN", "--mail-user=a@b.c"), None, {"dropped"}),
        (("--mail-type=NONE", "--mail-user=a@b.c"), None, {"dropped"}),
        (("--mail-type=END", "--mail-user=ada"), None, {"dropped"}),
        (("--mail-type=END",), None, {"dropped"}),
        (("--mail-user=a@b.c",), None, {"dropped"}),
    ],
)  # fmt: skip
def test_mail(options: tuple[str, ...], notify: list[Any] | None, outcomes: set[str]) -> None:
    """Mail about ends is carried over; what Slurm sends besides is named, and what has no address is dropped."""
    found = batch("--gpus=1", *options)
    [document] = found.documents
    assert document.get("notify") == notify and problems(document) == []
    assert {one.outcome.value for one in found.remarks if one.source.startswith("--mail")} == outcomes
