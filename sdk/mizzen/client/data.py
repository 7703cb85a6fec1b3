"""The client's part about data: tables with partitions and replicas, where they may be, and who reads them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from mizzen.client import data_views as views
from mizzen.client.calls import Calls
from mizzen.client.views import Region


class Data(Calls):
    """Tables, settings of regions, usage, and the instance of the placement of data."""

    def tables(self, namespace: str | None = None) -> list[views.Table]:
        """The tables with their replicas; of one namespace."""
        return list(self._pages("tables", {"namespace": namespace}, None))

    def table(self, name: str) -> views.Table:
        """One table with its replicas."""
        return cast(views.Table, self._call("GET", "tables", name))

    def add_table(self, name: str, home_region: str) -> views.Table:
        """Register the objects under `tables/<name>/` in the region's bucket as a table."""
        return cast(views.Table, self._call("POST", "tables", body={"name": name, "home_region": home_region}))

    def remove_table(self, name: str) -> None:
        """Forget a table."""
        self._call("DELETE", "tables", name)

    def partitions(self, table: str) -> Iterator[views.Partition]:
        """A table's partitions by name."""
        return self._pages(f"tables/{table}/partitions", {}, None)

    def append_partitions(self, table: str, partitions: Sequence[Mapping[str, Any]]) -> list[views.Partition]:
        """Append partitions (`name`, `size_bytes`, `checksum`), whose objects are in the home's bucket, all or none.

        What is there already with the same content stays, so it may be done again; with other content it is a conflict.
        """
        body = {"partitions": list(partitions)}
        answer = self._call("POST", "tables", table, "partitions", body=body, idempotent=True)
        return cast(list[views.Partition], answer["items"])

    def replicate_table(self, name: str, region: str) -> views.Replica:
        """Start a copy of a table to a region, or of what a stale replica there lacks (operators)."""
        answer = self._call("POST", "tables", name, "replicas", body={"region": region}, idempotent=True)
        return cast(views.Replica, answer)

    def drop_replica(self, name: str, region: str, grace_s: float | None = None) -> views.Replica:
        """Let a table's replica go when the grace is over (operators)."""
        answer = self._call("DELETE", "tables", name, "replicas", region, params={"grace_s": grace_s})
        return cast(views.Replica, answer)

    def verify_table(self, name: str, region: str | None = None) -> views.Verification:
        """Have a table's copies, or the one in a region, read in full and compared with their checksums (operators)."""
        answer = self._call("POST", "tables", name, "verify", body={"region": region}, idempotent=True)
        return cast(views.Verification, answer)

    def set_region(self, name: str, **settings: Any) -> Region:
        """Set `storage_bytes` or `cpu_hours` (app to hours a day) of a region; what is left out stays (operators)."""
        return cast(Region, self._call("PATCH", "regions", name, body=settings))

    def record_usage(self, runs: Sequence[Mapping[str, Any]]) -> views.Recorded:
        """Record runs of jobs, all or none; those whose source and id are known stay as they are (operators)."""
        return cast(views.Recorded, self._call("POST", "usage", body={"runs": list(runs)}, idempotent=True))

    def instance(self, window_days: float | None = None, region: str | None = None) -> Mapping[str, Any]:
        """Regions, tables and recurring jobs as an instance document: what `mizzen tetris solve` takes (operators).

        Of a `region`: its datacenters, and its partitions with the jobs that run there.
        """
        params = {"window_days": window_days, "region": region}
        return cast(Mapping[str, Any], self._call("GET", "tetris", "instance", params=params))

    def reads(self, window_days: float | None = None) -> Mapping[str, Any]:
        """Which partitions the instance's jobs read, where they do not read whole tables (operators)."""
        return cast(Mapping[str, Any], self._call("GET", "tetris", "reads", params={"window_days": window_days}))

    def assign_datacenters(self, homes: Mapping[str, str]) -> views.Assigned:
        """Write which datacenters partitions are in, `table/partition` to `region/datacenter`, all or none (operators).

        A partition that is not in that region, or a datacenter that it does not have, is an error.
        """
        body = {"version": 1, "homes": dict(homes)}
        return cast(views.Assigned, self._call("PUT", "tetris", "datacenters", body=body))

    def nights(self, limit: int = 30) -> Mapping[str, Any]:
        """The newest nights of the placement of tables as `items`, and `paused` (None: moves are not)."""
        return cast(Mapping[str, Any], self._call("GET", "tetris", "nights", params={"limit": limit}))

    def night(self, night: str) -> views.Night:
        """A night with what it decided."""
        return cast(views.Night, self._call("GET", "tetris", "nights", night))

    def begin_night(self, *, dry_run: bool = False) -> views.Night:
        """Plan the placement of tables now, and move them unless it is a dry run (operators)."""
        return cast(views.Night, self._call("POST", "tetris", "nights", body={"dry_run": dry_run}))

    def moves(self, night: str, state: str | None = None, limit: int | None = None) -> Iterator[views.Move]:
        """A night's moves in the order in which they begin; those in a state."""
        return self._pages(f"tetris/nights/{night}/moves", {"state": state}, limit)

    def pause_moves(self, note: str = "") -> Mapping[str, Any]:
        """Pause nightly moves (operators)."""
        return cast(Mapping[str, Any], self._call("PUT", "tetris", "pause", body={"note": note}))

    def resume_moves(self) -> None:
        """Let nightly moves go on (operators)."""
        self._call("DELETE", "tetris", "pause")
