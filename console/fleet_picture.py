"""The map of a region: a picture with a cell for each slot, an indexed PNG. Each machine is a block of cells.

A picture is made for one audience: all tenants, or one tenant, whose keys see the slots of other tenants in one colour.
"""

import hashlib
import io
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from api.fleet.slots import RegionMasks
from domain.capacity import CapacityKind
from domain.version import VERSION

_WIDTH = 1000
"""About the width of a picture in pixels."""
_LARGEST_CELL, _SMALLEST_CELL = 14, 3
_LINED_CELL = 6
"""Smallest cell width at which lines separate the cells."""
_AGE_S = 5.0
"""Shortest time between two versions of a picture."""
_MAPS = 64


class SlotUse(IntEnum):
    """The use of a slot; the value is the index of its colour."""

    NOTHING = 0
    """No slot: the gap between machines."""
    FREE = 1
    HELD = 2
    OWN = 3
    PROMISED = 4
    WITHHELD = 5
    CLOSED = 6
    LOST = 7


COLOURS: dict[SlotUse, str] = {
    SlotUse.NOTHING: "000000", SlotUse.FREE: "9fb3c8", SlotUse.HELD: "2f6f9f", SlotUse.OWN: "2e9e5b",
    SlotUse.PROMISED: "efcf1f", SlotUse.WITHHELD: "d6c69c", SlotUse.CLOSED: "70757c", SlotUse.LOST: "c8372d",
}  # fmt: skip
LABELS = {
    SlotUse.FREE: "free", SlotUse.HELD: "held", SlotUse.PROMISED: "promised", SlotUse.WITHHELD: "with its owner",
    SlotUse.CLOSED: "free, cordoned", SlotUse.LOST: "machine does not answer",
}  # fmt: skip
"""What the colours of a map by state mean."""
TENANT_COLOURS = (
    "2e9e5b", "4aa3df", "c77f1a", "9a5bc0", "c2497b", "2aa3a3", "8c8a1f", "d2603a", "5567c9", "7d5a3c", "5aa832",
    "b0409a",
)  # fmt: skip
"""Colours of tenants, by their order; beyond the last they repeat."""
PRICE_COLOURS = ("7a5bd0", "5b74d6", "3d8fc4", "28a09a", "44b76b", "97c33a", "dcb91c")
"""Colours of prices, from the lowest on. Each can be seen on a light and on a dark page."""
_FIRST_TENANT = len(SlotUse)
_FIRST_PRICE = _FIRST_TENANT + len(TENANT_COLOURS)
_PALETTE = bytes.fromhex("".join([*(COLOURS[use] for use in SlotUse), *TENANT_COLOURS, *PRICE_COLOURS]))


@dataclass(frozen=True)
class Grid:
    """Where the machines of a region are in its picture."""

    row: npt.NDArray[np.int64]
    """Row of the block of each machine."""
    column: npt.NDArray[np.int64]
    rows: int
    columns: int
    cell: int
    """Width of a cell in pixels."""
    block: tuple[int, int]
    """Cells of a block: rows and columns."""

    def machine_at(self, x: int, y: int) -> int | None:
        """Returns the index of the machine at a pixel; None: there is none."""
        height, width = self.step
        found = np.flatnonzero((self.row == y // height) & (self.column == x // width))
        return int(found[0]) if len(found) else None

    @property
    def gap(self) -> int:
        """Pixels between two blocks."""
        return max(2, self.cell // 2)

    @property
    def step(self) -> tuple[int, int]:
        """Pixels from one block to the next: down and right."""
        return self.block[0] * self.cell + self.gap, self.block[1] * self.cell + self.gap


Legend = Sequence[tuple[str, str]]
"""Colours and what they mean."""


class MapContent(NamedTuple):
    """The content of a picture: the machines, the colour of each slot, and the legend."""

    machines: RegionMasks
    uses: npt.NDArray[np.uint8]
    legend: Legend = ()


def grid_of(machines: RegionMasks) -> Grid:
    """Returns the places of a region's machines. Each cluster begins a new row."""
    return _grid(machines.names, int(machines.slots.max(initial=1)))


@lru_cache(_MAPS)
def _grid(names: str, most: int) -> Grid:
    """`names`: of the machines, one a line; `most`: slots of a machine."""
    ids = names.split("\n") if names else []
    width = max(1, math.ceil(math.sqrt(most * 2 if most > 2 else most)))
    block = (math.ceil(most / width), width)
    cells = math.sqrt(_WIDTH * _WIDTH * 0.6 / max(1, len(ids)) / (block[0] + 1) / (block[1] + 1))
    cell = min(_LARGEST_CELL, max(_SMALLEST_CELL, int(cells)))
    nothing = np.empty(0, np.int64)
    columns = max(1, _WIDTH // Grid(nothing, nothing, 0, 0, cell, block).step[1])
    counts = [len(list(own)) for _, own in groupby(ids, lambda id_: id_.rpartition("/")[0])]
    index = np.concatenate([nothing, *map(np.arange, counts)])
    heights = [math.ceil(count / columns) for count in counts]
    first = np.repeat(np.cumsum([0, *heights])[:-1], counts)
    return Grid(first + index // columns, index % columns, max(1, sum(heights)), columns, cell, block)


def uses_of(machines: RegionMasks, tenants: Sequence[str] = ()) -> npt.NDArray[np.uint8]:
    """Returns the colour of each slot, by machine and slot.

    The slots of `machines.holders` have the colours of their tenants, by the order of `tenants`; without `tenants`
    all are `SlotUse.OWN`.
    """
    most = int(machines.slots.max(initial=1))
    bits = np.uint64(1) << np.arange(most, dtype=np.uint64)

    def mask(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        out: npt.NDArray[np.bool_] = (values[:, None] & bits) != 0
        return out

    out = np.full((len(machines.slots), most), SlotUse.FREE, np.uint8)
    held, holders = mask(machines.held), machines.holders
    out[held] = SlotUse.HELD
    row, slot = np.nonzero(mask(holders.slots))
    own = np.full(len(holders.tenant), SlotUse.OWN)
    colours = _FIRST_TENANT + holders.tenant % len(TENANT_COLOURS) if tenants else own
    out[holders.machine[row], slot] = colours[row]
    if machines.promised.any():
        out[mask(machines.promised)] = SlotUse.PROMISED
    out[mask(machines.withheld) & ~held] = SlotUse.WITHHELD
    out[machines.is_closed[:, None] & (out == SlotUse.FREE)] = SlotUse.CLOSED
    out[machines.is_lost] = SlotUse.LOST
    out[np.arange(most) >= machines.slots[:, None]] = SlotUse.NOTHING
    return out


def kinds_of(machines: RegionMasks) -> MapContent:
    """Returns a map whose slots, held or not, have the colours of the capacity kinds of their machines."""
    kinds = list(CapacityKind)
    legend = [(TENANT_COLOURS[n], kind.replace("_", " ")) for n, kind in enumerate(kinds)]
    colour = {kind: _FIRST_TENANT + n for n, kind in enumerate(kinds)}
    return _by_machine(machines, [colour[one.kind] for one in machines.terms], legend)


def prices_of(machines: RegionMasks) -> MapContent:
    """Returns a map whose slots, held or not, have the colours of the prices of their machines.

    Each price has its own colour, or each of as many intervals as there are colours, which have equally many prices.
    """
    known = {one.usd_per_h for one in machines.terms}
    prices = sorted(price for price in known if price is not None)
    count = min(len(prices), len(PRICE_COLOURS))
    parts = [prices[len(prices) * n // count : len(prices) * (n + 1) // count] for n in range(count)]
    colour: dict[float | None, int] = {None: SlotUse.FREE}
    colour |= {price: _FIRST_PRICE + n for n, part in enumerate(parts) for price in part}
    legend = [
        (PRICE_COLOURS[n], f"${part[0]:.2f}" if len(part) == 1 else f"${part[0]:.2f} to ${part[-1]:.2f}")
        for n, part in enumerate(parts)
    ]
    if None in known:
        legend.append((COLOURS[SlotUse.FREE], "no price"))
    return _by_machine(machines, [colour[one.usd_per_h] for one in machines.terms], legend)


def _by_machine(machines: RegionMasks, colours: Sequence[int], legend: Legend) -> MapContent:
    """Returns a map with one colour for all slots of each machine, unless it is lost."""
    out = uses_of(machines)
    is_shown = (out != SlotUse.NOTHING) & (out != SlotUse.LOST)
    uses = np.where(is_shown, np.array(colours, np.uint8).reshape(-1, 1), out)
    return MapContent(machines, uses, [*legend, (COLOURS[SlotUse.LOST], LABELS[SlotUse.LOST])])


def picture(grid: Grid, uses: npt.NDArray[np.uint8]) -> bytes:
    """Returns the PNG."""
    (high, wide), cell, gap = grid.block, grid.cell, grid.gap
    blocks = np.zeros((len(uses), high * wide), np.uint8)
    blocks[:, : uses.shape[1]] = uses
    # A picture with a pixel for each cell and each gap, which is then enlarged.
    small = np.zeros((grid.rows, high + 1, grid.columns, wide + 1), np.uint8)
    small[grid.row, :high, grid.column, :wide] = blocks.reshape(-1, high, wide)
    down, right = np.tile([cell] * high + [gap], grid.rows), np.tile([cell] * wide + [gap], grid.columns)
    pixels = small.reshape(len(down), len(right)).repeat(right, 1).repeat(down, 0)
    if cell >= _LINED_CELL:
        pixels[np.cumsum(down) - down] = 0
        pixels[:, np.cumsum(right) - right] = 0
    image = Image.fromarray(pixels, "P")
    image.putpalette(_PALETTE)
    out = io.BytesIO()
    # Level 6 takes twice the time, and saves a third of the bytes.
    image.save(out, "PNG", optimize=False, compress_level=3, transparency=int(SlotUse.NOTHING))
    return out.getvalue()


@dataclass(frozen=True)
class RegionMap:
    """A version of a picture."""

    png: bytes
    version: str
    size: tuple[int, int]
    """Width and height in pixels."""
    machines: int
    legend: Legend
    made_s: float

    @property
    def etag(self) -> str:
        """The version as HTTP sends it."""
        return f'"{self.version}"'


class RegionMaps:
    """The newest version of each picture, by region and audience. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str | None, str], RegionMap] = OrderedDict()

    def get(self, key: tuple[str, str | None, str], read: Callable[[], MapContent]) -> RegionMap:
        """Returns the picture of a region, for the keys of a tenant, by a subject. `read` reads its slots."""
        now_s = self._clock()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and now_s - kept.made_s < _AGE_S:
                return kept
            machines, uses, legend = read()
            grid = grid_of(machines)
            digest = hashlib.sha256(VERSION.encode() + uses.tobytes())
            digest.update(machines.names.encode())
            version = digest.hexdigest()[:32]
            png = kept.png if kept is not None and kept.version == version else picture(grid, uses)
            size = (grid.columns * grid.step[1], grid.rows * grid.step[0])
            made = self._kept[key] = RegionMap(png, version, size, len(uses), legend, now_s)
            self._kept.move_to_end(key)
            if len(self._kept) > _MAPS:
                self._kept.popitem(last=False)
            return made
