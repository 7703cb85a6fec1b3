"""Servers, usually on loopback, with the protocols of S3 and Google Cloud Storage, in threads of this process.

moto checks the condition of a conditional put and puts in two steps, between which another thread may put. Here a lock
makes them atomic. The emulator of Google's storage does not enforce conditions: a create replaces an existing object.
"""

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import httpx
from gcp_storage_emulator.server import create_server
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer


@dataclass(frozen=True)
class EmulatorEndpoint:
    """A running server."""

    url: str
    environ: dict[str, str]
    """Environment variables that a process needs to open the server's buckets."""
    scheme: str
    _make: str = field(repr=False)

    def bucket(self) -> str:
        """Creates a bucket, and returns the URL of a prefix in it."""
        name = f"b-{uuid.uuid4().hex[:12]}"
        if self.scheme == "s3":
            httpx.put(f"{self._make}/{name}").raise_for_status()
        else:
            httpx.post(self._make, params={"project": "emulated"}, json={"name": name}).raise_for_status()
        return f"{self.scheme}://{name}/region-a"


@contextmanager
def s3(address: str = "127.0.0.1") -> Iterator[EmulatorEndpoint]:
    """Runs a temporary S3 server at an address of this machine."""
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    put, one_at_a_time = S3Response.put_object, threading.Lock()

    def put_atomically(response: S3Response) -> Any:
        with one_at_a_time:
            return put(response)

    with mock.patch.object(S3Response, "put_object", put_atomically):
        server.start()
        try:
            host, port = server.get_host_and_port()
            url = f"http://{host}:{port}"
            environ = {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            yield EmulatorEndpoint(url, environ, "s3", url)
        finally:
            server.stop()


@contextmanager
def gcs() -> Iterator[EmulatorEndpoint]:
    """Runs a temporary server with the protocol of Google Cloud Storage."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    server = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{server._api._httpd.server_port}"
        yield EmulatorEndpoint(url, {"STORAGE_EMULATOR_HOST": url}, "gs", f"{url}/storage/v1/b")
    finally:
        server.stop()
