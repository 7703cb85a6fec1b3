"""The field `notify` of documents: who is notified at the end of a workload, an array or a service."""

from typing import Any

from api.documents.forms import TRUTH, Field, Form, cases, list_of, name, one_of, section, text
from api.documents.position import At
from domain.notify_spec import EMAIL_PATTERN, END_PHASES, NotifySpec
from domain.patterns import whole_numbers

_MOST = 16
_HOST = r"([A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])"
URL_PATTERN = rf"^https?://{_HOST}(:{whole_numbers(1, 65535)})?(/[!-~]*)?$"
_URL = text("a URL", 2000, URL_PATTERN, "must be a URL such as https://hooks.example.org/mizzen, without a user",
            kind="webhook")  # fmt: skip
_EMAIL = text("an e-mail address", 320, EMAIL_PATTERN, "must be one address such as alice@example.org", kind="email")
_IN_SECRET = section({"secret": Field(name("secret"), missing="give the name of the tenant's secret with the URL")})
_WEBHOOK = cases(
    {
        str: _URL.to(lambda url: {"webhook": url}),
        dict: _IN_SECRET.to(lambda one: {"webhook_secret": one.get("secret")}),
    },
    "must be a URL, or the secret that has it, it is {}",
)
_ONE_RECEIVER = "Either webhook and secret, or email, is given"
_EACH = "Only a document with an array has each"
_ENDS = ", ".join(END_PHASES)


def _receiver(at: At, values: dict[str, Any]) -> Any:
    given = {key for key in ("webhook", "secret", "email") if at.get(key).value is not None}
    if given not in ({"webhook", "secret"}, {"email"}):
        return at.wrong("must have either the keys webhook and secret, or the key email", rule=_ONE_RECEIVER)
    return NotifySpec(**values)


_RECEIVER = {
    "webhook": Field(_WEBHOOK, "URL that gets a signed POST request; {secret: NAME}: the tenant's secret NAME has the "
                     "URL", to=""),
    "secret": Field(name("secret"), "Name of the tenant's secret with the keys that sign the requests of a webhook"),
    "email": Field(_EMAIL),
}  # fmt: skip
_WHEN = {
    "on": Field(list_of(one_of(END_PHASES, "an end"), "ends", len(END_PHASES), unique=True,
                        empty=f"must contain at least one of {_ENDS}; omit it for all").to(tuple),
                f"Ends of which it is notified; default: {_ENDS}"),
    "each": Field(TRUTH, f"Whether it is also notified of the end of each element of an array. {_EACH}", default=False),
}  # fmt: skip


def _list(fields: dict[str, Field]) -> Form:
    one = section(fields).checked(_receiver, _ONE_RECEIVER)
    return list_of(one, "receivers", _MOST).to(tuple)


NOTIFY = Field(_list(_RECEIVER | _WHEN), "Who is notified when the workload has ended, or the whole array")
SERVICE_NOTIFY = Field(_list(_RECEIVER), "Who is notified when the service has ended")
NOTIFY_RULES = (_EACH,)


def check_each(at: At, values: dict[str, Any]) -> dict[str, Any]:
    """Adds an error for each receiver that wants the ends of elements if the document has no array."""
    if values.get("array") is None and at.get("array").value is None:
        places = at.get("notify")
        for number, one in enumerate(places.value if isinstance(places.value, list) else ()):
            place = places.child(number, one).get("each")
            if place.value is True:
                place.wrong("not possible without array", rule=_EACH)
    return values
