"""Checks the options of `mizzen balance` and runs it."""

import ipaddress
import os
import resource
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from infra.addresses import parse_address
from infra.errors import ConfigurationError
from mizzen_client.contexts import active_context
from mizzen_client.errors import NotConfigured
from mizzen_client.transport import tls_context
from proxies.balance.api_client import Api
from proxies.balance.configuration import ProxyLimits
from proxies.balance.process import find_haproxy
from proxies.balance.service import BalancerSettings
from proxies.balance.sockets import listen, passed_sockets
from proxies.balance.supervisor import supervise
from proxies.balance.values import NAME, RegionZone

_USUAL_CONNECTIONS = 10_000
_OTHER_FILES = 1000
"""Open files in addition to those of requests: checks of replicas, the log, sockets."""


async def run_balance(options: Mapping[str, Any]) -> None:
    """Runs the balancer with the options of the command until it is stopped.

    Raises:
        ConfigurationError: an option is invalid.
        StackError: an address is in use.
    """
    offers = _offers(options["services"])
    clients = _zone(options["zone"])
    metrics = parse_address(options["metrics"]) if options["metrics"] else None
    settings = BalancerSettings(
        program=find_haproxy(options["haproxy"]),
        data=options["data"],
        limits=ProxyLimits(
            connections=_connections(options["connections"]),
            concurrency=options["concurrency"],
            overload=options["overload"],
            threads=options["threads"],
            stop_s=options["stop_s"],
        ),
        certificate=options["cert"],
        keys=options["keys"],
        clients=clients,
        trusted_proxies=_networks(options["trusted_proxies"]),
    )
    try:
        context = active_context(options["context"])
        if context.login is not None and context.key is None:
            raise NotConfigured("`mizzen balance` needs an API key of the role balancer, not a login")
        tls = tls_context(urlsplit(context.api).scheme, context.ca)
    except NotConfigured as error:
        raise ConfigurationError(str(error)) from None
    passed = passed_sockets(os.environ)
    unknown = sorted(set(passed) - set(offers))
    if unknown:
        raise ConfigurationError(f"LISTEN_FDNAMES: {', '.join(unknown)}: not among the services of --service")
    listeners = {name: passed.get(name) or listen(*address) for name, address in offers.items()}
    api = Api(context.api, context.key, tls)
    try:
        await supervise(listeners, settings, api, metrics)
    finally:
        await api.close()


def _offers(texts: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    offers: dict[str, tuple[str, int]] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        if not equals or not NAME.fullmatch(name):
            raise ConfigurationError(
                f"--service: {text!r}: must be NAME=HOST:PORT, where NAME has lower-case letters, digits and hyphens"
            )
        if name in offers:
            raise ConfigurationError(f"--service: {name!r} is given twice")
        offers[name] = parse_address(address)
    return offers


def _connections(given: int | None) -> int:
    """Returns the most connections of clients. Raises the limit on open files, because each request needs two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = (hard - _OTHER_FILES) // 2 if hard != resource.RLIM_INFINITY else _USUAL_CONNECTIONS
    if given is not None and given > most:
        raise ConfigurationError(
            f"--connections: {given}: the limit on open files ({hard}, `ulimit -Hn`) allows at most {most}"
        )
    return given or min(most, _USUAL_CONNECTIONS)


def _networks(text: str | None) -> tuple[str, ...]:
    found = []
    for one in (text or "").split(",") if text else ():
        try:
            found.append(str(ipaddress.ip_network(one.strip())))
        except ValueError as error:
            raise ConfigurationError(
                f"--trusted-proxies: {one.strip()!r}: must be an IP address or a network, such as 10.0.0.0/8: {error}"
            ) from None
    return tuple(found)


def _zone(text: str | None) -> RegionZone | None:
    if text is None:
        return None
    region, slash, zone = text.partition("/")
    if not (region and slash and zone) or "/" in zone:
        raise ConfigurationError(f"--zone: {text!r}: must be REGION/ZONE, such as us-east-1/us-east-1a")
    return RegionZone(region, zone)
