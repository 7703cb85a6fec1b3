"""Who is notified when a workload, an array or a service has ended, as a document says it."""

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

End = Literal["succeeded", "failed", "cancelled"]
END_PHASES: tuple[End, ...] = get_args(End)
EMAIL_PATTERN = r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$"
"""An e-mail address. It contains no character that ends a header or separates addresses."""


class NotifySpec(BaseModel):
    """A receiver: a webhook or an e-mail address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    webhook: str | None = None
    """URL of the webhook."""
    webhook_secret: str | None = None
    """Name of the tenant's secret with the URL, instead of `webhook`."""
    secret: str | None = None
    """Name of the tenant's secret with the keys that sign the requests of the webhook."""
    email: str | None = None
    on: tuple[End, ...] = END_PHASES
    """The ends of which it is notified; a service has one end."""
    each: bool = False
    """Whether it is also notified of the end of each element of an array."""
