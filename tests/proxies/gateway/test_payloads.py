"""Payloads in Temporal are encrypted: agents use the key of their machine or none, and keys can be rotated."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from sqlalchemy import Engine
from temporalio.api.common.v1 import Payload
from temporalio.client import Client
from temporalio.converter import ActivitySerializationContext

from domain.ids import agent_queue, machine_workflow_id
from domain.protocol.machines import NodeOutcome
from infra.config.services import TemporalSettings
from infra.errors import ConfigurationError
from infra.payload_codec import ENCODING, CannotDecrypt, EncryptingCodec, parts_of
from infra.payload_keys import PayloadKeys, UnknownKey, add_key, machine_lines, read_keys
from infra.temporal_client import connect
from tests.agent.harness import HelloWorkflow, Lab, description
from tests.proxies.gateway.site import Site


@pytest.fixture
async def secret_lab(tmp_path: Path, temporal_address: str) -> AsyncIterator[Lab]:
    """Yields a lab whose payloads are encrypted."""
    keys = tmp_path / "payload.keys"
    add_key(keys)
    async with Lab.open(tmp_path, temporal_address, keys) as opened:
        yield opened


async def _events(lab: Lab, *workflows: str) -> list[Message]:
    """Returns the events of workflows as Temporal stores them, and their descriptions."""
    reader = await Client.connect(lab.temporal.address or "")
    found: list[Message] = []
    for id_ in workflows:
        handle = reader.get_workflow_handle(id_)
        found += [event async for event in handle.fetch_history_events()]
        found.append((await handle.describe()).raw_description)
    return found


def _payloads(events: list[Message]) -> list[Payload]:
    """Returns all payloads except search attributes."""
    return [p for event in events for p in parts_of(event) if isinstance(p, Payload) and "type" not in p.metadata]


def _keys_of(payloads: list[Payload]) -> set[tuple[str, str]]:
    """Returns the ids of keys and machines; ("", "") for a payload in the clear."""
    return {(p.metadata.get("mizzen-key", b"").decode(), p.metadata.get("mizzen-machine", b"").decode())
            for p in payloads}  # fmt: skip


async def _work(lab: Lab, config: Any) -> list[Message]:
    """Runs a task that succeeds and one that fails on the agent; returns what Temporal stores of them."""
    good = description(lab.region, config, "sleep 1; exit 3")
    lab.write(good)
    running = await lab.run(good, config.machine)
    outcome: NodeOutcome = await running.result(NodeOutcome)
    assert [one.exit_code for one in outcome.exits] == [3]
    failing = await lab.run(description(lab.region, config, "true"), config.machine, attempts=1)
    failure = await failing.failure()
    assert failure.type == "BucketUnavailable" and lab.folder.name in str(failure)
    return await _events(lab, running.handle.id, failing.handle.id, machine_workflow_id(config.machine))


def _sealed(lab: Lab, events: list[Message]) -> None:
    text = b"".join(event.SerializeToString() for event in events)
    for shown in (lab.folder.name.encode(), b"memory_bytes", b"exit_code", b"Traceback"):
        assert shown not in text, f"Temporal stores {shown!r} in the clear"
    assert {p.metadata["encoding"] for p in _payloads(events)} == {ENCODING}


async def test_an_agent_behind_the_gateway_needs_no_payload_key(
    secret_lab: Lab, database: Engine, tmp_path: Path
) -> None:
    """The gateway decrypts what it passes to the agent, and encrypts what the agent reports, with its machine's key."""
    lab = secret_lab
    config = lab.config(heartbeat_interval_s=0.2)
    (key,) = read_keys(tmp_path / "payload.keys")
    async with Site.open(lab, database, tmp_path) as site, site.agent(config, site.key(config.machine)):
        events = await _work(lab, config)
    _sealed(lab, events)
    assert _keys_of(_payloads(events)) == {(key.id, ""), (key.id, config.machine)}
    handle = lab.client.get_workflow_handle(machine_workflow_id(config.machine))
    (hello, *_) = await handle.query(HelloWorkflow.hellos)
    assert hello["machine"] == config.machine
    assert await (await handle.describe()).static_summary() == f"machine {config.machine}"


async def test_an_agent_without_gateway_has_only_the_key_of_its_machine(secret_lab: Lab, tmp_path: Path) -> None:
    """The agent works with its own file, during rotations too, and cannot decrypt what is for others."""
    lab, keys = secret_lab, tmp_path / "payload.keys"
    config = lab.config(heartbeat_interval_s=0.2)
    own = tmp_path / "machine.keys"
    own.write_text(machine_lines(keys, config.machine))
    old = read_keys(keys)[0].id
    agent_lab = Lab(lab.folder, lab.temporal.model_copy(update={"payload_keys": own}), lab.client, lab.queue)
    async with agent_lab.agent(config):
        events = await _work(lab, config)
        _sealed(lab, events)
        assert _keys_of(_payloads(events)) == {(old, ""), (old, config.machine)}
        new = add_key(keys).id
        own.write_text(machine_lines(keys, config.machine))
        later = await _work(lab, config)
        assert {(new, ""), (new, config.machine)} <= _keys_of(_payloads(later))
        assert await lab.client.get_workflow_handle(machine_workflow_id(config.machine)).query(HelloWorkflow.hellos)
    machine = EncryptingCodec(PayloadKeys(own))
    for payload in _payloads(events + later):
        if "mizzen-machine" in payload.metadata:
            machine.decrypt(payload)
        else:
            with pytest.raises(UnknownKey, match="of the installation"):
                machine.decrypt(payload)


async def test_an_agent_without_keys_says_that_it_needs_them(secret_lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """The agent cannot read what is encrypted for it: its log and the failure of its activity name the setting."""
    lab = secret_lab
    config = lab.config(heartbeat_interval_s=0.2)
    blind = Lab(lab.folder, lab.temporal.model_copy(update={"payload_keys": None}), lab.client, lab.queue)
    async with blind.agent(config):
        running = await lab.run(description(lab.region, config, "true"), config.machine, attempts=1)
        assert "temporal.payload_keys: is not set" in str(await running.failure())
    assert "temporal.payload_keys: is not set" in caplog.text


def test_keys_of_machines_differ_and_damage_is_found(tmp_path: Path) -> None:
    """A machine's file does not open another machine's payloads; a changed payload is not decrypted."""
    keys = tmp_path / "payload.keys"
    add_key(keys)
    assert keys.stat().st_mode & 0o777 == 0o600
    whole = EncryptingCodec(PayloadKeys(keys))
    plain = Payload(metadata={"encoding": b"json/plain"}, data=b'"word"')

    def queue(machine: str) -> ActivitySerializationContext:
        return ActivitySerializationContext("default", "1", "x", agent_queue(machine), "w", "W", False)

    codecs = {}
    for name in ("r/c/m1", "r/c/m2"):
        (tmp_path / "own").write_text(machine_lines(keys, name))
        codecs[name] = EncryptingCodec(PayloadKeys(tmp_path / "own"))
    sealed = whole.with_context(queue("r/c/m1")).encrypt(plain)
    assert codecs["r/c/m1"].decrypt(sealed) == whole.decrypt(sealed) == plain
    assert whole.decrypt(codecs["r/c/m2"].encrypt(plain)) == plain
    with pytest.raises(UnknownKey, match="of machine r/c/m1"):
        codecs["r/c/m2"].decrypt(sealed)
    sealed.metadata["mizzen-machine"] = b"r/c/m2"
    with pytest.raises(CannotDecrypt):
        whole.decrypt(sealed)
    assert whole.decrypt(plain) == plain
    assert whole.encrypt(plain).data != whole.encrypt(plain).data


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "contains no key"), ("abc def\n", "line 1"), ("0" * 16 + " AAAA\n", "32 bytes"), (None, "No such file")],
)
async def test_an_unusable_file_stops_the_connection(tmp_path: Path, text: str | None, why: str) -> None:
    """The error names the file and what it must contain."""
    path = tmp_path / "payload.keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=why):
        await connect(TemporalSettings(address="127.0.0.1:1", payload_keys=path))
