"""Issuers of OIDC tokens on loopback: `oidc-provider-mock` in its own process, and one that signs any claims."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from joserfc import jwt
from joserfc.jwk import RSAKey

AUDIENCE = "mizzen"


class PackagedIssuer:
    """The issuer of the package `oidc-provider-mock`. Each start has a new key."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, max_age_s: int = 600) -> None:
        """Starts the process, and waits until it answers."""
        command = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "-p", str(self._port)]
        self._process = subprocess.Popen(
            [*command, "--token-max-age", str(max_age_s)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                httpx.get(f"{self.url}/jwks").raise_for_status()
                return
            except httpx.HTTPError:
                assert self._process.poll() is None
                time.sleep(0.1)

    def stop(self) -> None:
        """Kills the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def token(self, subject: str, client_id: str = AUDIENCE, **claims: Any) -> str:
        """Returns an ID token, got with the code flow as a browser would."""
        httpx.put(f"{self.url}/users/{subject}", json=claims).raise_for_status()
        back = "http://127.0.0.1/back"
        asked = {"client_id": client_id, "response_type": "code", "redirect_uri": back, "scope": "openid email"}
        sent = httpx.post(f"{self.url}/oauth2/authorize", params=asked, data={"sub": subject})
        (code,) = parse_qs(urlsplit(sent.headers["location"]).query)["code"]
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": back}
        answer = httpx.post(f"{self.url}/oauth2/token", data=form, auth=(client_id, "any"))
        return str(answer.json()["id_token"])


class SigningIssuer:
    """An issuer that signs whatever a test asks, and can be slow, broken, or change its key."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
        self.answers: dict[str, Any] = {}
        """Other documents than the usual ones, by path."""
        self.open = threading.Event()
        """While it is not set, the issuer does not answer."""
        self.open.set()
        self.reads = 0
        self.forms: list[dict[str, str]] = []
        self.outcomes: list[str] = []
        """Errors with which polls of the device flow are answered, in this order, before the tokens."""
        self.refresh_token = ""
        self.lifetime_s = 600

    def token(self, *, key: Any = None, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """Returns a token with these claims beside valid ones; None leaves a claim out."""
        now = int(time.time())
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "exp": now + 600, "iat": now, "team": "vision"}
        body = {name: value for name, value in (usual | claims).items() if value is not None}
        signing = self.key if key is None else key
        return jwt.encode(
            {"alg": "RS256", "kid": "one", **(header or {})}, body, signing, algorithms=["RS256", "HS256"]
        )

    def granted(self, path: str, form: dict[str, str]) -> tuple[int, Any]:
        """Returns status and body of a request of the device flow (RFC 8628) or of a renewal."""
        self.forms.append(form)
        if path == "/device":
            where = {"verification_uri": f"{self.url}/confirm", "user_code": "ABCD-EFGH"}
            return 200, {"device_code": "d1", **where, "expires_in": 60, "interval": 0.05}
        if form["grant_type"] == "refresh_token" and form["refresh_token"] != self.refresh_token:
            return 400, {"error": "invalid_grant"}
        if form["grant_type"].endswith("device_code") and self.outcomes:
            return 400, {"error": self.outcomes.pop(0)}
        self.refresh_token = f"r{len(self.forms)}"
        return 200, {
            "access_token": "opaque", "token_type": "Bearer", "expires_in": self.lifetime_s,
            "id_token": self.token(exp=int(time.time()) + 600), "refresh_token": self.refresh_token,
        }  # fmt: skip

    def document(self, path: str) -> Any:
        """Returns the document at a path."""
        self.reads += 1
        self.open.wait(60)
        if path in self.answers:
            return self.answers[path]
        if path.endswith("openid-configuration"):
            return {
                "issuer": self.url,
                "jwks_uri": f"{self.url}/jwks",
                "device_authorization_endpoint": f"{self.url}/device",
                "token_endpoint": f"{self.url}/token",
            }
        return {"keys": [self.key.as_dict(private=False)]}


@contextmanager
def served(issuer: SigningIssuer) -> Iterator[None]:
    """Serves an issuer's documents."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(issuer.document(self.path)).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"])).decode()
            status, found = issuer.granted(self.path, {name: one for name, (one,) in parse_qs(text).items()})
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", urlsplit(issuer.url).port or 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
