"""Launch descriptions, the environment of tasks, and secrets."""

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from nacl.public import PublicKey, SealedBox
from pydantic import ValidationError

from agent import sealed
from agent.launch import environment, script_command
from domain.launch import LaunchDescription
from mizzen import World, world

PLACE = {
    "job": "main",
    "task": 1,
    "machine": "r1/c1/m1",
    "rank": 1,
    "world_size": 2,
    "node_rank": 0,
    "local_rank": 1,
    "local_world_size": 2,
    "slots": [4, 5],
}
LAUNCH: dict[str, Any] = {
    "workload_id": "wl-1",
    "name": "resnet",
    "tenant": "vision",
    "tenant_number": 0,
    "attempt": 3,
    "region": "r1",
    "checkpoint": {
        "interval_s": 600.0,
        "grace_s": 0.5,
        "keep": 2,
        "uri": "file:///b/checkpoints/wl-1/",
        "machine_hazard_per_h": 0.025,
    },
    "tables": {"raw-text": "file:///b/tables/raw-text/", "ads.clicks": "file:///b/tables/ads.clicks/"},
    "stale_tables": {"ads.clicks": "2026-11-22T04:00:00.5+01:00"},
    "jobs": {
        "main": {
            "role": "worker",
            "tasks": 2,
            "argv": ["python", "train.py"],
            "env": {"LR": "0.1", "MIZZEN_WORKLOAD": "forged", "LANG": "C", "RANK": "7", "CUDA_VISIBLE_DEVICES": "0"},
            "master_machine": "r1/c1/m1",
        },
        "param-server": {"role": "ps", "tasks": 1, "script": "exec ./ps", "master_machine": "r1/c1/m2"},
    },
    "tasks": [PLACE, PLACE | {"job": "param-server", "task": 0, "slots": []}],
}


def test_the_environment_is_exactly_the_documented_one() -> None:
    """A task gets the documented variables, its user's variables and secrets, and none of the agent's environment."""
    launch = LaunchDescription.model_validate(LAUNCH)
    env = environment(
        launch,
        launch.on_machine("r1/c1/m1")[0],
        masters={"main": "10.0.0.1:7001", "param-server": "10.0.0.2:7002"},
        home=Path("/runs/x/work"),
        report=Path("/runs/x/report/report.json"),
        interval_file=Path("/runs/x/interval.json"),
        deadline_file=Path("/runs/x/deadline.json"),
        python="/venv/bin/python",
        secrets={"TOKEN": "hunter2", "MIZZEN_TENANT": "forged"},
        user="2000001",
        platform="aws-spot",
    )
    assert env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/runs/x/work",
        "USER": "2000001",
        "LOGNAME": "2000001",
        "LANG": "C",
        "PYTHONUNBUFFERED": "1",
        "LR": "0.1",
        "TOKEN": "hunter2",
        "MIZZEN_WORKLOAD": "wl-1",
        "MIZZEN_WORKLOAD_NAME": "resnet",
        "MIZZEN_TENANT": "vision",
        "MIZZEN_ATTEMPT": "3",
        "MIZZEN_JOB": "main",
        "MIZZEN_TASK": "1",
        "MIZZEN_TASKS": "2",
        "MIZZEN_REGION": "r1",
        "MIZZEN_MACHINE": "r1/c1/m1",
        "MIZZEN_RUN_ID": "wl-1.3.main.1",
        "MIZZEN_CHECKPOINT_URI": "file:///b/checkpoints/wl-1/",
        "MIZZEN_CHECKPOINT_INTERVAL_S": "600",
        "MIZZEN_CHECKPOINT_KEEP": "2",
        "MIZZEN_GRACE_S": "0.5",
        "MIZZEN_REPORT": "/runs/x/report/report.json",
        "MIZZEN_INTERVAL_FILE": "/runs/x/interval.json",
        "MIZZEN_DEADLINE_FILE": "/runs/x/deadline.json",
        "MIZZEN_SESSION_FILE": "/runs/x/session",
        "MIZZEN_PYTHON": "/venv/bin/python",
        "MIZZEN_TABLE_RAW_TEXT": "file:///b/tables/raw-text/",
        "MIZZEN_TABLE_ADS__CLICKS": "file:///b/tables/ads.clicks/",
        "MIZZEN_TABLE_ADS__CLICKS_COMPLETE_UNTIL": "2026-11-22T03:00:00.500000Z",
        "MIZZEN_JOB_MAIN_ADDR": "10.0.0.1:7001",
        "MIZZEN_JOB_PARAM_SERVER_ADDR": "10.0.0.2:7002",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MIZZEN_GANG_MACHINES": "1",
        "MIZZEN_MACHINE_HAZARD_PER_H": "0.025",
        "MIZZEN_PLATFORM": "aws-spot",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "7001",
    }


def test_tasks_of_an_elastic_job_see_its_range() -> None:
    """They get the fewest and the most tasks, and those of the last attempt that saved; `mizzen.world` reads them."""
    main = LAUNCH["jobs"]["main"]
    for told, size in (
        ({"min_tasks": 2, "max_tasks": 8, "saved_tasks": 4}, World(2, 4, 2, 8)),
        ({}, World(2, None, 2, 2)),
    ):
        launch = LaunchDescription.model_validate({**LAUNCH, "jobs": {**LAUNCH["jobs"], "main": main | told}})
        env = environment(
            launch, launch.on_machine("r1/c1/m1")[0], masters={}, home=Path("/w"), report=Path("/r"),
            interval_file=Path("/i"), deadline_file=Path("/d"), python="/p", secrets={}, user="1",
        )  # fmt: skip
        assert world(env) == size
        assert world(env).changed is bool(told)


def test_tasks_find_each_other_by_rank() -> None:
    """A task gets the address of each task of its job, by rank; none if one is unknown or the list is too long."""
    places = [PLACE | {"task": rank, "rank": rank, "machine": f"r1/c1/m{rank}"} for rank in (1, 0)]
    jobs = {"main": LAUNCH["jobs"]["main"]}

    def addresses(**known: str) -> str | None:
        found = {f"r1/c1/{machine}": address for machine, address in known.items()}
        launch = LaunchDescription.model_validate({**LAUNCH, "jobs": jobs, "tasks": places, "addresses": found})
        path = Path("/x")
        env = environment(launch, launch.tasks[0], masters={}, home=path, report=path, interval_file=path,
                          deadline_file=path, python="py", secrets={}, user="u")  # fmt: skip
        return env.get("MIZZEN_TASK_ADDRS")

    assert addresses(m1="10.0.0.2", m0="10.0.0.1") == "10.0.0.1\n10.0.0.2"
    assert addresses(m1="10.0.0.2") is None
    assert addresses(m1="10.0.0.2", m0="h" * 65536) is None


def test_an_interval_that_nobody_asked_for_is_not_given() -> None:
    """Without a checkpoint interval in the workload's document, tasks compute their own."""
    checkpoint = {**LAUNCH["checkpoint"], "interval_s": None, "machine_hazard_per_h": None}
    launch = LaunchDescription.model_validate({**LAUNCH, "checkpoint": checkpoint})
    given = {"masters": {}, "home": Path("/h"), "report": Path("/r"), "interval_file": Path("/i"), "python": "py"} | {
        "deadline_file": Path("/d")
    }
    env = environment(launch, launch.on_machine("r1/c1/m1")[0], secrets={}, user="u", **given)  # type: ignore[arg-type]
    assert not {"MIZZEN_CHECKPOINT_INTERVAL_S", "MIZZEN_MACHINE_HAZARD_PER_H", "MIZZEN_PLATFORM"} & set(env)


def test_the_sdk_reads_the_same_environment() -> None:
    """`mizzen.environment` reads the variables that the agent sets."""
    from mizzen.environment import TaskEnvironment

    launch = LaunchDescription.model_validate(LAUNCH)
    place = launch.on_machine("r1/c1/m1")[1]
    given = {
        "masters": {"param-server": "[::1]:7002"},
        "home": Path("/h"),
        "report": Path("/r"),
        "interval_file": Path("/i"),
        "deadline_file": Path("/d"),
        "python": "py",
    }
    read = TaskEnvironment.from_environ(environment(launch, place, secrets={}, user="u", **given))  # type: ignore[arg-type]
    assert (read.workload, read.attempt, read.job, read.task, read.tasks) == ("wl-1", 3, "param-server", 0, 1)
    assert (read.checkpoint_interval_s, read.checkpoint_keep, read.grace_s) == (600.0, 2, 0.5)
    assert (read.gang_mtbf_s, read.machine_hazard_per_h, read.gang_machines) == (None, 0.025, 1)
    assert (read.gpus, read.master_addr, read.master_port) == ((), "[::1]", 7002)
    assert dict(read.job_addresses) == {"PARAM_SERVER": "[::1]:7002"}
    assert read.run_id == "wl-1.3.param-server.0"
    assert dict(read.tables_complete_until) == {"ADS__CLICKS": launch.stale_tables["ads.clicks"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tasks": [PLACE | {"job": "other"}]}, "no such job"),
        ({"tasks": [PLACE | {"task": 2}]}, "no such job or task"),
        ({"tasks": [PLACE, PLACE]}, "listed twice"),
        ({"jobs": {"../x": LAUNCH["jobs"]["main"]}, "tasks": []}, "name"),
        ({"jobs": {"main": {"role": "w", "tasks": 2, "master_machine": "m"}}}, "argv or script"),
        ({"workload_id": "../wl"}, "workload_id"),
        ({"workdir": "../x"}, "workdir"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_launches_that_make_no_sense(change: dict[str, Any], said: str) -> None:
    """A description that refers to something missing, or could name another folder, is rejected with its field."""
    with pytest.raises(ValidationError, match=said):
        LaunchDescription.model_validate(LAUNCH | change)


def test_secrets_open_with_their_key_only() -> None:
    """A secret sealed for a machine opens only there; elsewhere it fails with an error that does not quote it."""
    key = sealed.new_key()
    box = SealedBox(PublicKey(base64.b64decode(sealed.public_key(key))))
    body = {"main": {"TOKEN": "hunter2"}}
    text = base64.b64encode(box.encrypt(json.dumps(body).encode())).decode()
    assert sealed.unseal([key], text) == body
    assert sealed.unseal([key], None) == {} and sealed.unseal([sealed.new_key(), key], text) == body
    for other, wrong in ((sealed.new_key(), text), (key, text[:-8]), (key, "no base64!")):
        with pytest.raises(sealed.CannotUnseal) as caught:
            sealed.unseal([other], wrong)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(sealed.CannotUnseal):
        sealed.unseal([sealed.new_key(), key], base64.b64encode(box.encrypt(b'["a list"]')).decode())


def test_a_document_replaces_the_defaults() -> None:
    """PATH, HOME, LANG and PYTHONUNBUFFERED are defaults: the value of the document stands, also an empty one."""
    defaults = {"PATH": "/opt/bin", "HOME": "/opt", "LANG": "C", "PYTHONUNBUFFERED": ""}
    body = {**LAUNCH, "jobs": {**LAUNCH["jobs"], "main": {**LAUNCH["jobs"]["main"], "env": defaults}}}
    launch = LaunchDescription.model_validate(body)
    place = launch.on_machine("r1/c1/m1")[0]
    path = Path("/runs/x")
    env = environment(launch, place, masters={}, home=path, report=path, interval_file=path, deadline_file=path,
                      python="python", secrets={}, user="u")  # fmt: skip
    assert {name: env[name] for name in defaults} == defaults


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("echo hi", ("{bash}", "-e")),
        ("\n#!/bin/sh\necho hi", ("{bash}", "-e")),
        ("#!\necho hi", ("{bash}", "-e")),
        ("#!/bin/bash\necho hi", ("/bin/bash",)),
        ("#! /bin/sh -eu \necho hi", ("/bin/sh", "-eu")),
        ("#!/usr/bin/env -S python3 -I\nprint()", ("/usr/bin/env", "-S python3 -I")),
    ],
)
def test_the_command_of_a_script(script: str, command: tuple[str, ...], tmp_path: Path) -> None:
    """The first line of a script names its interpreter and options; otherwise bash runs it with -e, or sh does."""
    bash = shutil.which("bash")
    found = script_command(script, Path("/x/script.sh"), os.environ["PATH"])
    assert found == (*(part.replace("{bash}", str(bash)) for part in command), "/x/script.sh")
    if command[0] == "{bash}":
        assert script_command(script, Path("/x"), str(tmp_path)) == ("/bin/sh", "-e", "/x")
