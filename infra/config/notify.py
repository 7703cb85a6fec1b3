"""Settings of notifications: the allowed destinations, and the SMTP server for e-mail."""

from ipaddress import ip_network
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from domain.egress import Network
from domain.notify_spec import EMAIL_PATTERN
from infra.config.section import Section


class SmtpSettings(Section):
    """The SMTP server that sends e-mail."""

    host: str = Field(min_length=1)
    port: int = Field(587, gt=0, lt=65_536)
    tls: Literal["starttls", "tls", "none"] = "starttls"
    """`starttls`: encryption is started on the connection, or nothing is sent; `tls`: it is encrypted from its
    beginning, usually on port 465; `none`: it is not encrypted."""
    ca: Path | None = None
    """PEM file with authorities to trust in addition to the system's."""
    user: str | None = None
    password_file: Path | None = None
    """File with the password of `user`, in its first line."""
    sender: str = Field(pattern=EMAIL_PATTERN)
    """The address in `From`, to which e-mail that cannot be delivered is returned."""
    domains: tuple[str, ...] = ()
    """The domains to which documents may send e-mail; empty: all."""

    @model_validator(mode="after")
    def _login(self) -> "SmtpSettings":
        if (self.user is None) != (self.password_file is None):
            raise ValueError("user and password_file go together: set both or neither")
        if self.user is not None and self.tls == "none":
            raise ValueError("tls: must be starttls or tls if user is set: the password would not be encrypted")
        return self

    def takes(self, address: str) -> bool:
        """Returns whether documents may send e-mail to an address."""
        return not self.domains or address.rpartition("@")[2].lower() in {one.lower() for one in self.domains}


ALERT_EVENTS = (
    "instance.without_owner", "machine.cordoned", "machine.key_offered", "machine.lost", "replica.deletion_held",
    "replica.wrong", "stack.restarted",
)  # fmt: skip
"""Kinds of events that are alerts."""
ALERT_STATES = ("loop.failing", "region.bucket_unavailable", "region.silent")
"""Kinds of alerts about states. There are two alerts for each state: when it begins, and when it ends."""
_ALERTS = (*ALERT_EVENTS, *ALERT_STATES)


class OperatorReceiver(Section):
    """A receiver that is in the settings."""

    webhook: str | None = Field(None, pattern="^https?://[!-~]+$")
    secret_file: Path | None = None
    """File with the keys that sign the requests of `webhook`."""
    email: str | None = Field(None, pattern=EMAIL_PATTERN)

    @model_validator(mode="after")
    def _one(self) -> "OperatorReceiver":
        given = {name for name in ("webhook", "secret_file", "email") if getattr(self, name) is not None}
        if given not in ({"webhook", "secret_file"}, {"email"}):
            raise ValueError("must have either webhook and secret_file, or email")
        return self

    def to_json(self) -> dict[str, str]:
        """Returns the receiver in the form that is stored in a notification."""
        fields = set(OperatorReceiver.model_fields)
        return self.model_dump(mode="json", include=fields, exclude_none=True)


class AlertReceiver(OperatorReceiver):
    """A receiver of alerts for operators."""

    on: tuple[str, ...] = _ALERTS
    """The kinds of alerts that this receiver gets."""

    @model_validator(mode="after")
    def _known(self) -> "AlertReceiver":
        unknown = sorted(set(self.on) - set(_ALERTS))
        if unknown:
            raise ValueError(f"on: {unknown[0]!r} must be one of {', '.join(sorted(_ALERTS))}")
        return self


class ReportReceiver(OperatorReceiver):
    """A receiver of the weekly report."""

    tenant: str | None = None
    """The only tenant of its reports; None: all."""


class NotifySettings(Section):
    """Notifications at the ends of workloads, arrays and services, and alerts for operators."""

    allow: tuple[str, ...] = ()
    """Networks, such as `10.0.0.0/8`, whose addresses webhooks may have, with http or https. Other webhooks have public
    addresses and https."""
    ca: Path | None = None
    """PEM file with authorities to trust in addition to the system's, for webhooks."""
    smtp: SmtpSettings | None = None
    """None: no e-mail is sent, and documents cannot request any."""
    alerts: tuple[AlertReceiver, ...] = ()
    """Who gets alerts. Receivers by e-mail need `smtp`."""
    reports: tuple[ReportReceiver, ...] = ()
    """Who gets a report after each week (UTC). Receivers by e-mail need `smtp`."""
    timeout_s: float = Field(10.0, gt=0)
    """Timeout of one try of a webhook, and of each step of sending an e-mail."""
    retry_s: float = Field(5.0, gt=0)
    """Pause after the first failed try. It is multiplied by four after each further failure."""
    retry_max_s: float = Field(3600.0, gt=0)
    give_up_s: float = Field(86400.0, gt=0)
    """Time after the event, in seconds, after which sending a notification is not tried again."""

    @model_validator(mode="after")
    def _mail(self) -> "NotifySettings":
        for name in ("alerts", "reports"):
            if self.smtp is None and any(one.email is not None for one in getattr(self, name)):
                raise ValueError(f"{name}: email needs smtp")
        return self

    @field_validator("allow")
    @classmethod
    def _networks(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        for one in allow:
            try:
                ip_network(one)
            except ValueError as error:
                raise ValueError(f"{one!r} must be a network such as 10.0.0.0/8 ({error})") from None
        return allow

    @property
    def networks(self) -> tuple[Network, ...]:
        """The networks in `allow`."""
        return tuple(map(ip_network, self.allow))
