"""A proxy in front of a cluster's API that loses requests and answers of creations."""

import contextlib
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

_KEPT = ("authorization", "content-type", "x-slurm-user-name", "x-slurm-user-token")


@contextlib.contextmanager
def losing(url: str, seed: int, method: str = "POST") -> Iterator[str]:
    """Yields the URL of a server that loses three in four requests of a method, creations by default.

    They are lost before or after they are carried out, or are answered with nonsense.
    """
    chance, lock = random.Random(seed), threading.Lock()
    upstream = httpx.Client(base_url=url, verify=False, timeout=20, trust_env=False)

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            with lock:
                fate = chance.randrange(4) if self.command == method else 3
            if "watch=true" in self.path or fate == 0:
                self.close_connection = True
                return
            kept = {name: self.headers[name] for name in _KEPT if self.headers[name]}
            answer = upstream.request(self.command, self.path, content=body, headers=kept)
            if fate == 1:
                self.close_connection = True
                return
            content = b"<html>" if fate == 2 else answer.content
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = _serve

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        upstream.close()
