"""The state of the cloud in a folder: one file for each machine, and a lock, so that several processes can share it."""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from capacity.providers.trace.market import Market, MarketInstance
from capacity.providers.trace.settings import TraceProviderSettings
from infra.files import write_private

_FORGET_S = 86400.0
"""The record of a machine is deleted after the machine has been gone for this long. A later launch with the same token
yields a new machine."""


@dataclass(frozen=True)
class CloudMachine:
    """A machine of the cloud, and the data with which its agent announces itself."""

    instance: MarketInstance
    number: int
    """A number that is unique among the existing machines, because their agents share this computer's ports."""
    machine: str
    region: str
    machine_type: str
    shape: dict[str, Any]
    """The fields of `infra.machine_shape.MachineShape` of the machine type at the launch."""
    bucket_url: str
    join_token: str
    machine_key: str

    def to_json(self) -> str:
        """Returns the content of the machine's file. A machine without an end has no `ends_at_s`."""
        body = asdict(self)
        if math.isinf(self.instance.ends_at_s):
            del body["instance"]["ends_at_s"]
        return json.dumps(body)

    @classmethod
    def from_json(cls, text: str) -> "CloudMachine":
        """Parses the result of `to_json`."""
        body: dict[str, Any] = json.loads(text)
        return cls(**{**body, "instance": MarketInstance(**body["instance"])})


class Cloud:
    """One cloud. The methods that list or launch machines first apply the changes of capacity up to now."""

    def __init__(self, settings: TraceProviderSettings, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`folder` is created if it does not exist; it contains secrets. `clock` returns seconds since the epoch."""
        self._settings = settings
        self._folder = folder
        self._clock = clock
        (folder / "machines").mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            began = folder / "began"
            if not began.exists():
                write_private(began, repr(clock()))
            self.market = Market(settings, float(began.read_text()))

    def notice_file(self, native_id: str) -> Path:
        """Returns the path of the file in which the cloud gives notice for a machine (`mizzen.notices.file`)."""
        return self._folder / "machines" / f"{native_id}.notice"

    def there(self) -> list[CloudMachine]:
        """Returns the machines that exist now, including those that have not started."""
        with self._locked():
            return self._advance()

    def started(self) -> list[CloudMachine]:
        """Returns the existing machines that have started."""
        now_s = self._clock()
        return [machine for machine in self.there() if machine.instance.starts_at_s <= now_s]

    def launch(self, token: str, zone: str, make: Callable[[MarketInstance, int], CloudMachine]) -> CloudMachine | None:
        """Returns the machine of this token, launching it if it does not exist; None: the zone has no capacity left."""
        native_id = f"tr-{token}"
        with self._locked():
            there = self._advance()
            if (before := self._read(native_id)) is not None:
                return before
            now_s = self._clock()
            if not self.market.has_room(zone, [one.instance for one in there], now_s):
                return None
            instance = MarketInstance(native_id, token, zone, now_s, now_s + self.market.start_s(token))
            taken = {one.number for one in there}
            number = next(n for n in range(len(taken) + 1) if n not in taken)
            machine = make(instance, number)
            self._write(machine)
            return machine

    def end(self, native_id: str) -> None:
        """Ends a machine immediately, if it exists."""
        with self._locked():
            found = self._read(native_id)
            if found is not None and found.instance.is_there(self._clock()):
                self._write(replace(found, instance=replace(found.instance, ends_at_s=self._clock())))

    def take(self, native_id: str) -> None:
        """Gives notice for a machine and reclaims it, as if its zone had lost capacity. For trials."""
        with self._locked():
            found = self._read(native_id)
            if found is not None and math.isinf(found.instance.ends_at_s):
                self._take(found, self.market.noticed(found.instance, self._clock()))

    def _advance(self) -> list[CloudMachine]:
        """Reclaims machines that exceed the capacity, deletes old records, and returns the existing machines."""
        now_s = self._clock()
        machines = {}
        for path in sorted((self._folder / "machines").glob("*.json")):
            if (found := self._read(path.stem)) is None:
                continue
            if now_s > found.instance.ends_at_s + _FORGET_S:
                path.unlink()
                self.notice_file(path.stem).unlink(missing_ok=True)
                continue
            machines[path.stem] = found
        for taken in self.market.taken([one.instance for one in machines.values()], now_s):
            machines[taken.native_id] = self._take(machines[taken.native_id], taken)
        return [one for one in machines.values() if one.instance.is_there(now_s)]

    def _take(self, machine: CloudMachine, taken: MarketInstance) -> CloudMachine:
        machine = replace(machine, instance=taken)
        if taken.ends_at_s > self._clock():
            said = {"ends_at": taken.ends_at_s, "words": f"zone {taken.zone} has fewer machines"}
            write_private(self.notice_file(taken.native_id), json.dumps(said))
        self._write(machine)
        return machine

    def _read(self, native_id: str) -> CloudMachine | None:
        if "/" in native_id:
            return None  # The id belongs to another provider.
        try:
            return CloudMachine.from_json((self._folder / "machines" / f"{native_id}.json").read_text())
        except FileNotFoundError:
            return None

    def _write(self, machine: CloudMachine) -> None:
        write_private(self._folder / "machines" / f"{machine.instance.native_id}.json", machine.to_json())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
