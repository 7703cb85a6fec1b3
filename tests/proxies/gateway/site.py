"""A gateway in front of a Temporal dev server, agents and other callers with keys of machines."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from sqlalchemy import Engine, func, update
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice import v1 as service

from agent.config import AgentConfig
from agent.host import serve as serve_agent
from domain.ids import agent_queue
from infra.config.services import TemporalSettings
from infra.config.settings import Settings
from infra.db.session import transaction
from infra.db.tenants import ApiKey, Tenant
from infra.keys import load_master_key, new_api_key
from infra.temporal_client import connect
from proxies.gateway.gateway_server import Certificate, serve
from proxies.gateway.methods import SERVICE
from tests.agent.harness import Lab


def certificate(folder: Path, name: str = "gateway") -> Certificate:
    """Returns a new self-signed certificate for 127.0.0.1."""
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", made.key, "-out", made.chain, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1",
         # The agents' TLS library accepts no certificate of an authority as that of a server.
         "-addext", "basicConstraints=critical,CA:FALSE"],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@dataclass
class Site:
    """A gateway, and what lies behind it."""

    lab: Lab
    engine: Engine
    settings: Settings
    certificate: Certificate
    port: int
    keys: dict[str, str] = field(default_factory=dict)
    """Ids of the keys that were made, by key."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, lab: Lab, engine: Engine, folder: Path, **options: Any) -> AsyncIterator["Site"]:
        """Runs a gateway in this process. `options` are those of `proxies.gateway.gateway_server.serve`."""
        load_master_key(folder / "master.key", create=True)
        settings = Settings(
            database=engine.url.render_as_string(hide_password=False).replace("+psycopg", ""),
            data_dir=folder,
            temporal=lab.temporal,
        )
        made = certificate(folder)
        stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(settings, "127.0.0.1:0", made, stop, port, **options))
        await asyncio.wait({serving, port}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        try:
            yield cls(lab, engine, settings, made, port.result())
        finally:
            stop.set()
            await serving

    def machine(self, name: str) -> str:
        """Returns the id of a machine in the lab's region."""
        return f"{self.lab.region}/c/{name}"

    def key(self, machine: str | None, role: str = "machine", **columns: Any) -> str:
        """Returns a new API key."""
        key_id, key, sha256 = new_api_key()
        with transaction(self.engine) as session:
            if "tenant" in columns:
                session.add(Tenant(name=columns["tenant"], level=3))
                session.flush()
            session.add(ApiKey(id=key_id, sha256=sha256, role=role, machine=machine, **columns))
        self.keys[key] = key_id
        return key

    def expired(self, machine: str) -> str:
        """Returns an API key that has expired."""
        return self.key(machine, expires_at=func.now() - timedelta(seconds=1))

    def revoke(self, key: str) -> None:
        """Revokes a key as the API does."""
        with transaction(self.engine) as session:
            session.execute(update(ApiKey).where(ApiKey.id == self.keys[key]).values(revoked_at=func.now()))

    def temporal(self, key: str | None) -> TemporalSettings:
        """Returns the settings with which an agent connects to the gateway."""
        address = f"127.0.0.1:{self.port}"
        return TemporalSettings(address=address, tls_ca=self.certificate.chain, api_key=key)

    @contextlib.asynccontextmanager
    async def agent(self, config: AgentConfig, key: str) -> AsyncIterator[None]:
        """Runs an agent in this process that connects to the gateway; at the end it detaches from its tasks."""
        stop = asyncio.Event()
        serving = asyncio.create_task(serve_agent(config, lambda: connect(self.temporal(key)), stop))
        try:
            yield
        finally:
            stop.set()
            await serving

    @contextlib.asynccontextmanager
    async def caller(self, key: str | None) -> AsyncIterator["Caller"]:
        """Connects to the gateway with a key, as a program that is not an agent."""
        credentials = grpc.ssl_channel_credentials(self.certificate.chain.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{self.port}", credentials) as channel:
            yield Caller(channel, () if key is None else (("authorization", f"Bearer {key}"),))


@dataclass
class Caller:
    """A client that sends any request."""

    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...]

    async def send(self, path: str, body: bytes, timeout_s: float = 20.0) -> bytes:
        """Calls the method at a path, `/service/method`."""
        call = self.channel.unary_unary(path)
        answer: bytes = await call(body, metadata=self.metadata, timeout=timeout_s)
        return answer

    async def call(self, request: Message, timeout_s: float = 20.0) -> Any:
        """Calls the method of Temporal's workflow service that takes this type of request."""
        name = request.DESCRIPTOR.name.removesuffix("Request")
        answer = await self.send(f"/{SERVICE}/{name}", request.SerializeToString(), timeout_s)
        return getattr(service, f"{name}Response").FromString(answer)

    async def refusal(self, request: Message) -> tuple[grpc.StatusCode, str]:
        """Returns status and message of a call that must fail."""
        try:
            await self.call(request)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError("the call was not refused")

    async def poll(self, machine: str, timeout_s: float = 20.0) -> Any:
        """Polls the queue of a machine for one task."""
        queue = TaskQueue(name=agent_queue(machine))
        return await self.call(service.PollActivityTaskQueueRequest(namespace="default", task_queue=queue), timeout_s)
