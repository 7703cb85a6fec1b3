"""The map of a region: a picture with a cell for each slot, an indexed PNG. Each machine is a block of cells.

A picture is made for one audience: all tenants, or one tenant, whose keys see the slots of other tenants in one colour.
"""

import hashlib
import io
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from api.fleet.slots import MachineSlots, MachineTerms
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
PRICE_COLOURS = ("440154", "443983", "31688e", "21918c", "35b779", "90d743", "fde725")
"""Colours of prices, from the lowest on."""
_FIRST_TENANT = len(SlotUse)
_FIRST_PRICE = _FIRST_TENANT + len(TENANT_COLOURS)
Holders = Sequence[tuple[str, str, int]]
"""Machine, tenant and mask of held slots."""


@dataclass(frozen=True)
class Grid:
    """Where the machines of a region are in its picture."""

    ids: list[str]
    places: dict[tuple[int, int], int]
    """Row and column of blocks to the machine's number."""
    rows: int
    columns: int
    cell: int
    """Width of a cell in pixels."""
    block: tuple[int, int]
    """Cells of a block: rows and columns."""

    def machine_at(self, x: int, y: int) -> str | None:
        """Returns the machine at a pixel; None: there is none."""
        height, width = self.step
        number = self.places.get((y // height, x // width))
        return None if number is None else self.ids[number]

    @property
    def step(self) -> tuple[int, int]:
        """Pixels from one block to the next: down and right."""
        gap = max(2, self.cell // 2)
        return self.block[0] * self.cell + gap, self.block[1] * self.cell + gap


Legend = Sequence[tuple[str, str]]
"""Colours and what they mean."""


class MapContent(NamedTuple):
    """The content of a picture: the positions of machines, the colour of each slot, and the legend."""

    grid: Grid
    uses: npt.NDArray[np.uint8]
    legend: Legend = ()


def grid_of(machines: Sequence[MachineSlots]) -> Grid:
    """Returns the places of a region's machines, sorted by id. Each cluster begins a new row."""
    most = max((max(1, m.gpus) for m in machines), default=1)
    width = max(1, math.ceil(math.sqrt(most * 2 if most > 2 else most)))
    block = (math.ceil(most / width), width)
    cells = math.sqrt(_WIDTH * _WIDTH * 0.6 / max(1, len(machines)) / (block[0] + 1) / (block[1] + 1))
    cell = min(_LARGEST_CELL, max(_SMALLEST_CELL, int(cells)))
    grid = Grid([m.id for m in machines], {}, 0, 0, cell, block)
    columns = max(1, _WIDTH // grid.step[1])
    row = number = 0
    places: dict[tuple[int, int], int] = {}
    for _, own in groupby(grid.ids, lambda id_: id_.rpartition("/")[0]):
        count = len(list(own))
        for index in range(count):
            places[row + index // columns, index % columns] = number + index
        number += count
        row += math.ceil(count / columns)
    return Grid(grid.ids, places, max(1, row), columns, cell, block)


def uses_of(machines: Sequence[MachineSlots], own: Holders, tenants: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Returns the colour of each slot, by machine and slot.

    `own`: the held slots whose tenants the caller may see. Each has the colour of its tenant, by the order of
    `tenants`; without `tenants` all are `SlotUse.OWN`.
    """
    most = max((max(1, m.gpus) for m in machines), default=1)
    bits = np.uint64(1) << np.arange(most, dtype=np.uint64)

    def mask(values: Sequence[int]) -> npt.NDArray[np.bool_]:
        out: npt.NDArray[np.bool_] = (np.array(values, np.uint64)[:, None] & bits) != 0
        return out

    out = np.full((len(machines), most), SlotUse.FREE, np.uint8)
    if not machines:
        return out
    held = mask([m.held if m.gpus else int(m.is_busy) for m in machines])
    out[held] = SlotUse.HELD
    index = {m.id: n for n, m in enumerate(machines)}
    colour = {name: _FIRST_TENANT + n % len(TENANT_COLOURS) for n, name in enumerate(tenants)}
    known = [(index[id_], slots, colour.get(tenant, SlotUse.OWN)) for id_, tenant, slots in own if id_ in index]
    if known:
        numbers, slots, colours = zip(*known, strict=True)
        row, slot = np.nonzero(mask(slots))
        out[np.array(numbers)[row], slot] = np.array(colours, np.uint8)[row]
    out[mask([m.promised for m in machines])] = SlotUse.PROMISED
    out[mask([m.withheld for m in machines]) & ~held] = SlotUse.WITHHELD
    closed = np.array([m.is_closed for m in machines])
    out[closed[:, None] & (out == SlotUse.FREE)] = SlotUse.CLOSED
    out[np.array([m.state == "lost" for m in machines])] = SlotUse.LOST
    gpus = np.array([max(1, m.gpus) for m in machines])
    out[np.arange(most)[None, :] >= gpus[:, None]] = SlotUse.NOTHING
    return out


def kinds_of(machines: Sequence[MachineSlots], terms: Mapping[str, MachineTerms]) -> MapContent:
    """Returns a map whose slots, held or not, have the colours of the capacity kinds of their machines."""
    kinds = list(CapacityKind)
    legend = [(TENANT_COLOURS[n], kind.replace("_", " ")) for n, kind in enumerate(kinds)]
    return _by_machine(machines, [_FIRST_TENANT + kinds.index(terms[one.id].kind) for one in machines], legend)


def prices_of(machines: Sequence[MachineSlots], terms: Mapping[str, MachineTerms]) -> MapContent:
    """Returns a map whose slots, held or not, have the colours of the prices of their machines.

    Each price has its own colour, or each of as many intervals as there are colours, which have equally many prices.
    """
    prices = sorted({one.usd_per_h for one in terms.values() if one.usd_per_h is not None})
    count = min(len(prices), len(PRICE_COLOURS))
    parts = [prices[len(prices) * n // count : len(prices) * (n + 1) // count] for n in range(count)]
    colour: dict[float | None, int] = {None: SlotUse.FREE}
    colour |= {price: _FIRST_PRICE + n for n, part in enumerate(parts) for price in part}
    legend = [
        (PRICE_COLOURS[n], f"${part[0]:.2f}" if len(part) == 1 else f"${part[0]:.2f} to ${part[-1]:.2f}")
        for n, part in enumerate(parts)
    ]
    if any(one.usd_per_h is None for one in terms.values()):
        legend.append((COLOURS[SlotUse.FREE], "no price"))
    return _by_machine(machines, [colour[terms[one.id].usd_per_h] for one in machines], legend)


def _by_machine(machines: Sequence[MachineSlots], colours: Sequence[int], legend: Legend) -> MapContent:
    """Returns a map with one colour for all slots of each machine, unless it is lost."""
    out = uses_of(machines, [], [])
    is_shown = (out != SlotUse.NOTHING) & (out != SlotUse.LOST)
    uses = np.where(is_shown, np.array(colours, np.uint8).reshape(-1, 1), out)
    return MapContent(grid_of(machines), uses, [*legend, (COLOURS[SlotUse.LOST], LABELS[SlotUse.LOST])])


def picture(grid: Grid, uses: npt.NDArray[np.uint8]) -> bytes:
    """Returns the PNG."""
    (down, right), (high, wide) = grid.step, grid.block
    blocks = np.zeros((len(grid.ids), high * wide), np.uint8)
    blocks[:, : uses.shape[1]] = uses
    cells = np.repeat(np.repeat(blocks.reshape(-1, high, wide), grid.cell, 1), grid.cell, 2)
    if grid.cell >= _LINED_CELL:
        cells[:, :: grid.cell] = cells[:, :, :: grid.cell] = SlotUse.NOTHING
    canvas = np.zeros((grid.rows, down, grid.columns, right), np.uint8)
    places = np.array(list(grid.places), np.int64).reshape(-1, 2)
    numbers = list(grid.places.values())
    canvas[places[:, 0], : cells.shape[1], places[:, 1], : cells.shape[2]] = cells[numbers]
    image = Image.fromarray(canvas.reshape(grid.rows * down, grid.columns * right), "P")
    colours = [*(COLOURS[use] for use in SlotUse), *TENANT_COLOURS, *PRICE_COLOURS]
    image.putpalette(bytes.fromhex("".join(colours)))
    out = io.BytesIO()
    image.save(out, "PNG", optimize=False, compress_level=6, transparency=int(SlotUse.NOTHING))
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
            grid, uses, legend = read()
            digest = hashlib.sha256(VERSION.encode() + uses.tobytes())
            digest.update("\n".join(grid.ids).encode())
            version = digest.hexdigest()[:32]
            png = kept.png if kept is not None and kept.version == version else picture(grid, uses)
            size = (grid.columns * grid.step[1], grid.rows * grid.step[0])
            made = self._kept[key] = RegionMap(png, version, size, len(grid.ids), legend, now_s)
            self._kept.move_to_end(key)
            if len(self._kept) > _MAPS:
                self._kept.popitem(last=False)
            return made
