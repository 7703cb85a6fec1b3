"""Runs copies of an object, or of all objects below a prefix, in child processes and kills them at given times.

Each line of standard input is a JSON object with `to` and `kill_after_s` (seconds after the stores are open, or null).
For each line it forks a process that copies, and prints a JSON line with `status` (the exit code; negative: a signal)
and `took_s`.
"""

import json
import os
import signal
import sys
import time
import traceback

import mizzen.objects.gcs
import mizzen.objects.s3  # noqa: F401  # Imported here so that each forked process need not import it.
from infra.copies import open_copy_store
from infra.copies.copy import copy_object, copy_prefix


def main(source_url: str, target_url: str, key: str, part_bytes: int) -> None:
    """Runs the copies that standard input requests."""
    for line in sys.stdin:
        asked = json.loads(line)
        opened, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                source, target = open_copy_store(source_url), open_copy_store(target_url)
                os.write(tell, b"o")
                if key.endswith("/"):
                    copy_prefix(source, target, key, name=f"killed {asked['to']}")
                else:
                    copy_object(source, target, key, name="killed", to=asked["to"], part_bytes=part_bytes)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(tell)
        os.read(opened, 1)
        os.close(opened)
        began_s = time.monotonic()
        if asked["kill_after_s"] is not None:
            time.sleep(asked["kill_after_s"])
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        took_s = time.monotonic() - began_s
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "took_s": took_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
