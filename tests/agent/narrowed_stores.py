"""Object stores on loopback that enforce what temporary credentials allow, in front of emulators that do not.

A proxy remembers the policy with which credentials were issued, and answers 403 to requests that it does not allow.
What it understands of policies is what `agent.credentials` writes. An unknown key is refused, too.
"""

import json
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import httpx

from bench.buckets import EmulatorEndpoint

ADMIN_KEY = "agent-key"
"""The access key of the agent, which may do everything."""
ADMIN_TOKEN = "agent-token"
_HOPS = ("host", "content-length", "connection", "transfer-encoding", "expect")


@dataclass
class Narrowed:
    """A running proxy."""

    url: str
    issued: list[Any] = field(default_factory=list)
    """The policies with which credentials were issued, in their order."""
    refused: list[str] = field(default_factory=list)


class _Proxy(BaseHTTPRequestHandler, ABC):
    protocol_version = "HTTP/1.1"
    behind: ClassVar[str]
    seen: ClassVar[Narrowed]
    policies: ClassVar[dict[str, Any]]

    @abstractmethod
    def allows(self, body: bytes) -> bool:
        """Returns whether the credentials of the request allow it."""

    @abstractmethod
    def issue(self, body: bytes) -> bytes | None:
        """Returns the answer to a request for credentials; None: it is none."""

    def handle_any(self) -> None:
        body = self._body()
        answer = self.issue(body)
        if answer is not None:
            self._answer(200, answer, {"Content-Type": "application/json" if answer[:1] == b"{" else "text/xml"})
        elif self.allows(body):
            kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOPS}
            found = httpx.request(self.command, self.behind + self.path, content=body, headers=kept, timeout=30)
            self._answer(found.status_code, found.content, dict(found.headers))
        else:
            self.seen.refused.append(f"{self.command} {self.path}")
            text = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self._answer(403, text, {"Content-Type": "application/xml"})

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = handle_any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        length = headers.get("content-length", "0") if self.command == "HEAD" else str(len(body))
        skipped = ("content-length", "transfer-encoding", "connection", "date", "server")
        for name, value in headers.items():
            if name.lower() not in skipped:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _S3(_Proxy):
    def issue(self, body: bytes) -> bytes | None:
        form = parse_qs(body.decode(errors="replace"))
        if self.command != "POST" or form.get("Action") != ["AssumeRole"] or self._key() != ADMIN_KEY:
            return None
        kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOPS}
        answer = httpx.post(self.behind, content=body, headers=kept, timeout=30).content
        match = re.search(rb"<AccessKeyId>([^<]+)</AccessKeyId>", answer)
        assert match is not None
        policy = json.loads(form["Policy"][0])
        self.policies[match[1].decode()] = policy
        self.seen.issued.append(policy)
        return answer

    def allows(self, body: bytes) -> bool:
        key = self._key()
        if key == ADMIN_KEY:
            return True
        parts = urlsplit(self.path)
        bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        listed = query.get("prefix", [""])[0]
        if not name:
            action = "s3:ListBucketMultipartUploads" if "uploads" in query else "s3:ListBucket"
            action = action if self.command == "GET" and "delete" not in query else "s3:Other"
        else:
            action = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "PUT": "s3:PutObject", "POST": "s3:PutObject"}.get(
                self.command, "s3:DeleteObject"
            )
        source = self.headers.get("x-amz-copy-source")
        policy = self.policies.get(key, {"Statement": []})
        wanted = [(action, f"arn:aws:s3:::{bucket}/{name}" if name else f"arn:aws:s3:::{bucket}")]
        if source is not None:
            wanted.append(("s3:GetObject", f"arn:aws:s3:::{unquote(source).lstrip('/')}"))
        return all(_permits(policy, one, resource, listed) for one, resource in wanted)

    def _key(self) -> str:
        match = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        return match[1] if match else ""


def _permits(policy: Any, action: str, resource: str, prefix: str) -> bool:
    for one in policy["Statement"]:
        resources = [one["Resource"]] if isinstance(one["Resource"], str) else one["Resource"]
        patterns = one.get("Condition", {"StringLike": {"s3:prefix": ["*"]}})["StringLike"]["s3:prefix"]
        if (
            one["Effect"] == "Allow"
            and action in one["Action"]
            and any(fnmatchcase(resource, pattern) for pattern in resources)
            and any(fnmatchcase(prefix, pattern) for pattern in patterns)
        ):
            return True
    return False


class _Google(_Proxy):
    def issue(self, body: bytes) -> bytes | None:
        form = parse_qs(body.decode(errors="replace"))
        if self.path != "/v1/token" or form.get("subject_token") != [ADMIN_TOKEN]:
            return None
        token = secrets.token_hex(8)
        rules = json.loads(unquote(form["options"][0]))["accessBoundary"]["accessBoundaryRules"]
        self.policies[token] = rules
        self.seen.issued.append(rules)
        answer = {"access_token": token, "issued_token_type": "t", "token_type": "Bearer", "expires_in": 3600}
        return json.dumps(answer).encode()

    def allows(self, body: bytes) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token == ADMIN_TOKEN:
            return True
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        found = re.fullmatch(r"(?:/upload|/download)?/storage/v1/b/([^/]+)/o(?:/(.+))?", parts.path)
        if found is None:
            return False
        bucket = found[1]
        name = unquote(found[2] or "")
        if self.command == "POST" and not name:
            name = query.get("name", [""])[0]
            if not name and (match := re.search(rb'"name": *"([^"]+)"', body)):
                name = match[1].decode()
        kind = "objectViewer" if self.command == "GET" else "objectAdmin"
        for rule in self.policies.get(token, []):
            if not rule["availableResource"].endswith(f"/buckets/{bucket}"):
                continue
            if not any(one.endswith((kind, "objectAdmin")) for one in rule["availablePermissions"]):
                continue
            said = rule["availabilityCondition"]["expression"]
            names = re.findall(r"resource\.name\.startsWith\('projects/_/buckets/[^/]+/objects/([^']*)'\)", said)
            lists = re.findall(r"objectListPrefix', ''\)\.startsWith\('([^']*)'\)", said)
            asked, allowed = (name, names) if name else (query.get("prefix", [""])[0], lists)
            if any(asked.startswith(prefix) for prefix in allowed):
                return True
        return False


@contextmanager
def narrowed(endpoint: EmulatorEndpoint) -> Iterator[Narrowed]:
    """Runs a proxy in front of an emulator."""
    kind = _S3 if endpoint.scheme == "s3" else _Google
    handler = type("Handler", (kind,), {"behind": endpoint.url, "policies": {}, "seen": Narrowed("")})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.seen.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield handler.seen  # type: ignore[attr-defined]
        finally:
            server.shutdown()
