"""EC2 on loopback: moto's server, and a proxy that adds behaviour of EC2 that moto lacks.

With moto 5.2, a repeated client token launches another instance, every instance type is accepted, capacity is
unlimited, and the spot price history has one price of 2006. The proxy stores tokens, accepts only known types, limits
the capacity of each zone, and injects errors, delays and lost responses for tests.
"""

import contextlib
import http.client
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl

import boto3
from moto.server import ThreadedMotoServer

TYPES = ("c5.large", "p4d.24xlarge")
ZONES = ("us-east-1a", "us-east-1b")
ENVIRON = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
_LIVE = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]


class Ec2:
    """moto's server and the proxy in front of it."""

    def __init__(self, moto_port: int) -> None:
        self.capacity = 3
        """Number of instances in each zone."""
        self.keeps_tokens = True
        self.faults: list[tuple[str, str]] = []
        """(action, fault) for the next call of the action, in order.

        A fault is an error code, `lost`, `down` or a delay in seconds.
        """
        self.asked: list[str] = []
        """Actions of the received requests, in order."""
        self._moto_port = moto_port
        self._tokens: dict[str, tuple[int, bytes]] = {}
        self._lock = threading.Lock()
        ec2 = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                answer = ec2.answer(dict(parse_qsl(body.decode())), body, dict(self.headers))
                if answer is None:
                    self.close_connection = True
                    return
                status, text = answer
                self.send_response(status)
                self.send_header("content-type", "text/xml")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.client: Any = boto3.client("ec2", endpoint_url=f"http://127.0.0.1:{moto_port}", region_name="us-east-1")
        """A client of moto that bypasses the proxy."""

    def live(self, zone: str | None = None) -> list[dict[str, Any]]:
        """Returns the instances that moto runs, of all installations."""
        pages = self.client.describe_instances(Filters=_LIVE)["Reservations"]
        found = [one for reservation in pages for one in reservation["Instances"]]
        return [one for one in found if zone in (None, one["Placement"]["AvailabilityZone"])]

    def answer(self, form: Mapping[str, str], body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes] | None:
        """Returns status and body of the response; None: the connection is closed without a response."""
        action = form["Action"]
        with self._lock:
            self.asked.append(action)
            fault = next((what for named, what in self.faults if named == action), "")
            if fault:
                self.faults.remove((action, fault))
        if fault == "down":
            return None
        if fault[:1].isdigit():
            time.sleep(float(fault))
        elif fault and fault != "lost":
            return _error(fault, f"injected for {action}")
        if action == "RunInstances":
            with self._lock:
                answer = self._run(form, body, headers)
        else:
            answer = self._pass_on(body, headers)
        return None if fault == "lost" else answer

    def _run(self, form: Mapping[str, str], body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        token, zone = form["ClientToken"], form["Placement.AvailabilityZone"]
        if self.keeps_tokens and token in self._tokens:
            return self._tokens[token]
        if form["InstanceType"] not in TYPES:
            return _error("InvalidParameterValue", f"Invalid value '{form['InstanceType']}' for InstanceType.")
        if len(self.live(zone)) >= self.capacity:
            return _error("InsufficientInstanceCapacity", f"We currently do not have capacity in {zone}.")
        answer = self._pass_on(body, headers)
        if answer[0] == 200:
            self._tokens[token] = answer
        return answer

    def _pass_on(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._moto_port, timeout=60)
        try:
            connection.request("POST", "/", body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def _error(code: str, words: str, status: int = 400) -> tuple[int, bytes]:
    throttled = code in ("RequestLimitExceeded", "Unavailable", "InternalError")
    status = 500 if code == "InsufficientInstanceCapacity" else status
    body = f"<Response><Errors><Error><Code>{code}</Code><Message>{words}</Message></Error></Errors></Response>"
    return (503 if throttled else status), body.encode()


@contextlib.contextmanager
def ec2() -> Iterator[Ec2]:
    """Yields a region without instances; its credentials are in the environment while the context is open."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with mock.patch.dict(os.environ, ENVIRON):
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        try:
            region = Ec2(moto.get_host_and_port()[1])
            for one in region.live():  # moto keeps its state in this process, possibly from an earlier server.
                region.client.terminate_instances(InstanceIds=[one["InstanceId"]])
            thread = threading.Thread(target=region.server.serve_forever, daemon=True)
            thread.start()
            try:
                yield region
            finally:
                region.server.shutdown()
                region.server.server_close()
                thread.join()
        finally:
            moto.stop()
