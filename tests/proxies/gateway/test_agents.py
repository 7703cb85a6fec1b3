"""Agents through the gateway: tasks end to end, notices, revoked keys, and a gateway that is killed."""

import asyncio
import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from sqlalchemy import Engine
from temporalio.service import RPCError

from domain.ids import machine_workflow_id
from domain.protocol.activities import Activity
from domain.protocol.machines import NodeOutcome, RunNode
from infra.keys import load_master_key
from infra.stack.ports import free_port
from infra.temporal_client import connect
from tests.agent.harness import HelloWorkflow, Lab, description, digest, until_async
from tests.proxies.gateway.site import Site, certificate


async def _heard(lab: Lab, machine: str, query: Callable[..., Any]) -> list[dict[str, Any]]:
    """Returns what the machine's workflow has received; empty if the workflow does not exist yet."""
    with contextlib.suppress(RPCError):
        found: list[dict[str, Any]] = await lab.client.get_workflow_handle(machine_workflow_id(machine)).query(query)
        return found
    return []


async def _until_heard(lab: Lab, machine: str, query: Callable[..., Any], count: int = 1) -> list[dict[str, Any]]:
    async with asyncio.timeout(30):
        while len(heard := await _heard(lab, machine, query)) < count:
            await asyncio.sleep(0.05)
    return heard


async def test_an_agent_runs_tasks(site: Site) -> None:
    """An agent with a machine's key registers, runs tasks with heartbeats and reports success and failure."""
    lab = site.lab
    config = lab.config(heartbeat_interval_s=0.2)
    async with site.agent(config, site.key(config.machine)):
        good = description(lab.region, config, "echo from rank $RANK; sleep 1; exit 3")
        lab.write(good)
        running = await lab.run(good, config.machine)
        await until_async(lambda: lab.folder_of(good, config).output.exists())
        outcome: NodeOutcome = await running.result(NodeOutcome)
        assert [one.exit_code for one in outcome.exits] == [3]
        missing = description(lab.region, config, "true")
        failed = await (await lab.run(missing, config.machine, attempts=1)).failure()
        assert failed.type == "BucketUnavailable"
        assert (await _until_heard(lab, config.machine, HelloWorkflow.hellos))[0]["machine"] == config.machine
    described = await lab.client.get_workflow_handle(machine_workflow_id(config.machine)).describe()
    assert await described.static_summary() == f"machine {config.machine}"


async def test_an_agent_says_whether_it_is_connected(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the address after the registration; if the gateway refuses the agent, it says so and why."""
    caplog.set_level("INFO", "agent.host")
    config = site.lab.config()
    refused = f"{config.machine}: the gateway or Temporal refuses the agent, next try in "
    connected = f"{config.machine}: connected to 127.0.0.1:{site.port}; the machine is being registered"
    for key, why in (
        (site.key(site.machine("other")), f"the key allows only machine/{site.machine('other')}"),
        (site.expired(config.machine), ": the API key is unknown, expired or revoked"),
        (site.key(None, role="operator"), "mizzen keys create --role machine --machine ID"),
    ):
        caplog.clear()
        async with site.agent(config, key):
            await until_async(lambda: refused in caplog.text)
        assert why in caplog.text and "unavailable" not in caplog.text and connected not in caplog.text
    caplog.clear()
    async with site.agent(config, site.key(config.machine)):
        await _until_heard(site.lab, config.machine, HelloWorkflow.hellos)
        await until_async(lambda: connected in caplog.text)
    assert "refuses" not in caplog.text


async def test_a_notice_reaches_the_machines_workflow(site: Site, tmp_path: Path) -> None:
    """The agent's notice of the platform is forwarded."""
    file = tmp_path / "notice"
    config = site.lab.config(platform="file", notice_file=file)
    async with site.agent(config, site.key(config.machine)):
        await _until_heard(site.lab, config.machine, HelloWorkflow.hellos)
        file.write_text("")
        told = await _until_heard(site.lab, config.machine, HelloWorkflow.notices)
    assert told[0]["machine"] == config.machine


async def test_a_revoked_key_ends_polls_and_calls(site: Site) -> None:
    """Within five seconds after the revocation a poll in progress ends, and new calls are refused."""
    machine = site.machine("m1")
    key = site.key(machine)
    async with site.caller(key) as caller:
        polling = asyncio.create_task(caller.poll(machine, timeout_s=60))
        await asyncio.sleep(1)
        assert not polling.done()
        site.revoke(key)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async with asyncio.timeout(5):
                await polling
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await caller.poll(machine)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_an_agent_gets_a_new_key(site: Site) -> None:
    """A task outlives the revocation: an agent with a new key of the machine reports its end."""
    lab = site.lab
    config = lab.config()
    key = site.key(config.machine)
    launch = description(lab.region, config, "while [ ! -e go ]; do sleep 0.1; done")
    lab.write(launch)
    folder = lab.folder_of(launch, config)
    async with site.agent(config, key):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: folder.output.exists())
        site.revoke(key)
    async with site.agent(config, site.key(config.machine)):
        (folder.work / "go").touch()
        outcome: NodeOutcome = await running.result(NodeOutcome)
    assert [one.exit_code for one in outcome.exits] == [0]


@contextlib.contextmanager
def _process(file: Path, port: int, site: Any, checkout: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "server", "gateway", "--config", str(file), "--listen", f"127.0.0.1:{port}"]
    command += ["--tls-cert", str(site.chain), "--tls-key", str(site.key), *more]
    process = subprocess.Popen(command, cwd=checkout, env={**os.environ})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.rotating
async def test_a_killed_gateway(lab: Lab, database: Engine, tmp_path: Path, checkout: Path) -> None:
    """A gateway that is killed and started again completes tasks whose tokens the first one handed out."""
    load_master_key(tmp_path / "master.key", create=True)
    made, port, file = certificate(tmp_path), free_port(), tmp_path / "settings.yaml"
    database_url = database.url.render_as_string(hide_password=False).replace("+psycopg", "")
    settings = {"database": database_url, "data_dir": str(tmp_path), "temporal": {"address": lab.temporal.address}}
    file.write_text(yaml.safe_dump(settings))
    site = Site(lab, database, None, made, port)  # type: ignore[arg-type]
    config = lab.config(heartbeat_interval_s=0.2)
    launch = description(lab.region, config, "while [ ! -e go ]; do sleep 0.1; done")
    request = RunNode(launch.workload_id, 1, config.machine, lab.write(launch), lab.bucket_url, {}, digest(launch))
    folder = lab.folder_of(launch, config)
    with _process(file, port, made, checkout) as first:
        async with site.agent(config, site.key(config.machine)):
            # One try and a long heartbeat timeout: the task must end with the token of the first gateway.
            running = await lab.start(Activity.RUN_NODE, config.machine, request, 1, heartbeat_timeout_s=60.0)
            await until_async(lambda: folder.output.exists())
            first.kill()
            first.wait()
            metrics = free_port()
            with _process(file, port, made, checkout, "--metrics", f":{metrics}", "--connections-per-address", "50"):
                async with asyncio.timeout(60):
                    before = (await running.state()).last_heartbeat_time
                    while (await running.state()).last_heartbeat_time == before:
                        await asyncio.sleep(0.1)
                (folder.work / "go").touch()
                outcome: NodeOutcome = await running.result(NodeOutcome)
                assert [one.exit_code for one in outcome.exits] == [0]
                after = description(lab.region, config, "exit 4")
                lab.write(after)
                second: NodeOutcome = await (await lab.run(after, config.machine)).result(NodeOutcome)
                assert [one.exit_code for one in second.exits] == [4]
                with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=10) as answer:
                    assert b"mizzen_gateway_connections " in answer.read()


async def test_an_agent_without_a_key_is_refused(site: Site) -> None:
    """The client of an agent with an invalid key gets a message that names the cause."""
    with pytest.raises(RuntimeError, match="the API key is unknown, expired or revoked"):
        await connect(site.temporal("mzn_0123_unknown"))
