"""Scripts of a document: which interpreter runs `setup` and `run`, and with which options."""

from typing import Any

import pytest

from domain.protocol.machines import NodeOutcome
from tests.agent.harness import Lab, description, until_async

_BASHISMS = """\
if [[ $MODE == train ]]; then
  echo "training"
fi
parts=(a b)
echo "${parts[1]}${NOT_SET:-} $NOT_SET."
"""
_SCRIPTS: dict[str, dict[str, Any]] = {
    "shebang": {"script": f"#!/bin/bash\n{_BASHISMS}"},
    "none": {"script": _BASHISMS},
    "setup": {"script": "true", "setup": _BASHISMS},
    "setup-shebang": {"script": "true", "setup": f"#!/usr/bin/env bash\nfalse\n{_BASHISMS}"},
}
_ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "stops": ({"script": "echo one; false; echo two"}, "exit code 1", "one\n"),
    "stops-setup": ({"script": "echo three", "setup": "echo one; false; echo two"}, "exit code 1", "one\n"),
    "goes-on": ({"script": "#!/bin/bash\necho one; false; echo two"}, "exit code 0", "one\ntwo\n"),
    "posix": ({"script": "#!/bin/sh -eu\necho ${A-one}\necho $A"}, "exit code 2", "one\n"),
    "no-pipefail": ({"script": "false | true; echo one"}, "exit code 0", "one\n"),
    "pipefail": ({"script": "set -o pipefail; false | true; echo one"}, "exit code 1", ""),
    "python": ({"script": "#!/usr/bin/env -S python3 -I\nprint('one')"}, "exit code 0", "one\n"),
    "missing": ({"script": "#!/opt/none\n"}, "exit code 127", "mizzen: cannot run '/opt/none'"),
}


async def _run(lab: Lab, bodies: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Runs a job for each body; returns the status and the output of each."""
    config = lab.config(cgroup=False, ports=(21400, 21499))
    base = {"role": "worker", "tasks": 1, "master_machine": config.machine, "env": {"MODE": "train"}}
    place = {"task": 0, "machine": config.machine, "rank": 0, "world_size": 1, "node_rank": 0, "local_rank": 0}
    launch = description(
        lab.region,
        config,
        jobs={name: {**base, **body} for name, body in bodies.items()},
        tasks=[{**place, "job": name, "local_world_size": 1} for name in bodies],
        grace_s=600.0,
    )
    lab.write(launch)
    async with lab.agent(config):
        await lab.prepare(launch, config.machine)
        outcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        await until_async(lambda: all(lab.log(launch, name)[1] for name in bodies))
    return {exit_.job: (exit_.status, lab.log(launch, exit_.job)[0].decode()) for exit_ in outcome.exits}


async def test_scripts_for_bash_run_in_bash(lab: Lab) -> None:
    """`[[`, arrays and unset variables work in `setup` and `run`, with a first line that names bash and without."""
    found = await _run(lab, _SCRIPTS)
    assert found == dict.fromkeys(_SCRIPTS, ("exit code 0", "training\nb .\n"))


@pytest.mark.rotating
async def test_the_options_of_scripts(lab: Lab) -> None:
    """A script without `#!` ends at the first failure; other options, and all those of one with `#!`, are its own."""
    for name, (body, status, text) in _ENDS.items():
        found = (await _run(lab, {name: body}))[name]
        assert found[0] == status and found[1].startswith(text) and "two" not in found[1].removeprefix(text), found


async def test_python_does_not_buffer_its_output(lab: Lab) -> None:
    """What a Python program prints is in the log while it runs."""
    config = lab.config(cgroup=False, ports=(21500, 21599))
    launch = description(lab.region, config, "python3 -c 'import time; print(\"step 1\"); time.sleep(600)'")
    lab.write(launch)
    async with lab.agent(config):
        await lab.prepare(launch, config.machine)
        await lab.run(launch, config.machine)
        await until_async(lambda: b"step 1\n" in lab.log(launch)[0])
        await lab.stop(launch, config.machine, 0.0)
