"""Runs the balancers of several services in one process."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Mapping

from infra.metrics import serve_metrics
from infra.process_exit import stop_signals
from proxies.balance.api_client import Api
from proxies.balance.metrics import BalancerMetrics
from proxies.balance.service import BalancerSettings, ServiceBalancer

_LAST_REPORT_S = 5.0
_log = logging.getLogger(__name__)


async def supervise(
    listeners: Mapping[str, socket.socket], settings: BalancerSettings, api: Api, metrics: tuple[str, int] | None = None
) -> None:
    """Balances services until SIGTERM, SIGINT or SIGHUP, then drains.

    Args:
        listeners: the listening socket of each service.
        settings: the settings that the services share.
        api: the API that lists the replicas.
        metrics: host and port for the metrics; None: no metrics are served.
    """
    # A new name for each start: counts of the same second from before and after a restart must not replace each other.
    balancer = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    balancers = {name: ServiceBalancer(name, listener, settings, api, balancer) for name, listener in listeners.items()}
    if metrics is not None:
        serve_metrics(*metrics, BalancerMetrics(balancers.values()))

    def fetch_all() -> None:
        for one in balancers.values():
            one.fetch_soon()

    def fetch(name: str) -> None:
        if name in balancers:
            balancers[name].fetch_soon()

    def stop() -> None:
        for one in balancers.values():
            one.stop()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop)
    following = asyncio.create_task(api.follow(fetch_all, fetch))
    try:
        async with asyncio.TaskGroup() as group:
            for one in balancers.values():
                group.create_task(one.run())
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    try:
        async with asyncio.timeout(_LAST_REPORT_S):
            await asyncio.gather(*(one.last_report() for one in balancers.values()))
    except TimeoutError:
        _log.warning("the last counts of requests were not sent: the API does not answer")
