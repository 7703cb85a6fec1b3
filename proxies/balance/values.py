"""The list of a service's replicas, as the API returns it."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from infra.errors import MizzenError

Policy = Literal["round_robin", "least_connections", "least_load"]
Kind = Literal["spot", "on_demand"]
State = Literal["ready", "draining"]
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""The form of a service's name. It becomes a part of file names and of HAProxy's configuration."""
PREFIXES_BYTES = (256, 1024, 4096)
"""The lengths, in bytes, of the beginning of a request's body that can be its key."""
_HEADER = re.compile(r"[A-Za-z0-9_-]{1,100}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_LONGEST_S = 86_400.0


class InvalidList(MizzenError):
    """A list of replicas has a field that is missing or invalid."""


@dataclass(frozen=True)
class RegionZone:
    """A zone of a region."""

    region: str
    zone: str
    """Empty: unknown."""


@dataclass(frozen=True)
class ReplicaEndpoint:
    """One replica of a service."""

    replica: int
    address: str
    port: int
    zone: RegionZone
    gpu_type: str
    """Empty: it has no GPUs."""
    kind: Kind
    state: State
    is_canary: bool = False
    """Whether it is a canary, which gets only a share of the requests."""


@dataclass(frozen=True)
class Canary:
    """A version that is judged by the answers of its replicas."""

    version: int
    share: float
    """The share of the requests that its replicas get."""
    slow_s: float | None
    """Answers that take longer are counted as slow; None: none are."""


@dataclass(frozen=True)
class Service:
    """The settings of a service that concern its balancer, and its replicas."""

    name: str
    policy: Policy
    sticky_header: str | None
    """The name of the header whose value is the key of a request; requests with the same key go to the same replica."""
    sticky_prefix_bytes: int | None
    """The number of bytes of the body that are the key of a request. Without both, requests have no keys."""
    resume: bool
    """Whether replicas continue broken streams, so that a request with `Last-Event-ID` may always be repeated."""
    retry_non_idempotent: bool
    """Whether requests with a method such as POST are retried on another replica too."""
    request_timeout_s: float
    """A request whose replica sends nothing for this time fails."""
    first_byte_s: float | None
    """The longest time until the first byte of an answer; a replica that exceeds it is ejected. None: relative to the
    other replicas."""
    max_queue: int
    """Maximum number of requests that wait while all replicas are busy."""
    hold_s: float
    """The longest time for which a request waits while no replica is ready; 0: it is refused at once."""
    drain_s: float
    """The time for which a removed replica may finish its requests."""
    version: int
    certificate: str | None
    """The name of the service's certificate for clients; None: it has none."""
    canary: Canary | None
    endpoints: tuple[ReplicaEndpoint, ...]

    @property
    def is_sticky(self) -> bool:
        """Whether requests can have keys."""
        return self.sticky_header is not None or self.sticky_prefix_bytes is not None


def parse_service(name: str, body: Any) -> Service:
    """Returns the list in a response of the API, or in the file of the last list.

    Raises:
        InvalidList: a field is missing or invalid, or the list belongs to another service.
    """
    fields = _Fields(f"list of service {name}", body)
    if name not in (fields.text("name"), fields.text("service")):
        raise InvalidList(f"list of service {name}: name: must be {name!r}, it is {fields.text('name')!r}")
    endpoints = fields.value("endpoints", list, "a list")
    return Service(
        name=name,
        policy=cast(Policy, fields.choice("policy", get_args(Policy))),
        sticky_header=_header(fields),
        sticky_prefix_bytes=_prefix(fields),
        resume=fields.value("resume", bool, "true or false"),
        retry_non_idempotent=fields.value("retry_non_idempotent", bool, "true or false"),
        request_timeout_s=fields.number("request_timeout_s", 0.001, _LONGEST_S),
        first_byte_s=fields.optional_number("first_byte_s", 0.001, _LONGEST_S),
        max_queue=int(fields.number("max_queue", 0, 1_000_000)),
        hold_s=fields.number("hold_s", 0, _LONGEST_S),
        drain_s=fields.number("drain_s", 0, _LONGEST_S),
        version=int(fields.number("version", 0, 2**63)),
        certificate=fields.optional_text("certificate"),
        canary=_canary(fields),
        endpoints=tuple(
            _endpoint(_Fields(f"list of service {name}: endpoints[{number}]", one))
            for number, one in enumerate(endpoints)
        ),
    )


def certificate_in(name: str, body: Any) -> tuple[str, str]:
    """Returns the name and the PEM text in the API's response with a service's certificate.

    Raises:
        InvalidList: a field is missing or invalid.
    """
    fields = _Fields(f"certificate of service {name}", body)
    return fields.text("name"), fields.text("pem")


def _header(fields: "_Fields") -> str | None:
    name = fields.optional_text("sticky_header")
    if name is not None and not _HEADER.fullmatch(name):
        raise InvalidList(f"{fields.place}: sticky_header: must be a header's name, it is {name!r}")
    return name


def _prefix(fields: "_Fields") -> int | None:
    length = fields.optional_number("sticky_prefix_bytes", 1, 1 << 14)
    if length is not None and length not in PREFIXES_BYTES:
        choices = ", ".join(map(str, PREFIXES_BYTES))
        raise InvalidList(f"{fields.place}: sticky_prefix_bytes: must be one of {choices}, it is {length!r}")
    return None if length is None else int(length)


def _endpoint(fields: "_Fields") -> ReplicaEndpoint:
    address = fields.text("address")
    if not (is_ip(address) or _HOST.fullmatch(address)):
        raise InvalidList(f"{fields.place}: address: must be an IP address or a host name, it is {address!r}")
    return ReplicaEndpoint(
        replica=int(fields.number("replica", 0, 2**63)),
        address=address,
        port=int(fields.number("port", 1, 65_535)),
        zone=RegionZone(fields.text("region"), fields.optional_text("zone") or ""),
        gpu_type=fields.optional_text("gpu_type") or "",
        kind=cast(Kind, fields.choice("kind", get_args(Kind))),
        state=cast(State, fields.choice("state", get_args(State))),
        is_canary=fields.value("is_canary", bool, "true or false"),
    )


def _canary(fields: "_Fields") -> Canary | None:
    body = fields.value("canary", (Mapping, type(None)), "an object or null")
    if body is None:
        return None
    own = _Fields(f"{fields.place}: canary", body)
    return Canary(
        version=int(own.number("version", 0, 2**63)),
        share=own.number("share", 0, 1),
        slow_s=own.optional_number("slow_s", 0.001, _LONGEST_S),
    )


def is_ip(text: str) -> bool:
    """Returns whether the text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text  # Any text may follow: the address is a part of HAProxy's configuration.


class _Fields:
    """The fields of a JSON object. `place` names the object in error messages."""

    def __init__(self, place: str, body: Any) -> None:
        if not isinstance(body, Mapping):
            raise InvalidList(f"{place}: must be an object, it is {body!r}")
        self.place = place
        self._body = body

    def value(self, name: str, kind: type | tuple[type, ...], required: str) -> Any:
        if name not in self._body:
            raise InvalidList(f"{self.place}: {name}: is missing; must be {required}")
        value = self._body[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidList(f"{self.place}: {name}: must be {required}, it is {value!r}")
        return value

    def text(self, name: str) -> str:
        return cast(str, self.value(name, str, "text"))

    def optional_text(self, name: str) -> str | None:
        return cast(str | None, self.value(name, (str, type(None)), "text or null"))

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        required = f"one of {', '.join(choices)}"
        value = cast(str, self.value(name, str, required))
        if value not in choices:
            raise InvalidList(f"{self.place}: {name}: must be {required}, it is {value!r}")
        return value

    def number(self, name: str, least: float, most: float) -> float:
        required = f"a number from {least:g} to {most:g}"
        value = cast(float, self.value(name, (int, float), required))
        if not least <= value <= most:
            raise InvalidList(f"{self.place}: {name}: must be {required}, it is {value!r}")
        return value

    def optional_number(self, name: str, least: float, most: float) -> float | None:
        is_null = self.value(name, (int, float, type(None)), "a number or null") is None
        return None if is_null else self.number(name, least, most)
