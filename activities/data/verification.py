"""Verifies that a region's copy of a partition matches the catalogue. All checks of tables use this module.

Names and sizes are compared by listing. Content is read in full and compared with the manifest's checksums. Results are
recorded (`infra.db.integrity`). An interrupted check continues after the last object that was right.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Generic, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from activities.data.partitions import Bucket, WrongPartition
from infra.copies import manifest, open_copy_store
from infra.copies.bandwidth import BandwidthShare
from infra.copies.manifest import FolderManifest
from infra.db import integrity
from infra.db.models import Region
from infra.db.session import transaction
from infra.db.tables import Partition, ReplicaPartition
from mizzen.objects import checksums
from mizzen.objects.store import MissingObject

T = TypeVar("T")
_AT_ONCE = 1000
_SAVE_S = 15.0
"""The interval at which the progress of a check is saved."""


class OutOfTime(Exception):
    """The time for the check is over. It must continue later; its progress is saved."""


@dataclass(frozen=True)
class Reading:
    """How a check reads: its share of the bandwidth, its deadline, and a callback for each batch."""

    share: BandwidthShare | None = None
    until_s: float | None = None
    """The deadline on the monotonic clock; None: there is no deadline."""
    beat: Callable[[], None] = lambda: None

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.until_s is not None and time.monotonic() > self.until_s

    def check(self) -> None:
        """Sends a heartbeat and checks the deadline.

        Raises:
            OutOfTime: the deadline has passed.
        """
        self.beat()
        if self.is_over:
            raise OutOfTime


class Verifier:
    """Checks copies of partitions and makes their manifests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def bucket(self, region: str) -> Bucket:
        """Returns a region's bucket."""
        with transaction(self._engine) as session:
            return bucket_of(session, region)

    def manifest(self, partition: Partition, reference: str, reading: Reading) -> FolderManifest:
        """Returns the partition's complete manifest. Missing checksums are computed from the copy in `reference`.

        Raises:
            WrongPartition: the objects in `reference` differ from the catalogue. The difference is recorded.
            OutOfTime: see `Reading`.
        """
        with transaction(self._engine) as session:
            known = integrity.manifest_body(session, partition.data_table, partition.name)
        if known is not None and known[1]:
            return manifest.unpack(known[0])
        try:
            return self._made(partition, None if known is None else manifest.unpack(known[0]), reference, reading)
        except WrongPartition as error:
            self._wrong((partition.data_table, partition.name, reference), str(error))
            raise

    def _made(
        self, partition: Partition, known: FolderManifest | None, reference: str, reading: Reading
    ) -> FolderManifest:
        bucket, location = self.bucket(reference), partition.location
        what = f"table {partition.data_table}, partition {partition.name}"
        found = manifest.listed(bucket.store, location) if known is None else known
        if known is None and manifest.size_bytes(found) != partition.size_bytes:
            raise WrongPartition(
                f"{what}: {manifest.size_bytes(found)} bytes in {reference}, should be {partition.size_bytes}"
            )
        if known is not None and (wrong := manifest.listing_difference(bucket.store, location, known)) is not None:
            raise WrongPartition(f"{what}: in {reference}: {wrong}")
        algorithm = "sha256" if partition.checksum is not None else checksums.fastest()
        pace = _Pace[FolderManifest](partial(self._save, partition, complete=False), reading)
        try:
            found = manifest.checksummed(
                bucket.store, location, found, algorithm, share=reading.share, at_batch=pace.take
            )  # fmt: skip
        except MissingObject as error:
            raise WrongPartition(f"{what}: in {reference}: {error}") from error
        if partition.checksum is not None and (declared := manifest.declared_checksum(found)) != partition.checksum:
            raise WrongPartition(f"{what}: checksum {declared} in {reference}, should be {partition.checksum}")
        self._save(partition, found, complete=True)
        return found

    def _save(self, partition: Partition, found: FolderManifest, *, complete: bool) -> None:
        key = partition.data_table, partition.name
        with transaction(self._engine) as session:
            integrity.save_manifest(session, *key, manifest.pack(found), len(found), complete=complete)

    def check(self, partition: Partition, region: str, reading: Reading) -> str | None:
        """Checks a region's copy of a partition and records the result; returns what is wrong, or None.

        If the partition has no complete manifest, it is first made from the copy at the table's home.

        Raises:
            OutOfTime: see `Reading`. The next check continues from there.
            Exception: an error of a store. The result is unknown and nothing is recorded.
        """
        key = partition.data_table, partition.name, region
        with transaction(self._engine) as session:
            home = integrity.home_of(session, partition.data_table)
            held = session.get(ReplicaPartition, key)
            begun = None if held is None or held.checked_to is None else (held.check_began_at, held.checked_to)
            began_at: datetime = integrity.clock(session)
        if home is None or held is None:
            return None
        after = ""
        if begun is not None and begun[0] is not None:
            began_at, after = begun[0], begun[1]
        try:
            expected = self.manifest(partition, home, reading)
        except WrongPartition as error:
            return str(error)
        bucket = self.bucket(region)
        wrong = manifest.listing_difference(bucket.store, partition.location, expected)
        if wrong is None:
            pace = _Pace[str](partial(self._note, key, began_at), reading)
            wrong = manifest.content_difference(
                bucket.store, partition.location, expected, after=after, share=reading.share, at_batch=pace.take
            )
        if wrong is not None:
            return self._wrong(key, f"in {region} {wrong}")
        with transaction(self._engine) as session:
            integrity.found_right(session, *key, began_at)
        return None

    def check_listings(self, table: str, region: str, of: str, reading: Reading) -> None:
        """Compares names and sizes of a region's objects, for all partitions that the region `of` has.

        Stops at the first wrong partition and records it.

        Raises:
            OutOfTime: see `Reading`.
        """
        after = ""
        while True:
            with transaction(self._engine) as session:
                todo = integrity.held_partitions(session, table, of, after=after, limit=_AT_ONCE)
            if not todo:
                return
            bucket = self.bucket(region)
            for partition in todo:
                reading.check()
                with transaction(self._engine) as session:
                    known = integrity.manifest_body(session, table, partition.name)
                if known is None:
                    continue
                wrong = manifest.listing_difference(bucket.store, partition.location, manifest.unpack(known[0]))
                if wrong is not None:
                    self._wrong((table, partition.name, region), f"in {region} {wrong}")
                    return
            after = todo[-1].name

    def _wrong(self, key: tuple[str, str, str], what: str) -> str:
        with transaction(self._engine) as session:
            integrity.found_wrong(session, *key, what)
        return what

    def _note(self, key: tuple[str, str, str], began_at: datetime, path: str) -> None:
        with transaction(self._engine) as session:
            integrity.note_check(session, *key, began_at, path)


def bucket_of(session: Session, region: str) -> Bucket:
    """Returns a region's bucket."""
    return Bucket(region, open_copy_store(session.get_one(Region, region).bucket_url))


class _Pace(Generic[T]):
    """Saves the progress of a check or of a manifest at intervals, and ends it at its deadline."""

    def __init__(self, save: Callable[[T], None], reading: Reading) -> None:
        self._save, self._reading = save, reading
        self._saved_at_s = time.monotonic()

    def take(self, so_far: T) -> None:
        now_s = time.monotonic()
        try:
            self._reading.check()
        except BaseException:
            self._save(so_far)
            raise
        if now_s - self._saved_at_s > _SAVE_S:
            self._save(so_far)
            self._saved_at_s = now_s
