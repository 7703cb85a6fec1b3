"""Sends notifications at least once: the rows of `infra.db.deliveries` that are due.

A try never waits for another one: tries run concurrently, a few for each lane, and one for a lane that fails. A try
that fails is repeated with backoff, until it is given up. The end that it reports is not affected.
"""

import asyncio
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nacl.exceptions import CryptoError
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from activities.leader import Leader, lead
from activities.notify.message import body_of, email_of
from activities.notify.smtp import send_email
from activities.notify.webhook import NotDelivered, Webhooks
from domain.masking import ID
from infra.config.settings import Settings
from infra.db import events
from infra.db.deliveries import Delivery, due_deliveries, shown_receiver
from infra.db.models import Workload
from infra.db.session import in_db
from infra.db.tenants import Secret
from infra.errors import ConfigurationError
from infra.keys import decrypt_secret, load_master_key

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_EACH = 4
"""The most concurrent tries of a lane."""
_WEBHOOKS, _EMAILS = 32, 4
"""Maximum number of concurrent tries of webhooks, and of e-mails."""
_GROWTH = 4
_MOST_ERROR_CHARACTERS = 500
_DONE = text(
    "update delivery set state = 'delivered', ended_at = now(), tries = tries + 1, error = null"
    " where id = :id and state = 'due'"
)
_FAILED = text(
    "update delivery set tries = tries + 1, error = :error, due_at = now() + make_interval(secs => pause.s),"
    " state = case when now() + make_interval(secs => pause.s) > created_at + make_interval(secs => :give_up_s)"
    " then 'failed' else 'due' end,"
    " ended_at = case when now() + make_interval(secs => pause.s) > created_at + make_interval(secs => :give_up_s)"
    " then now() end"
    " from (select least(:most_s, :first_s * power(:growth, least(tries, 20))) as s"
    " from delivery where id = :id) as pause"
    " where id = :id and state = 'due' returning state"
)
_GIVE_UP = text(
    "update delivery set state = 'failed', ended_at = now(), error = coalesce(error, 'not tried in time')"
    " where state = 'due' and created_at < now() - make_interval(secs => :give_up_s) and id <> all(:sending)"
    " returning id"
)


class Notifier:
    """The loop that sends notifications."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._lookups = ThreadPoolExecutor(8, "notify-lookup")
        self._emails = ThreadPoolExecutor(_EMAILS, "notify-mail")
        own = settings.notify
        self._webhooks = Webhooks(own.networks, own.ca, own.timeout_s, self._lookups)
        self._sending: dict[str, tuple[asyncio.Task[None], str, bool]] = {}
        """The tries in progress by id, each with its lane, and whether it is an e-mail."""
        self._failing: set[str] = set()

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        try:
            await lead(self._engine, Leader.NOTIFYING, "notifications", self.round, _INTERVAL_S)
        finally:
            for task, _, _ in self._sending.values():
                task.cancel()
            self._lookups.shutdown(wait=False, cancel_futures=True)
            self._emails.shutdown(wait=False, cancel_futures=True)

    async def round(self) -> None:
        """Begins the tries that are due. It does not wait for their end."""
        await in_db(self._engine, self._give_up)
        room = _WEBHOOKS + _EMAILS - len(self._sending)
        if room <= 0:
            return
        due = await in_db(self._engine, due_deliveries, list(self._sending), _EACH, room)
        lanes = Counter(lane for _, lane, _ in self._sending.values())
        kinds = Counter(is_email for *_, is_email in self._sending.values())
        for one in due:
            is_email = one.receiver.get("email") is not None
            most = 1 if one.lane in self._failing else _EACH
            if lanes[one.lane] < most and kinds[is_email] < (_EMAILS if is_email else _WEBHOOKS):
                lanes[one.lane] += 1
                kinds[is_email] += 1
                task = asyncio.create_task(self._try(one))
                self._sending[one.id] = task, one.lane, is_email

    async def settle(self) -> None:
        """Waits for the tries in progress."""
        while tasks := [task for task, _, _ in self._sending.values()]:
            await asyncio.wait(tasks)

    async def _try(self, one: Delivery) -> None:
        try:
            try:
                await self._send(one)
            except NotDelivered as error:
                self._failing.add(one.lane)
                await in_db(self._engine, self._note_failure, one, str(error)[:_MOST_ERROR_CHARACTERS])
            else:
                self._failing.discard(one.lane)
                await in_db(self._engine, lambda session: session.execute(_DONE, {"id": one.id}))
        except Exception as error:  # Postgres does not answer: it is sent again.
            _log.warning("notification %s: %s", one.id, type(error).__name__)
        finally:
            self._sending.pop(one.id, None)

    async def _send(self, one: Delivery) -> None:
        """Sends a notification. Raises `NotDelivered`."""
        values, seen = await in_db(self._engine, self._read, one)
        to = one.receiver
        if to.get("email") is None:
            url = values[to["webhook_secret"]].strip() if to.get("webhook_secret") else to["webhook"]
            keys = _in_file(to["secret_file"]) if to.get("secret_file") else values[to["secret"]]
            await self._webhooks.send(url, shown_receiver(to), one.id, body_of(one, seen), keys)
            return
        smtp = self._settings.notify.smtp
        if smtp is None or not (one.tenant is None or smtp.takes(to["email"])):
            raise NotDelivered("the operator's setting notify.smtp does not allow e-mail to this address")
        mail = email_of(one, seen, smtp.sender)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._emails, send_email, smtp, self._settings.notify.timeout_s, mail)

    def _read(self, session: Session, one: Delivery) -> tuple[dict[str, str], frozenset[str]]:
        """Returns the values of the secrets that a receiver needs, and the ids of its tenant's workloads in the facts.

        Raises:
            NotDelivered: a secret is missing or cannot be decrypted.
        """
        names = [name for name in (one.receiver.get("webhook_secret"), one.receiver.get("secret")) if name]
        found = set(ID.findall(str(one.facts.get("reason"))))
        seen = select(Workload.id).where(Workload.id.in_(found), Workload.tenant == one.tenant)
        ids = frozenset(session.scalars(seen)) if found else frozenset[str]()
        return {name: self._secret(session, one.tenant, name) for name in names}, ids

    def _secret(self, session: Session, tenant: str | None, name: str) -> str:
        row = session.get(Secret, (tenant, name))
        if row is None:
            raise NotDelivered(f"tenant {tenant} has no secret {name} any more")
        try:
            return decrypt_secret(load_master_key(self._settings.master_key_path), row.box)
        except (CryptoError, ConfigurationError):
            raise NotDelivered(
                f"the master key cannot decrypt secret {name} of tenant {tenant}; set it again"
            ) from None

    def _note_failure(self, session: Session, one: Delivery, error: str) -> None:
        own = self._settings.notify
        values = {"id": one.id, "error": error, "first_s": own.retry_s, "most_s": own.retry_max_s}
        state = session.scalar(_FAILED, {**values, "growth": _GROWTH, "give_up_s": own.give_up_s})
        if state == "failed":
            _record_given_up(session, session.get_one(Delivery, one.id, populate_existing=True))

    def _give_up(self, session: Session) -> None:
        """Gives up notifications that were not tried in time, because earlier ones of their lane failed slowly."""
        values = {"give_up_s": self._settings.notify.give_up_s, "sending": list(self._sending)}
        for id_ in session.scalars(_GIVE_UP, values).all():
            _record_given_up(session, session.get_one(Delivery, id_))


def _in_file(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise NotDelivered(f"secret_file {path}: {type(error).__name__}") from None


def _record_given_up(session: Session, one: Delivery) -> None:
    about, _, _ = one.kind.partition(".")
    detail: dict[str, Any] = {"notification": one.id, "receiver": shown_receiver(one.receiver), "error": one.error}
    if about == "service":
        detail |= {"service": one.subject, "name": one.facts["name"]}
    events.record(
        session, f"{about}.notification_failed", tenant=one.tenant,
        workload=one.subject if about == "workload" else None, detail=detail, dedup=one.id,
    )  # fmt: skip
