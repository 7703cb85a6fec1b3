"""The section `service` of the service document: probe, number of replicas, and the balancer's settings."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from api.documents.canary import UPDATE
from api.documents.forms import (
    TRUTH,
    Field,
    Form,
    Keys,
    Schema,
    cases,
    duration,
    integer,
    is_integer,
    map_of,
    number,
    one_of,
    text,
    word,
)  # fmt: skip
from api.documents.position import At
from api.documents.replicas import MAX_OPTIONS, PORTS, Replicas
from api.documents.skypilot import either, not_both, section
from api.documents.tls import TLS
from api.documents.workload import TYPE_PATTERN
from domain.patterns import in_any_case, whole_numbers
from domain.references import filled_in, references
from domain.service import (
    STICKY_PREFIXES_BYTES,
    LoadBalancing,
    ReplicaPolicySpec,
    ReplicaSpread,
    ServiceSpec,
    StickySpec,
)
from domain.serving_spec import LOAD_HEADER, ProbeSpec, ServingSpec
from domain.slots import MAX_SLOTS
from domain.spread import SpreadLevel
from services.spot.policies import POLICIES
from services.spot.spothedge_plus import OUTAGE_PRICE_S

MAX_REPLICAS = 1000
DEFAULT_MAX_REPLICAS = 10
"""`max_replicas` of a service that has `target_qps_per_replica` only, as in SkyServe's paper."""
DEFAULT_PLACER = "spothedge"
PLACERS: Mapping[str, str] = {
    **{name: name for name in POLICIES if name != "on-demand"},
    "dynamic_fallback": "spothedge",  # SkyPilot's name
}
"""The policy of each name that `spot_placer` can have."""
_OWN_EXTRA = "spothedge+"
"""The policy that chooses the number of spare replicas itself."""
_MAX_BODY_BYTES = 64 << 10
_DAY_S, _HOUR_S = 86400, 3600
_PROBE, _SERVING, _POLICY = ProbeSpec(), ServingSpec(), ReplicaPolicySpec()
_DEFAULTS = {name: one.default for name, one in ServiceSpec.model_fields.items()}

# ------------------------------------------------------------------------------------------------------------ the probe

_INTERVALS = "interval_seconds", "endpoint_probe_interval_seconds"
_FILLED = "The probe is also valid with the values of env in the place of $NAME and ${NAME}"
_NO_SECRETS = "Only its headers refer to variables of secrets"
_IS_JSON = "A string is JSON, unless headers has Content-Type"
_BODY_SIZE = f"The body has at most {_MAX_BODY_BYTES} bytes, and finite numbers only"
_BODY: Schema = {"type": ["object", "array", "string"], "description": f"{_IS_JSON}. {_BODY_SIZE}"}
_PATH = text(
    "the path of the request", 2000, "^/[!-~]*$",
    "must begin with / and have only printable ASCII characters without spaces; encode others, as in %20",
)  # fmt: skip
_HEADER = Keys(
    "^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$", "a header's name must have letters, digits and hyphens",
    {f"^{in_any_case(('connection', 'content-length', 'transfer-encoding'))}$": "{} is set for each probe; omit it"},
)  # fmt: skip
_PRINTABLE = word(text("a string", 4096, "^[ -~]*$", "must have printable ASCII characters only"))
_HEADERS = map_of(_HEADER, _PRINTABLE, "a mapping of headers to strings", 32)


def _any_body(at: At) -> Any:
    given = at.value
    return given if isinstance(given, dict | list | str) else at.wrong("must be a mapping, or a string of JSON")


_READINESS = section("service.readiness_probe", {
    "path": Field(_PATH, "Path and query of the request", missing="the path of the request, such as /health"),
    "post_data": Field(Form(_BODY, _any_body), "JSON; the probe is a POST with this body"),
    "headers": Field(_HEADERS, "Headers of the request"),
    "initial_delay_seconds": Field(duration(1, _DAY_S), "Time within which a replica must become ready",
                                   "initial_delay_s", default=_PROBE.initial_delay_s),
    "timeout_seconds": Field(duration(0.1, _HOUR_S), "Timeout of one probe", "timeout_s", default=_PROBE.timeout_s),
    "interval_seconds": Field(duration(0.5, _HOUR_S), "Time between two probes", default=_PROBE.interval_s),
    "endpoint_probe_interval_seconds": Field(duration(0.5, _HOUR_S), not_both(*_INTERVALS)),
    "failures": Field(integer(1, 1000), "Failed probes in a row until a replica is not ready",
                      default=_PROBE.failures),
}, f"{_FILLED}. {_NO_SECRETS}")  # fmt: skip


def read_probe(at: At, values: Any, env: Mapping[str, str], secrets: Collection[str]) -> ProbeSpec:
    """Returns the probe with the values of variables in the place of `$NAME` and `${NAME}`.

    Args:
        at: the probe.
        values: the fields of the probe; None: the probe is invalid or missing.
        env: variables to which strings of the probe may refer.
        secrets: variables that are set from secrets. Only headers may refer to them; the agent fills them in.
    """
    shown = (
        {key: value for key, value in at.value.items() if key != "headers"} if isinstance(at.value, dict) else at.value
    )
    for variable in sorted(references(shown) & set(secrets)):
        message = f"refers to {variable}, whose value is a secret; only headers can refer to secrets"
        at.wrong(message, rule=_NO_SECRETS)
    if isinstance(values, str):
        return ProbeSpec(path=_PATH.read_as(at, filled_in(values, env), _FILLED) or "/")
    fields = dict(values or {})
    interval_s = either(at, fields, *_INTERVALS)
    if "path" in fields:
        fields["path"] = _PATH.read_as(at.get("path"), filled_in(fields["path"], env), _FILLED) or "/"
    given = fields.pop("headers", {})
    fields["secrets"] = tuple(sorted(references(given) & set(secrets)))
    headers = _HEADERS.read_as(at.get("headers"), filled_in(given, env), _FILLED) or {}
    is_typed = any(name.lower() == "content-type" for name in headers)
    if "post_data" in fields:  # An empty mapping is a body too, so that the probe is a POST.
        fields["body"] = _body(at.get("post_data"), filled_in(fields.pop("post_data"), env), is_typed)
        headers |= {} if is_typed else {"Content-Type": "application/json"}
    return ProbeSpec(**fields, headers=headers, **({} if interval_s is None else {"interval_s": interval_s}))


def _body(at: At, value: Any, is_typed: bool) -> Any:
    if isinstance(value, str) and not is_typed:
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            other = "for another format, give the header Content-Type"
            return at.wrong(f"must be a mapping or a string of JSON; {other}", rule=_IS_JSON)
    elif not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return at.wrong("must have finite numbers only", rule=_BODY_SIZE)
    return text("storable", _MAX_BODY_BYTES, in_bytes=True).read_as(at, value, _BODY_SIZE)


# ----------------------------------------------------------------------------------------------------------- the policy

_COUNTS = (
    "max_replicas is at least min_replicas. If it is above, or is absent with a min_replicas of 0, "
    "target_qps_per_replica, target_ongoing_requests or target_load_per_replica is needed. If it is absent with one of "
    "them, min_replicas is at most 10"
)
_SPOT_ONLY = "The fields from spot_placer on are only for spot machines"
_EXTRA = f"num_overprovision is not for {_OWN_EXTRA}, which chooses the number itself"
_PRICED = f"outage_price_seconds is only for {_OWN_EXTRA}"
_BASE_MOST = "base_ondemand_fallback_replicas is at most max_replicas"
_TARGETS = ("target_qps_per_replica", "target_ongoing_requests", "target_load_per_replica")
_NO_LOAD = "target_load_per_replica needs a max_replicas above min_replicas"
_FIXED = "It is given without replica_policy"
_COUNT = integer(0, MAX_REPLICAS)
_BY_GPU = "With a mapping, each accelerator of resources has one value, with its number of GPUs or without"
_QPS = number(1e-6, 1e6)
_GPUS = Keys(
    f"^{TYPE_PATTERN}(:{whole_numbers(1, MAX_SLOTS)})?$", "a key must be a GPU type such as a100, or a100:8", {}
)


def _different(at: At, values: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in values.items():
        if key.casefold() in found:
            at.child(key, value).wrong("is given twice", rule=_BY_GPU)
        found[key.casefold()] = value
    return found


_PLACER = one_of(tuple(PLACERS), "the name of a placer", folded=True).to(PLACERS.__getitem__)
_PLACING = (
    "placer", "num_overprovision", "outage_price_s", "dynamic_ondemand_fallback", "base_ondemand_fallback_replicas",
)  # fmt: skip
_GIVEN = {"placer": "spot_placer", "outage_price_s": "outage_price_seconds"}
_LONGEST_PRICE_S = 100 * _DAY_S
_REPLICA_POLICY = section("service.replica_policy", {
    "min_replicas": Field(_COUNT, default=_POLICY.min_replicas),
    "max_replicas": Field(integer(1, MAX_REPLICAS), "Default: min_replicas, or 10 with target_qps_per_replica"),
    "target_qps_per_replica": Field(
        cases({(int, float): _QPS,
               dict: map_of(_GPUS, _QPS, "a mapping of accelerators to numbers", MAX_OPTIONS).checked(_different)},
              "must be a number, or a mapping of accelerators to numbers, it is {}"),
        f"Requests per second for one replica; or a mapping such as {{a100:1: 2.5, v100:1: 1}}. {_BY_GPU}"),
    "target_ongoing_requests": Field(
        number(1e-6, 1e6),
        "Requests in progress for one replica. With several targets, the one that needs most replicas decides"),
    "target_load_per_replica": Field(
        number(1e-6, 1e12),
        f"Load for one replica, in the unit in which replicas report it in the header {LOAD_HEADER} of the probe's"
        " response. With several targets, the one that needs most replicas decides"),
    "upscale_delay_seconds": Field(duration(0, _DAY_S), "Time for which the load must need more replicas",
                                   "upscale_delay_s", default=_POLICY.upscale_delay_s),
    "downscale_delay_seconds": Field(duration(0, _DAY_S), "Time for which the load must need fewer replicas",
                                     "downscale_delay_s", default=_POLICY.downscale_delay_s),
    "spot_placer": Field(_PLACER, f"One of {', '.join(PLACERS)}", "placer", default=DEFAULT_PLACER),
    "num_overprovision": Field(_COUNT, "Spot replicas beyond the target", default=_POLICY.num_overprovision),
    "outage_price_seconds": Field(
        duration(0, _LONGEST_PRICE_S),
        f"What an outage may cost, in seconds of the target on demand. {_PRICED}. Default: {OUTAGE_PRICE_S:g}",
        "outage_price_s"),
    "dynamic_ondemand_fallback": Field(
        TRUTH, "Whether on-demand replicas stand in for spot replicas that are not ready",
        default=_POLICY.dynamic_ondemand_fallback),
    "base_ondemand_fallback_replicas": Field(
        _COUNT, "On-demand replicas that are always kept", default=_POLICY.base_ondemand_fallback_replicas),
}, f"{_COUNTS}. {_SPOT_ONLY}. {_EXTRA}. {_PRICED}. {_BASE_MOST}. {_NO_LOAD}")  # fmt: skip


def read_policy(
    at: At, fixed: int | None, values: dict[str, Any], replicas: Replicas
) -> tuple[bool, ReplicaPolicySpec]:
    """Returns whether replicas run on spot machines, and the policy.

    Args:
        at: the section `service`.
        fixed: the number of replicas.
        values: the fields of the policy.
        replicas: the section `resources`.
    """
    policy, is_fixed = at.get("replica_policy"), at.get("replicas").value is not None
    if policy.value is not None and is_fixed:
        at.get("replicas").wrong("is a fixed number; omit it, or omit replica_policy", rule=_FIXED)
    spot = replicas.spot if replicas.spot is not None else policy.get("spot_placer").value is not None
    placing = _placing(policy, {key: values.pop(key) for key in _PLACING if key in values}, spot)
    if policy.value is None and is_fixed:
        values |= {"min_replicas": fixed or 1, "max_replicas": fixed or MAX_REPLICAS}
    else:
        _count(policy if policy.value is not None else at, values)
    if placing.get("base_ondemand_fallback_replicas", 0) > values["max_replicas"]:
        message = f"must be at most max_replicas, which is {values['max_replicas']}"
        policy.get("base_ondemand_fallback_replicas").wrong(message, rule=_BASE_MOST)
    rates = values.get("target_qps_per_replica")
    if isinstance(rates, dict):
        values |= {"target_qps_by_gpu": rates, "target_qps_per_replica": max(rates.values(), default=None)}
    read = ReplicaPolicySpec(**values, **placing)
    if isinstance(rates, dict):
        _require_rates(policy.get("target_qps_per_replica"), read, replicas)
    return spot, read


def _require_rates(at: At, policy: ReplicaPolicySpec, replicas: Replicas) -> None:
    """Adds an error if a replica may have GPUs for which the mapping `at` has no value."""
    kinds = {(kind, one.resources.gpus) for one in replicas.options for kind in one.resources.gpu_types or ("",)}
    missing = sorted(f"{kind}:{gpus}" for kind, gpus in kinds if kind and policy.qps_of(kind, gpus) is None)
    if ("", 0) in kinds:
        at.wrong("must be a number, because resources have an alternative without accelerators", rule=_BY_GPU)
    elif missing and len(policy.target_qps_by_gpu) == len(at.value):  # Otherwise one of the values is invalid.
        at.wrong(f"has no value for {missing[0]}", rule=_BY_GPU)


def _count(at: At, values: dict[str, Any]) -> None:
    """Sets the numbers of replicas in `values`."""
    if any(at.get(key).value is not None and key not in values for key in ("min_replicas", "max_replicas")):
        values |= {"min_replicas": 1, "max_replicas": MAX_REPLICAS}  # One of the numbers is invalid.
        return
    least, most = values.setdefault("min_replicas", 1), values.get("max_replicas")
    scales = any(at.get(key).value is not None for key in _TARGETS)
    values["max_replicas"] = most or max(DEFAULT_MAX_REPLICAS if scales else 1, least)
    if most is None and scales and least > DEFAULT_MAX_REPLICAS:
        message = f"needed with target_qps_per_replica if min_replicas is above {DEFAULT_MAX_REPLICAS}"
        at.missing("max_replicas", message, rule=_COUNTS)
    elif most is None and not scales and least == 0:
        message = "must be at least 1 without target_qps_per_replica and max_replicas"
        at.get("min_replicas").wrong(message, rule=_COUNTS)
    elif most is not None and most < least:
        at.get("max_replicas").wrong(f"must be at least min_replicas, which is {least}", rule=_COUNTS)
    elif most == least and at.get("target_load_per_replica").value is not None:
        message = f"has no effect with a fixed number of replicas; omit it, or set max_replicas above {least}"
        at.get("target_load_per_replica").wrong(message, rule=_NO_LOAD)
    elif most is not None and most > least and not scales:
        message = "it decides the number of replicas between min_replicas and max_replicas"
        at.missing("target_qps_per_replica", message, rule=_COUNTS)


def _placing(at: At, values: dict[str, Any], spot: bool) -> dict[str, Any]:
    """Returns the fields of the policy that place spot replicas and replace missing ones."""
    if not spot:
        for key in (key for key, value in values.items() if value or key == "outage_price_s"):
            place = at.get(_GIVEN.get(key, key))
            place.wrong("is only for spot machines; write resources.use_spot: true, or omit it", rule=_SPOT_ONLY)
        return {}
    if "placer" not in values and at.get("spot_placer").value is not None:
        return {}  # The policy is invalid.
    values.setdefault("placer", DEFAULT_PLACER)
    if values["placer"] == _OWN_EXTRA and values.get("num_overprovision"):
        message = f"{_OWN_EXTRA} chooses the number itself; omit it, or write spot_placer: {DEFAULT_PLACER}"
        at.get("num_overprovision").wrong(message, rule=_EXTRA)
    if values["placer"] != _OWN_EXTRA and "outage_price_s" in values:
        message = f"is only for spot_placer: {_OWN_EXTRA}; {values['placer']} has num_overprovision; omit it"
        at.get("outage_price_seconds").wrong(message, rule=_PRICED)
    return values


# ---------------------------------------------------------------------------------------------------------- the section

_TIMEOUTS = "request_timeout_seconds", "load_balancer.stream_timeout_seconds"
_TIMEOUT = duration(1, _DAY_S)
_UPDATES = "max_surge and max_unavailable are not both 0"
_BESIDE = "With update, max_surge is at least 1"
_SYNONYMS = {"instance_aware_least_load": LoadBalancing.LEAST_CONNECTIONS.value}
"""Policies of SkyPilot with another name here."""
_BALANCING = one_of((*LoadBalancing, *_SYNONYMS), "a load balancing policy", folded=True).to(
    lambda given: _SYNONYMS.get(given, given)
)
_STRENGTHS = {"": False, ", preferred": False, ", required": True}
_SPREADS: Mapping[str, ReplicaSpread] = {
    "none": ReplicaSpread(over=None),
    **{f"{level}{strength}": ReplicaSpread(over=level, required=required)
       for level in SpreadLevel for strength, required in _STRENGTHS.items()},
}  # fmt: skip
"""What `spread` means, by its text."""
_SPREAD = one_of(tuple(_SPREADS), "what replicas should not share").to(_SPREADS.__getitem__)
SPREAD_ON_SPOT = "Of replicas on spot machines, only machine can be required"


_ONE_KEY = "Exactly one of header and prefix_bytes is given"
_STICKY_HEADER = text(
    "the name of a header", 100, "^[A-Za-z0-9_-]+$", "must be a header's name: letters, digits, - and _"
)


def _prefix(at: At) -> Any:
    choices = ", ".join(map(str, STICKY_PREFIXES_BYTES))
    known = is_integer(at.value) and at.value in STICKY_PREFIXES_BYTES
    return int(at.value) if known else at.wrong(f"must be one of {choices}")


def _sticky(at: At, values: dict[str, Any]) -> StickySpec | None:
    given = [key for key in ("header", "prefix_bytes") if at.get(key).value is not None]
    if not given:
        at.missing("header", "the header whose value is the key; or give prefix_bytes", rule=_ONE_KEY)
    elif len(given) == 2:
        at.get("prefix_bytes").wrong("omit it, or omit header: a request has one key", rule=_ONE_KEY)
    elif values:
        return StickySpec(**values)
    return None


_LOAD_BALANCING = section("service.load_balancing", {
    "sticky": Field(section("service.load_balancing.sticky", {
        "header": Field(_STICKY_HEADER, "Requests with the same value of this header go to the same replica"),
        "prefix_bytes": Field(Form({"enum": [*STICKY_PREFIXES_BYTES]}, _prefix),
                              "Requests whose bodies begin with the same bytes go to the same replica"),
    }).checked(_sticky, _ONE_KEY), "Which requests go to the same replica, while it is not far busier than the others"),
    "resume": Field(one_of(("header",), "how a client resumes a stream").to(bool),
                    "header: the replicas continue a stream that has broken off if a request has Last-Event-ID"),
})  # fmt: skip


def _section(at: At, values: dict[str, Any]) -> dict[str, Any]:
    if values.get("max_surge", 1) == 0 and values.get("canary") is not None:
        at.get("max_surge").wrong(
            "must be at least 1 with update: a canary runs beside the older version", rule=_BESIDE
        )
    if values.get("max_surge", 1) == 0 and values.get("max_unavailable", 0) == 0:
        at.get("max_surge").wrong(
            "must be at least 1 if max_unavailable is 0: no replica could be replaced", rule=_UPDATES
        )
    values[_TIMEOUTS[1]] = values.pop("load_balancer", {}).get("stream_timeout_seconds")
    timeout_s = either(at, values, *_TIMEOUTS)
    values |= values.pop("load_balancing", {})
    return values | ({} if timeout_s is None else {"request_timeout_s": timeout_s})


SERVING = section("service", {
    "readiness_probe": Field(cases({str: _PATH, dict: _READINESS}, "must be a path or a mapping, it is {}"),
                             "The path of a GET request, or a mapping", default="/"),
    "replicas": Field(integer(1, MAX_REPLICAS), f"A fixed number of replicas. {_FIXED}"),
    "replica_policy": Field(_REPLICA_POLICY),
    "load_balancing_policy": Field(_BALANCING, f"One of {', '.join((*LoadBalancing, *_SYNONYMS))}", "balancing",
                                   default=_DEFAULTS["balancing"].value),
    "load_balancing": Field(_LOAD_BALANCING, "Requests that belong together"),
    "load_balancer": Field(
        section("service.load_balancer", {"stream_timeout_seconds": Field(_TIMEOUT, not_both(*_TIMEOUTS))})),
    "ports": PORTS,
    "drain_seconds": Field(duration(0, _HOUR_S), "Time for requests in progress of a replica that ends", "drain_s",
                           default=_SERVING.drain_s),
    "request_timeout_seconds": Field(_TIMEOUT, "Longest time without a byte from the replica",
                                     default=_DEFAULTS["request_timeout_s"]),
    "first_byte_seconds": Field(
        duration(0.1, _DAY_S), "Longest time from a request to the first byte of the answer. After it, the request is"
        " sent to another replica, or fails, and the replica gets no requests for a while. Default: relative to others",
        "first_byte_s"),
    "tls": Field(TLS, "Clients of balancers without --cert use TLS with this certificate"),
    "max_queue": Field(integer(0, 100_000), "Requests that wait in the balancer", default=_DEFAULTS["max_queue"]),
    "hold_seconds": Field(duration(0, _DAY_S), "Longest time for which a request waits while no replica is ready",
                          "hold_s", default=_DEFAULTS["hold_s"]),
    "max_surge": Field(integer(0, MAX_REPLICAS), "Replicas that a rolling update adds at a time",
                       default=_DEFAULTS["max_surge"]),
    "max_unavailable": Field(
        integer(0, MAX_REPLICAS), f"Replicas below the target that a rolling update leaves ready. {_UPDATES}",
        default=_DEFAULTS["max_unavailable"]),
    "update": Field(UPDATE, f"How a new version is judged before it replaces an older one. {_BESIDE}", "canary"),
    "spread": Field(
        _SPREAD, "What replicas should not share, if possible (preferred) or in any case (required): first this, then"
        f" machines, racks, clusters and zones. {SPREAD_ON_SPOT}", default="machine"),
    "retry_non_idempotent": Field(
        TRUTH, "Whether a request may be sent again if its replica died before an answer began",
        default=_DEFAULTS["retry_non_idempotent"]),
}).checked(_section, _UPDATES, _BESIDE)  # fmt: skip
