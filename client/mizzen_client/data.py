"""The client's part about data: tables, partitions, replicas, storage limits, usage records and nightly moves."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from mizzen_client import views
from mizzen_client.calls import Calls


class Data(Calls):
    """The methods about tables, settings of regions, usage records and the nightly placement of tables."""

    def tables(self, namespace: str | None = None) -> list[views.Table]:
        """Return the tables of all namespaces, or of `namespace`, with their replicas."""
        return list(self._pages("tables", {"namespace": namespace}, None))

    def table(self, name: str) -> views.Table:
        """Return a table with its replicas."""
        return cast(views.Table, self._call("GET", "tables", name))

    def add_table(self, name: str, home_region: str) -> views.Table:
        """Register the objects under `tables/<name>/` in the region's bucket as a table."""
        return cast(views.Table, self._call("POST", "tables", body={"name": name, "home_region": home_region}))

    def remove_table(self, name: str) -> None:
        """Remove a table from the catalogue."""
        self._call("DELETE", "tables", name)

    def partitions(self, table: str) -> Iterator[views.Partition]:
        """Yield the partitions of a table, sorted by name."""
        return self._pages(f"tables/{table}/partitions", {}, None)

    def append_partitions(self, table: str, partitions: Sequence[Mapping[str, Any]]) -> list[views.Partition]:
        """Append partitions (`name`, `size_bytes`, `checksum`) whose objects are in the home region's bucket.

        Either all partitions are appended or none. The call is idempotent: an identical partition that already exists
        is not changed. If one exists with other content, `Conflict` is raised.
        """
        body = {"partitions": list(partitions)}
        answer = self._call("POST", "tables", table, "partitions", body=body, idempotent=True)
        return cast(list[views.Partition], answer["items"])

    def replicate_table(self, name: str, region: str) -> views.Replica:
        """Start copying a table to a region, or the partitions that a stale replica there lacks (operators)."""
        answer = self._call("POST", "tables", name, "replicas", body={"region": region}, idempotent=True)
        return cast(views.Replica, answer)

    def drop_replica(self, name: str, region: str, grace_s: float | None = None) -> views.Replica:
        """Drop a table's replica in a region. It is deleted after a grace period of `grace_s` (operators)."""
        answer = self._call("DELETE", "tables", name, "replicas", region, params={"grace_s": grace_s})
        return cast(views.Replica, answer)

    def verify_table(self, name: str, region: str | None = None) -> views.Verification:
        """Start a verification: all replicas of a table, or the one in `region`, are read in full (operators)."""
        answer = self._call("POST", "tables", name, "verify", body={"region": region}, idempotent=True)
        return cast(views.Verification, answer)

    def set_region(self, name: str, **settings: Any) -> views.Region:
        """Set `storage_bytes` or `cpu_hours` (hours a day by app) of a region. Others are not changed (operators)."""
        return cast(views.Region, self._call("PATCH", "regions", name, body=settings))

    def record_usage(self, runs: Sequence[Mapping[str, Any]]) -> views.Recorded:
        """Record runs of jobs, all or none. Runs with a known source and id are not changed (operators)."""
        return cast(views.Recorded, self._call("POST", "usage", body={"runs": list(runs)}, idempotent=True))

    def instance(self, window_days: float | None = None, region: str | None = None) -> Mapping[str, Any]:
        """Return regions, tables and recurring jobs as an instance document for `mizzen tetris solve` (operators).

        With `region`, the document holds the datacenters of that region, its partitions, and the jobs that run there.
        """
        params = {"window_days": window_days, "region": region}
        return cast(Mapping[str, Any], self._call("GET", "tetris", "instance", params=params))

    def reads(self, window_days: float | None = None) -> Mapping[str, Any]:
        """Return the partitions that the instance's jobs read from tables that they do not read whole (operators)."""
        return cast(Mapping[str, Any], self._call("GET", "tetris", "reads", params={"window_days": window_days}))

    def assign_datacenters(self, homes: Mapping[str, str]) -> views.Assigned:
        """Assign partitions to datacenters, all or none (operators).

        `homes` maps `table/partition` to `region/datacenter`. It is an error if a partition is not in the region, or if
        the region has no such datacenter.
        """
        body = {"version": 1, "homes": dict(homes)}
        return cast(views.Assigned, self._call("PUT", "tetris", "datacenters", body=body))

    def placement_runs(self, limit: int = 30) -> views.PlacementRunList:
        """Return the newest placement runs as `items`, and `paused` (None: moves are not paused)."""
        return cast(views.PlacementRunList, self._call("GET", "tetris", "placement-runs", params={"limit": limit}))

    def placement_run(self, placement_run: str) -> views.PlacementRunReport:
        """Return a placement run with its report."""
        return cast(views.PlacementRunReport, self._call("GET", "tetris", "placement-runs", placement_run))

    def begin_placement_run(self, *, dry_run: bool = False) -> views.PlacementRun:
        """Plan the placement of tables now and, unless `dry_run` is set, start the moves (operators)."""
        return cast(views.PlacementRun, self._call("POST", "tetris", "placement-runs", body={"dry_run": dry_run}))

    def moves(self, placement_run: str, state: str | None = None, limit: int | None = None) -> Iterator[views.Move]:
        """Yield a placement run's moves, or those in `state`, in the order in which they begin."""
        return self._pages(f"tetris/placement-runs/{placement_run}/moves", {"state": state}, limit)

    def pause_moves(self, note: str = "") -> views.Pause:
        """Pause nightly moves (operators)."""
        return cast(views.Pause, self._call("PUT", "tetris", "pause", body={"note": note}))

    def resume_moves(self) -> None:
        """Resume nightly moves (operators)."""
        self._call("DELETE", "tetris", "pause")
