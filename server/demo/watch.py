"""Shows the events of the demo live: with a table in a terminal, as plain lines elsewhere."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mizzen_client import Client
from mizzen_client.views import Event

_SHOWN = {
    "workload.pending": "queued",
    "workload.placing": "placed",
    "workload.migrating": "checkpoint is being copied",
    "workload.running": "running",
    "workload.checkpointing": "saving and stopping",
    "workload.preempted": "preempted and queued again",
    "workload.succeeded": "SUCCEEDED",
    "workload.failed": "FAILED",
    "workload.cancelled": "cancelled",
    "replica.copying": "replica on demand: copying",
    "replica.ready": "replica ready",
    "machine.lost": "MACHINE LOST",
    "machine.cordoned": "machine cordoned",
}
_COLOURS = {
    "running": "green",
    "succeeded": "bold green",
    "failed": "bold red",
    "preempted": "yellow",
    "pending": "dim",
}


class EventPrinter:
    """Reads the event log continuously and prints it."""

    def __init__(self, client: Client, console: Console, *, live: bool) -> None:
        self._client = client
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if live else None
        self._last: str | None = None
        """Id of the last event that was read."""
        self._reading = asyncio.Lock()
        self._names: dict[str, str] = {}
        self._started = time.monotonic()

    def say(self, text: str, style: str = "bold") -> None:
        """Prints one line with the time."""
        stamp = f"{time.monotonic() - self._started:6.1f}s"
        self._console.print(Text(f"{stamp}  ", style="dim") + Text(text, style=style), soft_wrap=True)

    async def run(self) -> None:
        """Shows events until cancelled."""
        if self._live is not None:
            self._live.start()
        try:
            while True:
                await self.catch_up()
                if self._live is not None:
                    self._live.update(await asyncio.to_thread(self._table))
                await asyncio.sleep(0.25)
        finally:
            if self._live is not None:
                self._live.stop()

    async def catch_up(self) -> None:
        """Prints the events that have not been printed yet."""
        async with self._reading:
            for event in await asyncio.to_thread(self._read):
                what = _SHOWN.get(event["kind"])
                if what is not None:
                    self.say(self._line(what, event), "red" if event["kind"] == "machine.lost" else "")

    def _read(self) -> list[Event]:
        try:
            found = list(self._client.events(after=self._last))
            if found:
                self._names.update({row["id"]: row["name"] for row in self._client.workloads()})
                self._last = found[-1]["id"]
            return found
        except Exception:
            return []  # The API is restarting; the same events are read again.

    def _line(self, what: str, event: Event) -> str:
        who = self._names.get(event["workload"] or "", event["machine"] or event["detail"].get("table", ""))
        again = f" (attempt {event['attempt']})" if (event["attempt"] or 0) > 1 else ""
        where = f" in {event['region']}" if event["region"] and not event["machine"] else ""
        why = ""
        reason = event["reason"]
        if (
            reason
            and reason["code"] not in ("starting_tasks", "running", "completed", "scan_pending")
            and not (reason["code"] == "awarded" and not reason["detail"].get("victims"))
        ):
            why = ": " + reason["sentence"]
            for workload_id, name in self._names.items():
                why = why.replace(workload_id, name)
        if event["kind"] == "workload.preempted" and event["detail"].get("checkpoint_step") is not None:
            why += f"; saved at step {event['detail']['checkpoint_step']}"
        return f"{who:<12} {what}{where}{again}{why}"

    def _table(self) -> Table:
        table = Table(expand=False, box=None, padding=(0, 2, 0, 0), title_justify="left")
        for column in ("workload", "tenant", "phase", "region", "attempt", "step", "why"):
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        try:
            rows = list(self._client.workloads(labels={"demo": "main-job"}))
            queued = {item["id"]: item["reasons"] for item in self._client.queue()["items"]}
        except Exception:
            return table  # The API is restarting.
        for row in sorted(rows, key=lambda r: r["id"]):
            progress: Mapping[str, Any] = row.get("progress") or {}
            of_row: Mapping[str, Any] = row.get("reason") or {}
            reasons: list[Mapping[str, Any]] = [*queued.get(row["id"], ()), of_row]
            waits = row["phase"] in ("pending", "preempted", "placing")
            table.add_row(
                row["name"],
                row["tenant"],
                Text(row["phase"], style=_COLOURS.get(row["phase"], "")),
                row.get("region") or "",
                str(row["attempt"] or ""),
                str(progress.get("step") or ""),
                str(reasons[0].get("code", "")) if waits else "",
            )
        return table
