"""Serves the metrics of a process for Prometheus."""

from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from infra.errors import StackError


def serve_metrics(host: str, port: int, *collectors: Collector) -> tuple[WSGIServer, Thread]:
    """Serves `/metrics` in a thread until the process ends, or until the returned server is shut down.

    Raises:
        StackError: the address cannot be used.
    """
    registry = CollectorRegistry(auto_describe=False)
    for one in collectors:
        registry.register(one)
    try:
        return start_http_server(port, host, registry)
    except OSError as error:
        raise StackError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from None
