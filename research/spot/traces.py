"""Traces of spot capacity: one file for each zone, read from a folder."""

import re
from dataclasses import dataclass
from pathlib import Path

from domain.availability import parse_counts
from services.spot.values import Zone

UNLIMITED = 1 << 30
"""The capacity of a zone whose trace only records whether a machine is available."""
_ZONE = re.compile(r"^(?P<region>.+?)-?[a-z]$")


class SpotTraceError(ValueError):
    """A folder of traces cannot be used; the message names the file, and what would be right."""


@dataclass(frozen=True)
class SpotTrace:
    """How many spot replicas each zone can have, in intervals of equal length (ticks)."""

    zones: tuple[Zone, ...]
    gap_s: float
    """The length of a tick in seconds."""
    capacity: tuple[tuple[int, ...], ...]
    """For each zone, the largest number of replicas in each tick. All zones have the same number of ticks."""
    unlimited: bool = False
    """Whether the trace only records if a machine is available."""
    cut: int = 0
    """The number of ticks that the longest file has more than the shortest; these ticks are not used."""

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return len(self.capacity[0])


def region_of(zone: str) -> str:
    """Returns the region of a zone by the names of AWS and Google: `us-east-1f` and `us-west1-a` lose their letters."""
    found = _ZONE.match(zone)
    return found["region"] if found else zone


def read_traces(folder: Path, *, unlimited: bool | None = None) -> SpotTrace:
    """Reads all files ZONE_*.json of a folder; zones are sorted by name, and cut to the length of the shortest file.

    Args:
        folder: the folder. Each file has the form that `domain.availability.parse_counts` reads.
        unlimited: whether a count of 1 or more means that any number of replicas is available. None: this is so if no
            count of the folder is above 1, because such a trace was collected with a single machine in each zone.

    Raises:
        TraceError: the folder or a file cannot be read, a file is not valid, two files are of one zone, or the ticks of
            two files differ in length.
    """
    if not folder.is_dir():
        raise SpotTraceError(
            f"{folder}: is not a folder: give a folder with one trace file, ZONE_*.json, for each zone"
        )
    found: dict[str, tuple[Path, float, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.json")):
        zone = path.stem.split("_")[0]
        if zone in found:
            raise SpotTraceError(f"{path}: zone {zone} also has the file {found[zone][0].name}: keep one of them")
        try:
            found[zone] = (path, *parse_counts(path.read_bytes()))
        except OSError as error:
            raise SpotTraceError(f"{path}: {error.strerror}: give a folder with readable files") from None
        except ValueError as error:
            raise SpotTraceError(f"{path}: {error}") from None
    if not found:
        raise SpotTraceError(f"{folder}: contains no trace: give a folder with one file, ZONE_*.json, for each zone")
    files = list(found.values())
    first, gap_s, _ = files[0]
    for path, other_s, _ in files:
        if other_s != gap_s:
            raise SpotTraceError(
                f"{path}: gap_seconds: {other_s:g}: {first.name} has {gap_s:g}: all files need the same ticks"
            )
    lengths = [len(counts) for _, _, counts in files]
    if unlimited is None:
        unlimited = max(max(counts) for _, _, counts in files) == 1
    capacity = tuple(
        tuple((UNLIMITED if count else 0) if unlimited else count for count in counts[: min(lengths)])
        for _, _, counts in files
    )
    zones = tuple(Zone(name, region_of(name)) for name in found)
    return SpotTrace(zones, gap_s, capacity, unlimited, max(lengths) - min(lengths))
