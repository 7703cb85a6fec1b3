"""The gateway's certificate."""

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest
from temporalio.api.workflowservice import v1 as service

from infra.errors import ConfigurationError
from proxies.gateway.gateway_server import Certificate, serve
from proxies.gateway.methods import SERVICE
from tests.proxies.gateway.site import Caller, Site, certificate


async def _accepts(site: Site, authority: Path | None, key: str) -> bool:
    """Returns whether a client that trusts this certificate can call the gateway; None: a client without TLS."""
    address = f"127.0.0.1:{site.port}"
    if authority is None:
        channel = grpc.aio.insecure_channel(address)
    else:
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority.read_bytes()))
    async with channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            caller = Caller(channel, (("authorization", f"Bearer {key}"),))
            return bool((await caller.call(service.GetSystemInfoRequest())).server_version)
    return False


async def test_a_new_certificate_is_used_without_a_restart(site: Site, tmp_path: Path) -> None:
    """New connections get the new certificate, calls in progress continue, and files that are gone change nothing."""
    key, machine = site.key(site.machine("m1")), site.machine("m1")
    first, second = site.certificate, certificate(tmp_path, "second")
    old = tmp_path / "old.crt"
    old.write_bytes(first.chain.read_bytes())
    assert await _accepts(site, old, key)
    assert not await _accepts(site, second.chain, key)
    assert not await _accepts(site, None, key)
    async with site.caller(key) as caller:
        polling = asyncio.create_task(caller.poll(machine, timeout_s=60))
        await asyncio.sleep(0.5)
        second.key.replace(first.key)
        assert await _accepts(site, old, key), "a key without its certificate is not used"
        first.chain.write_bytes(second.chain.read_bytes())
        assert await _accepts(site, second.chain, key)
        assert not await _accepts(site, old, key)
        first.chain.unlink()
        assert await _accepts(site, second.chain, key)
        assert not polling.done()
        polling.cancel()


@pytest.mark.parametrize("broken", ["missing", "mixed", "taken", "host"])
async def test_what_cannot_be_used_is_named(site: Site, tmp_path: Path, broken: str) -> None:
    """Certificate files and an address that cannot be used end the start with the name of the option."""
    other = certificate(tmp_path, "other")
    cases = {
        "missing": ("127.0.0.1:0", Certificate(tmp_path / "absent.crt", other.key), "--tls-cert.*absent.crt"),
        "mixed": ("127.0.0.1:0", Certificate(other.chain, site.certificate.key), "--tls-cert"),
        "taken": (f"127.0.0.1:{site.port}", other, f"--listen: '127.0.0.1:{site.port}'"),
        "host": ("nowhere", other, "--listen: 'nowhere'"),
    }
    listen, given, words = cases[broken]
    with pytest.raises(ConfigurationError, match=words):
        await serve(site.settings, listen, given, asyncio.Event())


def test_the_service_is_that_of_temporal() -> None:
    """The forwarded paths are those of the SDK's generated messages."""
    assert service.GetSystemInfoRequest.DESCRIPTOR.file.package == SERVICE.rpartition(".")[0]
