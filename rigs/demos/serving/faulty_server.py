"""The example's server with faults: a POST to /fault/error, /fault/hang or /fault/slow makes its later answers bad.

Its probe succeeds all the time, as that of a server whose GPU has failed. The example is `example_server.py` beside it.
"""

import importlib
import time
from typing import Any

_HANG_S, _SLOW_S = 3600.0, 3.0


def install(example: Any, faults: list[str]) -> None:
    """Replaces the answers of the example's handler: they follow the newest one of `faults`."""
    handler = example.Handler
    post, generate = handler.do_POST, handler._generate

    def do_post(self: Any) -> None:
        if self.path.startswith("/fault/"):
            faults.append(self.path.rpartition("/")[2])
            self._answer(200)
        else:
            post(self)

    def bad_or_good(self: Any, asked: dict[str, Any]) -> None:
        if faults and faults[-1] == "error":
            self._answer(500)
            return
        if faults:
            time.sleep(_HANG_S if faults[-1] == "hang" else _SLOW_S)
        generate(self, asked)

    handler.do_POST, handler._generate = do_post, bad_or_good


if __name__ == "__main__":
    module = importlib.import_module("example_server")
    install(module, [])
    module.main()
