"""Weekly reports: what they say of a week, and that a receiver gets each week once."""

import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select, text

from activities.notify.weekly import WeeklyReports
from domain.phases import Phase
from infra.config.notify import NotifySettings, ReportReceiver
from infra.db.deliveries import Delivery
from infra.db.weekly_report import last_week, weekly_report
from tests.activities.test_notifications import _sent, _settings, hook, place, post
from tests.activities.world import World, job
from tests.receivers import Mailbox, Webhook

__all__ = ["hook", "place", "post"]
NOW = datetime(2026, 11, 25, 9, tzinfo=UTC)
MONDAY = date(2026, 11, 16)
T0 = datetime(2026, 11, 17, tzinfo=UTC)


@pytest.fixture
def week(place: World) -> World:
    """Tenant t used 2 GPUs for an hour on Tuesday at 3 dollars each, after a wait of ten minutes, and was preempted."""
    used = place.running(job(gpus=2))
    place.release(used, Phase.FAILED)
    place.running(job(gpus=1))  # This week: not in the report.
    with place.session() as session:
        times = {"w": used, "t0": T0, "t1": T0 + timedelta(hours=1), "sent": T0 - timedelta(minutes=10)}
        for statement in (
            "update workload set submitted_at = :sent where id = :w",
            (
                "update attempt set awarded_at = :t0, released_at = :t1, lost_s = 90,"
                ' outcome = \'{"code": "evicted"}\' where workload = :w'
            ),
            (
                "update allocation set awarded_at = :t0, held_at = :t0, released_at = :t1, stopped_at = :t1"
                " where workload = :w"
            ),
            "update cluster_price set since = '-infinity', prices = '{\"a100\": 3.0}'",
        ):
            session.execute(text(statement), times)
    return place


def test_a_week_has_use_waits_lost_work_and_cost(week: World) -> None:
    """Only what was in the week counts."""
    with week.session() as session:
        [found] = weekly_report(session, MONDAY, None)
        assert (found.tenant, found.hours["a100"], found.usd) == ("t", pytest.approx(2.0), pytest.approx(6.0))
        assert (found.started, found.median_wait_s, found.p95_wait_s) == (1, 600.0, 600.0)
        assert (found.preemptions, found.lost_s) == (1, 90.0)
        assert found.unpriced_h == pytest.approx(found.hours.get("cpu", 0.0))
        assert weekly_report(session, MONDAY, "another") == []
        assert weekly_report(session, MONDAY - timedelta(days=7), None) == []


@pytest.mark.parametrize(
    ("now", "monday"),
    [("2026-11-22T23:59:59+00:00", "2026-11-09"), ("2026-11-23T00:00:00+00:00", "2026-11-16"),
     ("2026-11-23T00:30:00+01:00", "2026-11-09"), ("2026-11-25T09:00:00+00:00", "2026-11-16")],
)  # fmt: skip
def test_the_last_week_is_over(now: str, monday: str) -> None:
    """A week ends on Sunday at midnight UTC."""
    assert last_week(datetime.fromisoformat(now)) == date.fromisoformat(monday)


def test_each_receiver_gets_a_week_once(week: World, hook: Webhook, post: Mailbox, tmp_path: Path) -> None:
    """By webhook and by mail, whatever the number of rounds and restarts; the next week is another report."""
    (tmp_path / "key").write_text("report-key\n")
    receivers = (
        ReportReceiver(webhook=hook.url(), secret_file=tmp_path / "key"),
        ReportReceiver(email="head@example.org", tenant="t"),
        ReportReceiver(email="head@example.org", tenant="another"),
    )
    settings = _settings(week, post.port, reports=receivers)
    for _ in range(3):  # As three workers that start one after the other.
        WeeklyReports(week.engine, receivers).round(NOW)
        _sent(week, settings)
    [got] = hook.got
    assert got.is_signed(b"report-key") and got.json["type"] == "report"
    data = got.json["data"]
    assert (data["from"], data["to"]) == ("2026-11-16", "2026-11-22")
    assert data["tenants"][0]["usd"] == pytest.approx(6.0)
    mails = [mail.get_content() for _, mail in post.got]
    assert [mail["Subject"] for _, mail in post.got] == ["mizzen: the week from 2026-11-16 to 2026-11-22"] * 2
    (own,) = (mail for mail in mails if "tenant t:" in mail)
    assert re.search(r"a100 2\.0 h.*; \$6\.00; 1 started; .*they waited 10m \(median\)", own), own
    assert "1 preemptions; 1m 30s of work lost" in own
    assert [mail for mail in mails if "nothing was used" in mail]
    WeeklyReports(week.engine, receivers).round(NOW + timedelta(days=7))
    with week.session() as session:
        assert session.scalar(select(func.count()).select_from(Delivery)) == 6


def test_mail_needs_a_server() -> None:
    """Reports by mail without `smtp` are an error of the settings."""
    with pytest.raises(ValueError, match="reports: email needs smtp"):
        NotifySettings(reports=(ReportReceiver(email="a@example.org"),))
