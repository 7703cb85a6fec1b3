"""Receivers of notifications on loopback: an HTTP server and an SMTP server, which behave as a test says."""

import base64
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword
from aiosmtpd.smtp import Session as MailSession

from infra.stack.ports import free_port


@dataclass
class Request:
    """A request that a webhook got."""

    path: str
    headers: dict[str, str]
    body: bytes

    def is_signed(self, key: bytes, number: int = 0) -> bool:
        """Returns whether one of the signatures, with this number, was made with a key."""
        content = b".".join(
            (self.headers["webhook-id"].encode(), self.headers["webhook-timestamp"].encode(), self.body)
        )
        wanted = "v1," + base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
        return abs(time.time() - int(self.headers["webhook-timestamp"])) < 60 and (
            self.headers["webhook-signature"].split()[number] == wanted
        )

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


@dataclass
class Webhook:
    """An HTTP server. `answers` are the statuses of the next answers; the last one stays."""

    port: int
    answers: list[int] = field(default_factory=lambda: [204])
    got: list[Request] = field(default_factory=list)
    hangs: threading.Event | None = None
    """If it is set, no request is answered before the event."""
    huge: bool = False
    """Whether the body of the answer never ends."""

    def url(self, path: str = "/hook?token=t0ken", scheme: str = "http") -> str:
        """Returns the URL of the server."""
        return f"{scheme}://127.0.0.1:{self.port}{path}"


@contextmanager
def webhook(certificate: tuple[Path, Path] | None = None) -> Iterator[Webhook]:
    """Runs an HTTP server, with TLS if it has a certificate and its key."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            own.got.append(Request(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            if own.hangs is not None:
                own.hangs.wait(60)
            self.send_response(own.answers.pop(0) if len(own.answers) > 1 else own.answers[0])
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            try:
                while own.huge:
                    self.wfile.write(b"x" * 65536)
            except OSError:
                own.huge = False

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*certificate)
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    own = Webhook(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield own
    finally:
        if own.hangs is not None:
            own.hangs.set()
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Mailbox:
    """What an SMTP server got, and how it answers."""

    port: int = 0
    answer: str = "250 OK"
    got: list[tuple[Envelope, EmailMessage]] = field(default_factory=list)
    logins: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def handle_DATA(self, server: Any, session: MailSession, envelope: Envelope) -> str:
        """Stores an e-mail."""
        if self.answer.startswith("250"):
            assert isinstance(envelope.content, bytes)
            self.got.append((envelope, message_from_bytes(envelope.content, policy=default)))  # type: ignore[arg-type]
        return self.answer

    def login(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        """Accepts the login `mizzen` with the password `pass word`."""
        assert isinstance(data, LoginPassword)
        self.logins.append((data.login, data.password))
        return AuthResult(success=data.password == b"pass word")


@contextmanager
def mailbox(certificate: tuple[Path, Path] | None = None, *, tls_first: bool = False) -> Iterator[Mailbox]:
    """Runs an SMTP server. With a certificate, it needs STARTTLS and a login, or has TLS from the beginning."""
    own = Mailbox()
    options: dict[str, Any] = {}
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
        options = {"ssl_context": context} if tls_first else {"tls_context": context, "require_starttls": True}
        options |= {"authenticator": own.login, "auth_required": not tls_first, "auth_require_tls": not tls_first}
    own.port = free_port()  # The controller cannot choose one.
    controller = Controller(own, hostname="127.0.0.1", port=own.port, **options)
    controller.start()
    try:
        yield own
    finally:
        controller.stop()
