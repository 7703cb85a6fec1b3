"""Notifications on Postgres, a real HTTP server and a real SMTP server: what is sent, when, and what a failure does."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, text

from activities.notify.alerts import Alerts
from activities.notify.notifier import Notifier
from domain.notify_spec import NotifySpec
from domain.phases import Phase
from domain.service import ServiceSpec
from domain.spec import ArraySpec
from infra.config.notify import AlertReceiver, NotifySettings, SmtpSettings
from infra.config.settings import Settings
from infra.db import events
from infra.db.array_rows import end_array, stop_waiting
from infra.db.deliveries import Delivery, deliveries_of
from infra.db.rounds import note_round
from infra.db.services import ServiceRow, ServiceVersion
from infra.db.tenants import Secret
from infra.errors import ConfigurationError
from infra.keys import encrypt_secret, load_master_key
from infra.stack.certificate import write_certificate
from tests.activities.world import World
from tests.receivers import Mailbox, Webhook, mailbox, webhook

KEY = b"k" * 32
Notify = Callable[..., Notifier]


@pytest.fixture
def hook() -> Iterator[Webhook]:
    """A server that answers requests of webhooks with 204."""
    with webhook() as running:
        yield running


@pytest.fixture
def post() -> Iterator[Mailbox]:
    """A server that takes mail."""
    with mailbox() as running:
        yield running


@pytest.fixture
def place(world: World) -> World:
    """An installation with a machine, whose tenant `t` has the secret `hook`."""
    world.region("r")
    world.machine("r/c/m", 4)
    _secret(world, "hook", "whsec_" + "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=")
    return world


def _secret(world: World, name: str, value: str) -> None:
    key = load_master_key(world.settings.master_key_path, create=True)
    with world.session() as session:
        session.merge(Secret(tenant="t", name=name, box=encrypt_secret(key, value)))


def _settings(world: World, port: int | None = None, **more: Any) -> Settings:
    smtp = SmtpSettings(host="127.0.0.1", port=port or 1, tls="none", sender="mizzen@example.org")
    own = NotifySettings(**{"allow": ("127.0.0.0/8",), "smtp": smtp, "retry_s": 0.01, "timeout_s": 1.0, **more})
    return world.settings.model_copy(update={"notify": own})


def _sent(world: World, settings: Settings, rounds: int = 1) -> None:
    """Runs rounds of a notifier, each to its end."""

    async def run() -> None:
        notifier = Notifier(world.engine, settings)
        for _ in range(rounds):
            await notifier.round()
            await notifier.settle()
            await asyncio.sleep(0.05)

    asyncio.run(run())


def _told(world: World, subject: str) -> list[Delivery]:
    with world.session() as session:
        return list(deliveries_of(session, subject))


def _ended(world: World, phase: Phase, *receivers: NotifySpec, **more: Any) -> str:
    workload = world.running(notify=receivers, **more)
    world.release(workload, phase)
    return workload


def to_hook(url: str, **more: Any) -> NotifySpec:
    """Returns the receiver with a URL and the secret `hook`."""
    return NotifySpec(webhook=url, secret="hook", **more)


def test_a_webhook_is_signed_and_says_what_ended(place: World, hook: Webhook) -> None:
    """The request has the headers of Standard Webhooks; the id is the same in each try, and nothing is sent again."""
    hook.answers = [500, 204]
    workload = _ended(place, Phase.FAILED, to_hook(hook.url()))
    _sent(place, _settings(place), rounds=4)
    first, second = hook.got
    assert first.headers["webhook-id"] == second.headers["webhook-id"] and first.body == second.body
    assert all(one.is_signed(KEY) and one.path == "/hook?token=t0ken" for one in hook.got)
    assert second.headers["content-type"] == "application/json"
    assert second.json["type"] == "workload.failed"
    data = second.json["data"]
    assert (data["id"], data["name"], data["tenant"], data["phase"]) == (workload, workload, "t", "failed")
    assert data["reason"]["code"] == "retries_exhausted" and "ended with" in data["reason"]["sentence"]
    [told] = _told(place, workload)
    assert (told.state, told.tries, told.error) == ("delivered", 2, None)


def test_keys_are_rotated(place: World, hook: Webhook) -> None:
    """A secret with two keys signs with both."""
    _secret(place, "hook", "new-key\nold-key")
    _ended(place, Phase.SUCCEEDED, to_hook(hook.url()))
    _sent(place, _settings(place))
    assert hook.got[0].is_signed(b"new-key", 0) and hook.got[0].is_signed(b"old-key", 1)


def test_only_the_ends_that_are_wanted(place: World, hook: Webhook, post: Mailbox) -> None:
    """Each receiver gets the ends in its `on`; a workload that goes back to the queue has not ended."""
    receivers = (to_hook(hook.url(), on=("failed",)), NotifySpec(email="a@example.org", on=("succeeded", "cancelled")))
    failed = _ended(place, Phase.FAILED, *receivers)
    done = _ended(place, Phase.SUCCEEDED, *receivers)
    queued = _ended(place, Phase.PENDING, *receivers)
    _sent(place, _settings(place, post.port))
    assert [one.json["data"]["id"] for one in hook.got] == [failed]
    [(envelope, mail)] = post.got
    assert (envelope.mail_from, envelope.rcpt_tos) == ("mizzen@example.org", ["a@example.org"])
    assert mail["Subject"] == f"mizzen: {done} succeeded (tenant t)" and mail["Auto-Submitted"] == "auto-generated"
    assert f"mizzen show {done}" in mail.get_content()
    [told] = _told(place, done)
    assert mail["Message-ID"] == f"<{told.id}@example.org>"
    assert _told(place, queued) == []


def test_an_array_is_one_end(place: World, hook: Webhook) -> None:
    """One notification for an array; one more for each element that ended, if that is asked for."""
    each, whole = to_hook(hook.url("/each"), each=True), to_hook(hook.url("/whole"))
    array = place.submit(array=ArraySpec(ranges=((0, 9, 1),)), notify=(each, whole), id_="wl-array0123456789")
    place.tick()
    for element in (f"{array}-0", f"{array}-1"):
        place.run(element)
        place.release(element, Phase.FAILED if element.endswith("1") else Phase.SUCCEEDED)
    with place.session() as session:
        session.execute(text("select from workload where id = :id for update"), {"id": array})
        stop_waiting(session, [array], whole=False)
    for element in (f"{array}-2", f"{array}-3"):
        place.run(element)
        place.release(element, Phase.SUCCEEDED)
    with place.session() as session:
        end_array(session, array)
    _sent(place, _settings(place), rounds=3)
    of = {path: [one.json for one in hook.got if one.path == path] for path in ("/each", "/whole")}
    assert sorted(one["data"]["id"] for one in of["/each"]) == [array, *(f"{array}-{n}" for n in range(4))]
    [one] = of["/whole"]
    assert one["type"] == "workload.failed" and one["data"]["id"] == array
    assert one["data"]["reason"]["sentence"] == "3 of 10 elements succeeded, 1 failed, 6 were cancelled"


@pytest.mark.parametrize("kind", ["redirect", "silent", "huge"])
def test_servers_that_misbehave(place: World, hook: Webhook, kind: str) -> None:
    """A redirect is not followed, silence ends at the timeout, and an endless answer is not read."""
    if kind == "redirect":
        hook.answers = [307]
    elif kind == "silent":
        hook.hangs = threading.Event()
    else:
        hook.huge = True
    workload = _ended(place, Phase.SUCCEEDED, to_hook(hook.url()))
    _sent(place, _settings(place, retry_s=60))
    [told] = _told(place, workload)
    assert [one.path for one in hook.got] == ["/hook?token=t0ken"]
    assert (told.state, told.tries) == (("delivered", 1) if kind == "huge" else ("due", 1))
    assert told.error == {
        "redirect": "the answer is a redirect (status 307), which is not followed",
        "silent": "no answer within 1 s", "huge": None,
    }[kind]  # fmt: skip


def test_a_slow_receiver_delays_no_other(place: World, hook: Webhook, post: Mailbox) -> None:
    """While a receiver with many notifications does not answer, others get theirs at once."""
    with webhook() as slow:
        slow.hangs = threading.Event()
        for _ in range(4):
            _ended(place, Phase.SUCCEEDED, *[to_hook(slow.url())] * 4)

        async def run() -> None:
            notifier = Notifier(place.engine, _settings(place, post.port, timeout_s=30.0))
            await notifier.round()
            done = await asyncio.to_thread(
                _ended, place, Phase.SUCCEEDED, to_hook(hook.url()), NotifySpec(email="a@example.org")
            )
            while {one.state for one in _told(place, done)} != {"delivered"}:
                await notifier.round()
                await asyncio.sleep(0.02)
            assert len(slow.got) == 4  # At most so many at a time.
            assert slow.hangs is not None
            slow.hangs.set()
            await notifier.settle()

        asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "allow", "why"),
    [
        ("http://127.0.0.1:{port}/", (), "it is not at a public address"),
        ("http://localhost:{port}/", (), "it is not at a public address"),
        ("http://[::ffff:127.0.0.1]:{port}/", ("10.0.0.0/8",), "it is not at a public address"),
        ("http://169.254.169.254/latest", ("10.0.0.0/8",), "it is not at a public address"),
        ("https://[64:ff9b::7f00:1]/", (), "it is not at a public address"),
        ("https://224.0.0.1/", (), "it is not at a public address"),
        ("http://93.184.216.34/", (), "it is not https"),
    ],
)
def test_addresses_that_are_not_allowed(
    place: World, hook: Webhook, url: str, allow: tuple[str, ...], why: str
) -> None:
    """No request is sent to the installation's own network, however the URL writes it."""
    workload = _ended(place, Phase.SUCCEEDED, to_hook(url.format(port=hook.port)))
    _sent(place, _settings(place, allow=allow))
    [told] = _told(place, workload)
    assert told.tries == 1 and told.error is not None and why in told.error and "notify.allow" in told.error
    assert hook.got == []


def test_a_receiver_that_never_answers_is_given_up(place: World, hook: Webhook) -> None:
    """The event names the receiver and the error, without the path of the URL; the workload is as it was."""
    hook.answers = [503]
    workload = _ended(place, Phase.SUCCEEDED, to_hook(hook.url()), NotifySpec(webhook_secret="gone", secret="hook"))
    settings = _settings(place, give_up_s=2.0, timeout_s=30.0)
    while any(one.state == "due" for one in _told(place, workload)):
        _sent(place, settings)
    first, second = sorted(_told(place, workload), key=lambda one: str(one.receiver["webhook"]))
    assert first.state == second.state == "failed" and first.tries > 1
    told = [event["detail"] for event in place.events(workload, "workload.notification_failed")]
    assert {one["receiver"]: one["error"] for one in told} == {
        f"http://127.0.0.1:{hook.port}": "the answer has the status 503",
        "the webhook in secret gone": "tenant t has no secret gone any more",
    }
    assert "t0ken" not in str(told) and place.workload(workload).phase == Phase.SUCCEEDED


def test_the_url_may_be_a_secret(place: World, hook: Webhook) -> None:
    """The URL is read from the secret with each try."""
    _secret(place, "url", hook.url("/s3cret\n"))
    _ended(place, Phase.SUCCEEDED, NotifySpec(webhook_secret="url", secret="hook"))
    _sent(place, _settings(place))
    assert [one.path for one in hook.got] == ["/s3cret"]


@pytest.mark.parametrize("url", ["t0ken", "ftp://t0ken/", "https://t0ken.invalid/", "https://10.0.0.1/t0ken"])
def test_errors_do_not_name_a_url_in_a_secret(place: World, url: str) -> None:
    """An error about a URL from a secret names the secret."""
    _secret(place, "url", url)
    workload = _ended(place, Phase.SUCCEEDED, NotifySpec(webhook_secret="url", secret="hook"))
    _sent(place, _settings(place, timeout_s=10.0))
    [told] = _told(place, workload)
    assert told.tries == 1 and "the webhook in secret url" in str(told.error) and "t0ken" not in str(told.error)


def test_an_authority_that_cannot_be_read(place: World, tmp_path: Path) -> None:
    """The worker does not start, and says which setting is wrong."""
    with pytest.raises(ConfigurationError, match=r"notify\.ca: .*missing"):
        Notifier(place.engine, _settings(place, ca=tmp_path / "missing"))


@pytest.mark.parametrize("tls", ["starttls", "tls"])
def test_mail_with_tls_and_login(place: World, tmp_path: Path, tls: str) -> None:
    """The connection is encrypted and checked before the login; an unknown certificate gets nothing."""
    files = (tmp_path / "mail.crt", tmp_path / "mail.key")
    write_certificate(*files)
    (tmp_path / "password").write_text("pass word\n")
    with mailbox(files, tls_first=tls == "tls") as box:
        smtp = partial(
            SmtpSettings, host="127.0.0.1", port=box.port, sender="m@example.org", user="mizzen", tls=tls,
            password_file=tmp_path / "password",
        )  # fmt: skip
        workload = _ended(place, Phase.SUCCEEDED, NotifySpec(email="a@example.org"))
        _sent(place, _settings(place, smtp=smtp()))
        [told] = _told(place, workload)
        assert "CERTIFICATE_VERIFY_FAILED" in str(told.error) and box.logins == []
        _sent(place, _settings(place, smtp=smtp(ca=files[0])))
    assert box.logins == [(b"mizzen", b"pass word")] and len(box.got) == 1


def test_mail_without_starttls_is_not_sent(place: World, post: Mailbox) -> None:
    """A server that offers no encryption gets no mail, unless the operator asks for none."""
    smtp = SmtpSettings(host="127.0.0.1", port=post.port, sender="m@example.org")
    workload = _ended(place, Phase.SUCCEEDED, NotifySpec(email="a@example.org"))
    _sent(place, _settings(place, smtp=smtp))
    [told] = _told(place, workload)
    assert "STARTTLS" in str(told.error) and post.got == []


def test_names_add_no_header(place: World, post: Mailbox) -> None:
    """Labels and reasons may have line ends: they are text of the body."""
    workload = _ended(place, Phase.SUCCEEDED, NotifySpec(email="a@example.org"))
    with place.session() as session:
        session.execute(
            text("update delivery set facts = facts || jsonb_build_object('name', :name, 'labels', :labels)"
                 " where subject = :id").bindparams(name="x\r\nBcc: b@example.org", id=workload,
                                                    labels='{"a": "1"}')
        )  # fmt: skip
        session.execute(text("update delivery set facts = jsonb_set(facts, '{labels}', '{\"a\": \"1\\r\\nCc: c\"}')"))
    _sent(place, _settings(place, post.port))
    [(envelope, mail)] = post.got
    assert envelope.rcpt_tos == ["a@example.org"] and mail["Bcc"] is None and mail["Cc"] is None
    assert mail["Subject"] == "mizzen: x Bcc: b@example.org succeeded (tenant t)"


def test_a_refused_mail_says_why(place: World, post: Mailbox) -> None:
    """The answer of the server is the error."""
    post.answer = "552 too large\x1b[0m"
    workload = _ended(place, Phase.SUCCEEDED, NotifySpec(email="a@example.org"))
    _sent(place, _settings(place, post.port, retry_s=60))
    assert _told(place, workload)[0].error == "the e-mail server refuses it: 552 too large [0m"


def test_a_service_has_one_end(place: World, hook: Webhook) -> None:
    """The receivers of its newest version are notified when the last replica has ended."""
    with place.session() as session:
        session.add(ServiceRow(id="sv-1", tenant="t", name="chat", version=2))
        session.flush()
        for version, path in ((1, "/old"), (2, "/new")):
            spec = ServiceSpec(name="chat", tenant="t", notify=(to_hook(hook.url(path)),))
            session.add(ServiceVersion(service="sv-1", version=version, spec=spec.model_dump(mode="json")))
    with place.session() as session:
        session.get_one(ServiceRow, "sv-1").ended_at = func.now()
    _sent(place, _settings(place), rounds=2)
    [got] = hook.got
    assert got.path == "/new" and got.json["type"] == "service.ended" and got.json["data"]["name"] == "chat"


def test_a_try_that_is_cut_off_is_made_again(place: World, hook: Webhook) -> None:
    """If the worker dies after the receiver has the request, the next worker sends it with the same id."""
    workload = _ended(place, Phase.SUCCEEDED, to_hook(hook.url()))
    hook.hangs = threading.Event()

    async def run() -> None:
        notifier = Notifier(place.engine, _settings(place, timeout_s=30.0))
        running = asyncio.create_task(notifier.run())
        while not hook.got:
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running])
        await notifier.settle()

    asyncio.run(run())
    assert _told(place, workload)[0].state == "due"
    hook.hangs.set()
    _sent(place, _settings(place))
    first, second = hook.got
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert _told(place, workload)[0].state == "delivered"


def test_alerts_of_operators(place: World, hook: Webhook, post: Mailbox, tmp_path: Path) -> None:
    """New events and states that begin and end, together for each receiver, and each once."""
    (tmp_path / "key").write_text("alert-key\n")
    receivers = (
        AlertReceiver(webhook=hook.url(), secret_file=tmp_path / "key"),
        AlertReceiver(email="ops@example.org", on=("machine.cordoned", "stack.restarted")),
    )
    alerts, settings = Alerts(place.engine, receivers), _settings(place, post.port, alerts=receivers)
    with place.session() as session:
        events.record(session, "machine.lost", machine="r/c/before")
    alerts.round()
    with place.session() as session:
        events.record(
            session, "machine.lost", region="r", machine="r/c/m", reason={"code": "x", "sentence": "it is gone"}
        )
        events.record(session, "machine.cordoned", machine="r/c/m", detail={"by": "k-1"})
        events.record(session, "machine.ready", machine="r/c/m")
        for _ in range(3):
            note_round(session, "expiry", None, "the store does not answer")
    alerts.round()
    alerts.round()
    _sent(place, settings)
    [got] = hook.got
    assert got.is_signed(b"alert-key") and got.json["type"] == "alert"
    assert [(one["kind"], one["subject"], one["text"]) for one in got.json["data"]["alerts"]] == [
        ("machine.lost", "r/c/m", "it is gone"), ("machine.cordoned", "r/c/m", "by k-1"),
        ("loop.failing", "expiry", "the loop is failing: the store does not answer"),
    ]  # fmt: skip
    [(envelope, mail)] = post.got
    assert envelope.rcpt_tos == ["ops@example.org"] and mail["Subject"] == "mizzen: machine.cordoned r/c/m"
    with place.session() as session:
        note_round(session, "expiry", None, None)
        events.record(session, "stack.restarted", region="r")
    alerts.round()
    _sent(place, settings)
    assert post.got[1][1].get_content().strip() == "stack.restarted r: `mizzen events` has more"
    [_, over] = hook.got[1].json["data"]["alerts"]
    assert over["resolved"] and over["kind"] == "loop.failing"


def test_alerts_name_their_kinds() -> None:
    """A setting that names an unknown kind says which there are."""
    with pytest.raises(ValueError, match=r"on: 'machine.gone' must be one of .*machine.lost"):
        AlertReceiver(email="a@example.org", on=("machine.gone",))
    with pytest.raises(ValueError, match="either webhook and secret_file, or email"):
        AlertReceiver(webhook="https://example.org")
    with pytest.raises(ValueError, match="alerts: email needs smtp"):
        NotifySettings(alerts=(AlertReceiver(email="a@example.org"),))
