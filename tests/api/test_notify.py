"""Receivers of notifications over the API: which documents are refused, and what is shown."""

from typing import Any

import pytest
from sqlalchemy import text

from domain.phases import Phase
from tests.api.calls import act, get
from tests.api.world import ApiWorld, document

HOOK = {"webhook": "https://hooks.example.org/p4th", "secret": "hf-token"}
IN_SECRET = {**HOOK, "webhook": {"secret": "hf-token"}}


@pytest.mark.parametrize(
    ("receiver", "path", "message"),
    [
        ({**HOOK, "webhook": "http://hooks.example.org/"}, "webhook",
         "must be https; an operator can allow networks for http with notify.allow"),
        ({**HOOK, "webhook": "https://10.0.0.1/"}, "webhook",
         "cannot be used: it is not at a public address; an operator can allow it with notify.allow"),
        ({**HOOK, "webhook": "https://[::ffff:127.0.0.1]/"}, "webhook",
         "cannot be used: it is not at a public address; an operator can allow it with notify.allow"),
        ({**HOOK, "secret": "hf-tokn"}, "secret", "unknown secret of tenant vision; did you mean hf-token?"),
        ({**HOOK, "webhook": {"secret": "hf-tokn"}}, "webhook.secret",
         "unknown secret of tenant vision; did you mean hf-token?"),
    ],
)  # fmt: skip
async def test_receivers_that_are_refused(world: ApiWorld, receiver: Any, path: str, message: str) -> None:
    """The error names the field and what the operator's settings allow; nothing is stored."""
    answer = await act(world, "/v1/workloads", "vision", document(notify=[receiver]))
    assert answer.status_code == 422
    assert [(one["path"], one["message"]) for one in answer.json()["errors"]] == [(f"notify[0].{path}", message)]
    assert (await get(world, "/v1/workloads"))["items"] == []


async def test_the_document_and_the_deliveries_are_shown(world: ApiWorld) -> None:
    """`spec` can be submitted again; the state of a notification has neither the path of a URL nor a secret."""
    made = await act(world, "/v1/workloads", "vision", document(notify=[HOOK, IN_SECRET]))
    assert made.status_code == 202, made.text
    body = made.json()
    assert body["spec"]["notify"] == [HOOK, IN_SECRET]
    assert body["notifications"] == []
    await act(world, f"/v1/workloads/{body['id']}/cancel", "vision", {})
    with world.session() as session:
        session.execute(text("update delivery set tries = 1, error = 'the answer has the status 503'"))
    shown = await get(world, f"/v1/workloads/{body['id']}")
    assert shown["phase"] == Phase.CANCELLED
    assert sorted((one["kind"], one["receiver"], one["state"], one["error"]) for one in shown["notifications"]) == [
        ("workload.cancelled", "https://hooks.example.org", "due", "the answer has the status 503"),
        ("workload.cancelled", "the webhook in secret hf-token", "due", "the answer has the status 503"),
    ]
