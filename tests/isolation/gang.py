"""A task of a gang that exchanges its state with the other tasks at each step: `gang.py STEPS`."""

import hashlib
import os
import socket
import sys
import time

import mizzen
from mizzen.checkpoint import Checkpointer, CheckpointSettings

_SIZE = 64
"""Characters of a state; the first ones are shorter."""


def _peers(rank: int, tasks: int) -> list[socket.socket]:
    """Connects the tasks: rank 0 to all others, and those to rank 0."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        while True:
            try:
                return [socket.create_connection(address)]
            except ConnectionRefusedError:
                time.sleep(0.05)
    with socket.create_server(address) as server:
        return [server.accept()[0] for _ in range(tasks - 1)]


def _receive(peer: socket.socket, size: int) -> str:
    out = b""
    while len(out) < size:
        piece = peer.recv(size - len(out))
        if not piece:
            raise SystemExit("a peer is gone")
        out += piece
    return out.decode().strip()


def main() -> None:
    """Runs the task."""
    steps, rank, tasks = int(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    saver = Checkpointer(settings=CheckpointSettings(sharded=True))
    found = saver.load_latest()
    step, state = (found.step, found.state["state"]) if found else (0, str(rank))
    print(f"resumed at {step}", flush=True)
    peers = _peers(rank, tasks)
    while step < steps:
        time.sleep(0.1)
        if rank:
            peers[0].sendall(state.ljust(_SIZE).encode())
            told = _receive(peers[0], _SIZE * tasks).replace(" ", "")
        else:
            padded = [state.ljust(_SIZE), *(_receive(peer, _SIZE).ljust(_SIZE) for peer in peers)]
            for peer in peers:
                peer.sendall("".join(padded).encode())
            told = "".join(padded).replace(" ", "")
        state = hashlib.sha256(f"{state} {told}".encode()).hexdigest()
        step += 1
        mizzen.progress(step)
        print(f"step {step}", flush=True)
        saver.save(step, {"state": state}, own=("state",))
        if mizzen.preempted() and step < steps:
            mizzen.exit_preempted()
    print(f"rank {rank}: {state}", flush=True)


if __name__ == "__main__":
    main()
