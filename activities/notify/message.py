"""The content of a notification: the JSON of a webhook, or an e-mail. Each try has the same content."""

import json
from collections.abc import Mapping
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from typing import Any

from domain.masking import mask_ids
from domain.units import format_duration
from infra.db.deliveries import Delivery

ALERT, REPORT = "alert", "report"
_NOT_SHOWN = ("reason",)
_MOST_SUBJECT = 200


def body_of(delivery: Delivery, seen: frozenset[str]) -> bytes:
    """Returns the JSON of a webhook, as Standard Webhooks has it: `type`, `timestamp` and `data`.

    `seen` are the ids of workloads that its receiver may see; others are masked.
    """
    facts = delivery.facts
    reason = facts.get("reason") or {}
    data = {name: value for name, value in facts.items() if name not in _NOT_SHOWN and value is not None}
    if reason:
        data["reason"] = {"code": reason.get("code"), "sentence": _sentence(reason, seen)}
    at = delivery.created_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"type": delivery.kind, "timestamp": at, "data": data}).encode()


def email_of(delivery: Delivery, seen: frozenset[str], sender: str) -> EmailMessage:
    """Returns the e-mail to the receiver of a notification. No text of a user can add a header or a receiver."""
    facts = delivery.facts
    mail = EmailMessage(policy=SMTP)
    mail["From"] = Address("mizzen", addr_spec=sender)
    mail["To"] = Address(addr_spec=str(delivery.receiver["email"]))
    mail["Date"] = format_datetime(delivery.created_at)
    mail["Message-ID"] = f"<{delivery.id}@{sender.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail["Subject"] = " ".join(_subject(delivery.kind, facts).split())[:_MOST_SUBJECT]
    lines = [f"{name}: {value}" for name, value in _lines(delivery.kind, facts, seen) if value]
    mail.set_content("\n".join(lines) + "\n")
    return mail


def _subject(kind: str, facts: Mapping[str, Any]) -> str:
    if kind == ALERT:
        if len(facts["alerts"]) == 1:
            return f"mizzen: {_name(facts['alerts'][0])}"
        return f"mizzen: {', '.join(sorted({alert['kind'] for alert in facts['alerts']}))}"
    if kind == REPORT:
        return f"mizzen: the week from {facts['from']} to {facts['to']}"
    index = "" if facts.get("index") is None else f"/{facts['index']}"
    return f"mizzen: {facts['name']}{index} {_end(kind)} (tenant {facts['tenant']})"


def _name(alert: Mapping[str, Any]) -> str:
    return f"{alert['kind']} {alert['subject'] or ''}".strip()


def _lines(kind: str, facts: Mapping[str, Any], seen: frozenset[str]) -> list[tuple[str, str]]:
    if kind == ALERT:
        more = [("and more", str(facts["more"]))] if facts["more"] else []
        return [(_name(one), one["text"] or "`mizzen events` has more") for one in facts["alerts"]] + more
    if kind == REPORT:
        weeks = [(f"tenant {week['tenant']}", _week(week)) for week in facts["tenants"]]
        return [("week", f"{facts['from']} to {facts['to']}, UTC"), *(weeks or [("tenants", "nothing was used")])]
    what, _, _ = kind.partition(".")
    reason = facts.get("reason") or {}
    labels = ", ".join(f"{key}={value}" for key, value in sorted((facts.get("labels") or {}).items()))
    return [
        (what, f"{facts['name']} ({facts['id']})"),
        ("tenant", facts["tenant"]),
        ("end", _end(kind)),
        ("reason", _sentence(reason, seen) if reason else ""),
        ("finished", facts["finished_at"]),
        ("labels", labels),
        ("more", f"mizzen show {facts['id']}" if what == "workload" else ""),
    ]


def _week(week: Mapping[str, Any]) -> str:
    """Returns a tenant's week as a line (`infra.db.weekly_report.TenantWeek`)."""
    used = ", ".join(f"{name} {hours:,.1f} h" for name, hours in sorted(week["hours"].items())) or "no hours"
    said = [f"used {used}", f"${week['usd']:,.2f}", f"{week['started']} started"]
    if week["unpriced_h"] > 0:
        said.append(f"{week['unpriced_h']:,.1f} h have no price")
    if week["median_wait_s"] is not None:
        waits = [format_duration(week[name]) for name in ("median_wait_s", "p95_wait_s")]
        said.append(f"they waited {waits[0]} (median), {waits[1]} (95 %)")
    said.append(f"{week['waiting']} wait")
    return "; ".join([*said, f"{week['preemptions']} preemptions", f"{format_duration(week['lost_s'])} of work lost"])


def _end(kind: str) -> str:
    return kind.rpartition(".")[2]


def _sentence(reason: Mapping[str, Any], seen: frozenset[str]) -> str:
    return mask_ids(str(reason.get("sentence") or reason.get("code") or ""), seen)
