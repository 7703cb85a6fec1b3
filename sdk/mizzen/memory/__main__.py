"""`python -m mizzen.memory URI`: holds checkpoints of a run in the memory of this machine, for its peers.

A training with `Tiers` starts such a server by itself. This command is for a machine without a training.
"""

import argparse
from typing import Any

from mizzen.checkpoint.roots import open_root
from mizzen.checkpoint.tier_cadence import Tiers
from mizzen.memory.connection import MemoryServer, local_server
from mizzen.memory.memory_store import host_of_environ, open_memory
from mizzen.memory.server import serve


def main() -> None:
    """Serve until the server is idle."""
    parser = argparse.ArgumentParser(prog="python -m mizzen.memory", description=__doc__)
    parser.add_argument("uri", help="root of the checkpoints, as for Checkpointer")
    parser.add_argument("--memory-bytes", type=int, help="memory limit; by default a quarter of the memory")
    parser.add_argument("--address", help="host or host:port at which other machines reach this one")
    parser.add_argument("--idle-s", type=float, default=Tiers.idle_s, help="end if not used for so many seconds")
    given = parser.parse_args()
    try:
        tiers = Tiers(memory_bytes=given.memory_bytes, address=given.address, idle_s=given.idle_s)
        store = open_root(given.uri)
    except ValueError as error:
        parser.error(str(error))
    serving = []

    def start(told: dict[str, Any]) -> MemoryServer:
        server = serve(told)
        if server is None:
            raise OSError("this run already has a memory server on this machine")
        serving.append(server)
        found = local_server(bytes.fromhex(told["token"]))
        found.greet()
        return found

    address = tiers.address or host_of_environ()
    open_memory(store, limit_bytes=tiers.memory_bytes, idle_s=tiers.idle_s, address=address, start=start)
    if not serving:
        raise SystemExit(1)  # A warning says why.
    serving[0].wait()


if __name__ == "__main__":
    main()
