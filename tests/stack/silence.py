"""What a stack says about a region whose scheduler has stopped answering, and the removal of such a region."""

import urllib.request

import pytest

from mizzen_client import Conflict
from tests.stack.harness import Up, wait_until


def removes_silent(up: Up, waiting: str, silent: str, other: str) -> None:
    """Checks that a silent region is named by `why`, the list of regions and the metrics, and removes it.

    `waiting` is a workload that does not fit in the region `other`. The silent region has the machine `SILENT/a/m-1`.
    """
    client = up.client()

    def codes() -> dict[str, str]:
        found = {reason["detail"].get("region"): reason["code"] for reason in client.why(waiting)["reasons"]}
        return {region: code for region, code in found.items() if region in (silent, other)}

    wait_until(lambda: codes() == {silent: "region_silent", other: "insufficient_capacity"}, "`why` names the region")
    states = {region["name"]: region["state"] for region in client.regions()}
    assert (states[other], states[silent]) == ("answering", "silent")
    with urllib.request.urlopen(f"http://127.0.0.1:{up.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [one for one in lines if f'region="{silent}",state="silent"' in one]
    assert line.startswith("mizzen_region_silent_seconds{") and float(line.split()[-1]) > 0
    machine = f"{silent}/a/m-1"
    with pytest.raises(Conflict, match=f"machines: {machine}"):
        client.remove_region(silent)
    client.set_machine(machine, "drain")
    client.remove_machine(machine)
    client.remove_region(silent)
    wait_until(lambda: codes() == {other: "insufficient_capacity"}, "`why` no longer names the removed region")
    assert silent not in [region["name"] for region in client.regions()]
