"""Reads the section `service` of a service document: port, probe, number of replicas, and the balancer's settings."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from api.documents.at import At, nearest
from api.documents.replicas import Replicas, read_ports
from api.documents.skypilot import either, filled_in, references, section
from api.documents.values import duration_s
from domain.service import LoadBalancing, ReplicaPolicySpec
from domain.serving import ProbeSpec, ServingSpec
from services.spot.policies import POLICIES

MAX_REPLICAS = 1000
DEFAULT_MAX_REPLICAS = 10
"""`max_replicas` of a service that has `target_qps_per_replica` only, as in SkyServe's paper."""
DEFAULT_PLACER = "spothedge"
PLACERS: Mapping[str, str] = {
    **{name: name for name in POLICIES if name != "on-demand"},
    "dynamic_fallback": "spothedge",  # SkyPilot's name
}
"""The policy of each name that `spot_placer` can have."""
MAX_BODY_BYTES = 64 << 10
_MAX_PATH = 2000
MAX_HEADERS = 32
MAX_QUEUE = 100_000
_MAX_HEADER = 4096
_DAY_S = 86400.0
_HOUR_S = 3600.0
_PATH = re.compile(r"/[\x21-\x7e]*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_OWN_HEADERS = frozenset({"connection", "content-length", "transfer-encoding"})
_KEYS = (
    "readiness_probe", "replicas", "replica_policy", "load_balancing_policy", "load_balancer", "ports",
    "drain_seconds", "request_timeout_seconds", "max_queue", "max_surge", "retry_non_idempotent",
)  # fmt: skip
_PROBE_KEYS = (
    "path", "post_data", "headers", "initial_delay_seconds", "timeout_seconds", "interval_seconds",
    "endpoint_probe_interval_seconds", "failures",
)  # fmt: skip
_POLICY_KEYS = (
    "min_replicas", "max_replicas", "target_qps_per_replica", "upscale_delay_seconds", "downscale_delay_seconds",
    "spot_placer", "num_overprovision", "dynamic_ondemand_fallback", "base_ondemand_fallback_replicas",
)  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """The valid fields of the section."""

    spot: bool
    """Whether replicas run on spot machines."""
    fields: dict[str, Any]
    """Fields of `ServiceSpec`."""


def read_serving(
    at: At, replicas: Replicas, env: Mapping[str, str], secrets: Collection[str], notes: list[str]
) -> Serving:
    """Reads the section `service`.

    Args:
        at: the section.
        replicas: the section `resources`.
        env: variables to which strings of the probe may refer, as `$NAME` or `${NAME}`.
        secrets: variables that are set from secrets. The probe cannot refer to them.
        notes: gets a sentence for each field without effect.
    """
    members = section(at, "service", _KEYS, notes)
    spot, policy = _read_policy(at, members, replicas, notes)
    probe = members.get("readiness_probe")
    drain_s = duration_s(members["drain_seconds"], 0.0, _HOUR_S) if "drain_seconds" in members else None
    default = ServingSpec()
    fields: dict[str, Any] = {
        "policy": policy,
        "serving": ServingSpec(
            port=_port(members, replicas),
            probe=ProbeSpec() if probe is None else _read_probe(probe, env, secrets, notes),
            drain_s=default.drain_s if drain_s is None else drain_s,
        ),
        "balancing": _balancing(members["load_balancing_policy"]) if "load_balancing_policy" in members else None,
        "retry_non_idempotent": (
            members["retry_non_idempotent"].truth() if "retry_non_idempotent" in members else None
        ),
        "request_timeout_s": _request_timeout_s(members, notes),
        "max_queue": members["max_queue"].integer(0, MAX_QUEUE) if "max_queue" in members else None,
        "max_surge": members["max_surge"].integer(1, MAX_REPLICAS) if "max_surge" in members else None,
    }
    return Serving(spot, {key: value for key, value in fields.items() if value is not None})


def _port(members: Mapping[str, At], replicas: Replicas) -> int | None:
    """Returns the only port of the document; None: there is none."""
    given = [*replicas.ports_at, *(read_ports(members["ports"]) if "ports" in members else [])]
    for place, port in given:
        if port != given[0][1]:
            place.wrong(
                f"a replica has one port, and {given[0][0].path} is {given[0][1]}; give the same port, or omit one"
            )
    return given[0][1] if given else None


def _balancing(at: At) -> LoadBalancing | None:
    text = at.text("a load balancing policy")
    if text is None:
        return None
    known = [one.value for one in LoadBalancing]
    if text.lower() not in known:
        at.wrong(f"must be one of {', '.join(known)}", nearest(text, known))
        return None
    return LoadBalancing(text.lower())


def _request_timeout_s(members: Mapping[str, At], notes: list[str]) -> float | None:
    balancer = members.get("load_balancer")
    inner = section(balancer, "service.load_balancer", ("stream_timeout_seconds",), notes) if balancer else {}
    given = {
        "request_timeout_seconds": members.get("request_timeout_seconds"),
        "load_balancer.stream_timeout_seconds": inner.get("stream_timeout_seconds"),
    }
    place = either({k: v for k, v in given.items() if v is not None}, *given)
    return duration_s(place, 1.0, _DAY_S) if place is not None else None


# ------------------------------------------------------------------------------------------------------------ the probe


def _read_probe(at: At, env: Mapping[str, str], secrets: Collection[str], notes: list[str]) -> ProbeSpec:
    for name in sorted(references(at.value) & set(secrets)):
        at.wrong(f"refers to {name}, whose value is a secret; a probe can only refer to variables of env")
    at = At(at.path, filled_in(at.value, env), at.problems)
    if isinstance(at.value, str):
        return ProbeSpec(path=_path(at) or "/")
    members = section(at, "service.readiness_probe", _PROBE_KEYS, notes)
    if isinstance(at.value, dict) and "path" not in members:
        at.missing("path", "the path of the request, such as /health")
    headers = _headers(members["headers"]) if "headers" in members else {}
    # An empty mapping is a body too, so that the probe is a POST.
    body = _body(members["post_data"], headers) if "post_data" in members else None
    if body is not None and not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = "application/json"
    interval = either(members, "interval_seconds", "endpoint_probe_interval_seconds")
    fields = {
        "path": _path(members["path"]) if "path" in members else None,
        "body": body,
        "headers": headers,
        "initial_delay_s": _seconds(members.get("initial_delay_seconds"), 1.0, _DAY_S),
        "timeout_s": _seconds(members.get("timeout_seconds"), 0.1, _HOUR_S),
        "interval_s": _seconds(interval, 0.5, _HOUR_S),
        "failures": members["failures"].integer(1, 1000) if "failures" in members else None,
    }
    return ProbeSpec(**{key: value for key, value in fields.items() if value is not None})


def _seconds(at: At | None, low_s: float, high_s: float) -> float | None:
    return None if at is None else duration_s(at, low_s, high_s)


def _path(at: At) -> str | None:
    text = at.text("the path of the request", _MAX_PATH)
    if text is not None and not _PATH.fullmatch(text):
        at.wrong("must begin with / and have only printable ASCII characters without spaces; encode others, as in %20")
        return None
    return text


def _headers(at: At) -> dict[str, str]:
    headers = {}
    for name, place in at.entries("a mapping of headers to strings", MAX_HEADERS).items():
        value = place.word("a string", _MAX_HEADER)
        if not _HEADER.fullmatch(name):
            place.wrong("a header's name must have letters, digits and hyphens")
        elif name.lower() in _OWN_HEADERS:
            place.wrong(f"{name} is set for each probe; omit it")
        elif value is not None and not _HEADER_VALUE.fullmatch(value):
            place.wrong("must have printable ASCII characters only")
        elif value is not None:
            headers[name] = value
    return headers


def _body(at: At, headers: Mapping[str, str]) -> str | None:
    if isinstance(at.value, str):
        text = at.text("a string", MAX_BODY_BYTES)
        if text is not None and not any(name.lower() == "content-type" for name in headers):
            try:
                json.loads(text)
            except (ValueError, RecursionError):
                at.wrong("must be a mapping or a string of JSON; for another format, give the header Content-Type")
                return None
        return text
    if not isinstance(at.value, dict | list):
        at.wrong("must be a mapping, or a string of JSON")
        return None
    try:
        text = json.dumps(at.value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        at.wrong("must have finite numbers only")
        return None
    return At(at.path, text, at.problems).text("storable", MAX_BODY_BYTES)


# ----------------------------------------------------------------------------------------------------------- the policy


def _read_policy(
    at: At, service: Mapping[str, At], replicas: Replicas, notes: list[str]
) -> tuple[bool, ReplicaPolicySpec]:
    """Returns whether replicas run on spot machines, and the policy."""
    members: dict[str, At] = {}
    fixed = None
    if "replica_policy" in service:
        members = section(service["replica_policy"], "service.replica_policy", _POLICY_KEYS, notes)
        if "replicas" in service:
            service["replicas"].wrong("is a fixed number; omit it, or omit replica_policy")
    elif "replicas" in service:
        fixed = service["replicas"].integer(1, MAX_REPLICAS)
    spot, placing = _read_placing(members, replicas)
    if fixed is not None:
        counts: dict[str, Any] = {"min_replicas": fixed, "max_replicas": fixed}
    else:
        counts = _read_counts(service.get("replica_policy", at), members)
    base = members.get("base_ondemand_fallback_replicas")
    if base is not None and (placing.get("base_ondemand_fallback_replicas") or 0) > counts["max_replicas"]:
        base.wrong(f"must be at most max_replicas, which is {counts['max_replicas']}")
    delays = {
        "upscale_delay_s": _seconds(members.get("upscale_delay_seconds"), 0.0, _DAY_S),
        "downscale_delay_s": _seconds(members.get("downscale_delay_seconds"), 0.0, _DAY_S),
    }
    given = {key: value for key, value in {**counts, **placing, **delays}.items() if value is not None}
    return spot, ReplicaPolicySpec(**given)


def _read_counts(at: At, members: Mapping[str, At]) -> dict[str, Any]:
    least = members["min_replicas"].integer(0, MAX_REPLICAS) if "min_replicas" in members else 1
    most = members["max_replicas"].integer(1, MAX_REPLICAS) if "max_replicas" in members else None
    qps = _target_qps(members["target_qps_per_replica"]) if "target_qps_per_replica" in members else None
    if least is None or ("max_replicas" in members and most is None):
        return {"min_replicas": 1, "max_replicas": MAX_REPLICAS}
    if most is None:
        if "target_qps_per_replica" in members:
            most = DEFAULT_MAX_REPLICAS
            if least > most:
                at.missing("max_replicas", f"needed with target_qps_per_replica if min_replicas is above {most}")
        elif least == 0:
            members["min_replicas"].wrong("must be at least 1 without target_qps_per_replica and max_replicas")
        most = max(most or 1, least)
    elif most < least:
        members["max_replicas"].wrong(f"must be at least min_replicas, which is {least}")
    elif most > least and "target_qps_per_replica" not in members:
        at.missing("target_qps_per_replica", "it decides the number of replicas between min_replicas and max_replicas")
    return {"min_replicas": least, "max_replicas": most, "target_qps_per_replica": qps}


def _target_qps(at: At) -> float | None:
    if isinstance(at.value, dict):
        at.wrong("must be one number; different numbers for GPU types are not supported")
        return None
    return at.number(1e-6, 1e6)


def _read_placing(members: Mapping[str, At], replicas: Replicas) -> tuple[bool, dict[str, Any]]:
    """Reads where spot replicas run, and what stands in for them."""
    spot = replicas.spot if replicas.spot is not None else "spot_placer" in members
    placer = _placer(members["spot_placer"]) if "spot_placer" in members else DEFAULT_PLACER
    extra = members["num_overprovision"].integer(0, MAX_REPLICAS) if "num_overprovision" in members else None
    fallback = members["dynamic_ondemand_fallback"].truth() if "dynamic_ondemand_fallback" in members else None
    base = members.get("base_ondemand_fallback_replicas")
    kept = base.integer(0, MAX_REPLICAS) if base is not None else None
    if not spot:
        for key, value in (
            ("spot_placer", True), ("num_overprovision", extra), ("dynamic_ondemand_fallback", fallback),
            ("base_ondemand_fallback_replicas", kept),
        ):  # fmt: skip
            if key in members and value:
                members[key].wrong("is only for spot machines; write resources.use_spot: true, or omit it")
        return False, {}
    return True, {
        "placer": placer,
        "num_overprovision": extra,
        "dynamic_ondemand_fallback": fallback,
        "base_ondemand_fallback_replicas": kept,
    }


def _placer(at: At) -> str | None:
    text = at.text("the name of a placer")
    if text is None:
        return None
    if text.lower() not in PLACERS:
        at.wrong(f"must be one of {', '.join(PLACERS)}", nearest(text, PLACERS))
        return None
    return PLACERS[text.lower()]
