"""Reports of tasks as the agent reads them: progress, cadence, notices, signs of life."""

import json
import os
import time
from pathlib import Path

import pytest

from agent.secret_masks import Masker
from agent.task_progress import NoticeReader, last_sign_s, read_progress
from domain.task_reports import CadenceReport, FailingReport, LoadReport, NoticeReport, TaskProgress
from tests.agent.harness import run_folder

NOTHING_SECRET = Masker(())


def test_the_sdks_report_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that `mizzen.report` writes is read as progress."""
    from mizzen.report import Reporter

    run = run_folder(tmp_path)
    (run.path / "pid.json").write_text('{"started_at_s": 5.0}')
    reporter = Reporter(run.report)
    reporter.loaded(100)
    reporter.saved(150, 1234.5, 4096, 0.25)
    reporter.progress(159, loss=0.5, accuracy=0.75)
    reporter.progress(160, loss=-0.25, infinite=float("inf"))
    reporter.flush()
    progress = read_progress(run, NOTHING_SECRET)
    assert progress.active_at_s == pytest.approx(run.report.stat().st_mtime)
    progress.active_at_s = None
    assert progress == TaskProgress(
        "main", 0, 160, 100, 150, 1234.5, 4096, 0.25, None, checkpoint_write_s=0.25, checkpoint_sent_bytes=4096,
        load=LoadReport("loaded"), metrics={"accuracy": 0.75, "loss": -0.25},
    )  # fmt: skip
    reporter.progress(161, **{f"m{number}": float(number) for number in range(17)})
    reporter.flush()
    assert list(read_progress(run, NOTHING_SECRET).metrics) == [f"m{number}" for number in range(1, 17)]


def test_impossible_metrics_are_ignored(tmp_path: Path) -> None:
    """A task may write anything into its report."""
    run = run_folder(tmp_path)
    run.report.parent.mkdir(exist_ok=True)
    names = {"loss": 1e400, "a b": 1.0, "x" * 49: 1.0, "text": "1", "no": None, "good/one": 3, "flag": True}
    run.report.write_text(json.dumps({"step": 1, "metrics": names}))
    assert read_progress(run, NOTHING_SECRET).metrics == {"good/one": 3.0}
    run.report.write_text(json.dumps({"step": 1, "metrics": [1]}))
    assert read_progress(run, NOTHING_SECRET).metrics == {}


def test_the_sdks_report_of_cadence_loading_and_notices_is_read(tmp_path: Path) -> None:
    """The cadence (W, C and mu), the load state and notices are read as the SDK reported them."""
    from mizzen.notices import Kind, Notice
    from mizzen.report import Reporter

    run = run_folder(tmp_path)
    reporter = Reporter(run.report)
    reader = NoticeReader(run, NOTHING_SECRET)
    assert reader.read() is None
    reporter.loading()
    assert read_progress(run, NOTHING_SECRET).load == LoadReport("started")
    reporter.load_failed(OSError("no such bucket" + "!" * 1000), skipped=2)
    load = read_progress(run, NOTHING_SECRET).load
    assert load is not None and (load.state, load.skipped) == ("failed", 2)
    assert load.error is not None and load.error.startswith("OSError: no such bucket") and len(load.error) == 500
    reporter.loaded(None, skipped=1)
    assert read_progress(run, NOTHING_SECRET).load == LoadReport("none", None, 1)
    reporter.loaded(100)
    assert (read_progress(run, NOTHING_SECRET).load, read_progress(run, NOTHING_SECRET).resumed_step) == (
        LoadReport("loaded"),
        100,
    )
    reporter.save_failed(3, 1200.5, "step 140 was not saved", "max_failures is 2")
    failing = FailingReport(3, 1200.5, "step 140 was not saved", "max_failures is 2")
    assert read_progress(run, NOTHING_SECRET).failing == failing
    reporter.cadence(805.0, 30.0, float("inf"), 2.0, "hazard")
    assert read_progress(run, NOTHING_SECRET).cadence == CadenceReport(805.0, 30.0, None, 2.0, "hazard")
    reporter.saved(150, 1234.5, 4096, 0.25, write_s=3.0)
    assert read_progress(run, NOTHING_SECRET).checkpoint_write_s == 3.0
    assert read_progress(run, NOTHING_SECRET).failing is None
    reporter.noticed(Notice("aws", Kind.PREEMPT, 5.0, 125.0, True, "terminate"), "Save now.")
    told = NoticeReport("aws", "preempt", True, 5.0, 125.0, "terminate", "Save now.")
    assert read_progress(run, NOTHING_SECRET).notice == reader.read() == told
    assert told.takes_machine
    reporter.noticed(Notice("aws", Kind.REBALANCE, 6.0, None, False, "leave"))
    again = reader.read()
    assert again is not None and not again.takes_machine


@pytest.mark.parametrize(
    ("platform", "kind", "certain", "takes"),
    [
        ("gcp", "preempt", True, True),
        ("slurm", "walltime", True, True),
        ("gcp", "age-limit", True, True),
        ("aws", "preempt", False, False),
        ("aws", "stop", True, False),
        ("mizzen", "preempt", True, False),
        ("sigterm", "stop", True, False),
    ],
)
def test_a_signal_alone_is_no_word_of_the_platform(platform: str, kind: str, certain: bool, takes: bool) -> None:
    """A SIGTERM, which a launcher also sends to other ranks after a failure, does not count as a reclaimed machine."""
    assert NoticeReport(platform, kind, certain, 5.0).takes_machine is takes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"step": "x", "checkpoint": 3, "resumed_step": true}',
        '{"step": -1, "checkpoint": {"at_s": NaN, "bytes": 1e999, "duration_s": -1}}',
        "[" * 50_000,
        " " * 100_000 + "{}",
        '{"step": 99999999999999999999}',
        '{"load": {"state": "eaten"}, "cadence": {"interval_s": "5"}, "notice": {"platform": "aws"}}',
        '{"load": [], "cadence": {"cost_s": 3}, "notice": {"platform": "a/b", "kind": "preempt", "at_s": 3}}',
        '{"notice": {"platform": "aws", "kind": "preempt", "at_s": 1e300}, "checkpoint": {"at_s": 1e300}}',
        '{"notice": {"platform": "aws", "kind": ["preempt"], "at_s": 3}, "load": {"state": ["failed"]}}',
    ],
)
def test_forged_reports_are_ignored(tmp_path: Path, text: str) -> None:
    """A malformed report is read as no progress, without an error."""
    run = run_folder(tmp_path)
    run.report.write_text(text)
    assert read_progress(run, NOTHING_SECRET) == TaskProgress("main", 0)


def test_words_of_a_forged_report_are_bounded_and_can_be_kept(tmp_path: Path) -> None:
    """Texts in a report are truncated, and characters that no database accepts are replaced."""
    run = run_folder(tmp_path)
    run.report.write_text(json.dumps({"load": {"state": "failed", "error": "a\0\ud800" + "b" * 9999}}))
    load = read_progress(run, NOTHING_SECRET).load
    assert load is not None and load.error == "a?" + "b" * 497


def test_words_of_a_report_are_masked(tmp_path: Path) -> None:
    """Texts in a report are masked like the output, even if the SDK has cut them within a secret."""
    run = run_folder(tmp_path)
    masker = Masker(["hunter2-the-long-one"])
    told = {"platform": "aws", "kind": "preempt", "at_s": 3.0, "words": "hunter2-the-long-one", "decision": "save"}
    body = {
        "load": {"state": "failed", "error": "no access with hunter2-the-long-one"},
        "cadence": {"interval_s": 5, "source": "hunter2-the-long-one"},
        "notice": told,
    }
    run.report.write_text(json.dumps(body))
    found = read_progress(run, masker)
    assert found.load == LoadReport("failed", "no access with ***")
    assert found.cadence is not None and found.cadence.source == "***"
    assert found.notice is not None and (found.notice.words, found.notice.decision) == ("***", "save")
    assert NoticeReader(run, masker).read() == found.notice
    unknown = read_progress(run, None)
    assert unknown.load == LoadReport("failed", "***") and "hunter2" not in str(unknown)
    for length in range(1, 20):
        error = "x" * (500 - length) + "hunter2-the-long-one"[:length]
        run.report.write_text(json.dumps({"load": {"state": "failed", "error": error}}))
        load = read_progress(run, masker).load
        assert load is not None and load.error == ("x" * (500 - length) + "***")[:500]


def test_a_report_that_is_no_file(tmp_path: Path) -> None:
    """A link in place of the report is not followed, and a pipe is not waited for."""
    run = run_folder(tmp_path)
    (tmp_path / "other.json").write_text('{"step": 1}')
    run.report.symlink_to(tmp_path / "other.json")
    assert read_progress(run, NOTHING_SECRET).step is None
    run.report.unlink()
    os.mkfifo(run.report)
    assert read_progress(run, NOTHING_SECRET).step is None


def test_signs_of_life(tmp_path: Path) -> None:
    """The start, output and reports are signs of life; a file time in the future counts as now."""
    run = run_folder(tmp_path)
    assert last_sign_s(run) is None
    (run.path / "pid.json").write_text('{"started_at_s": 50.0}')
    assert last_sign_s(run) == 50.0
    run.output.touch()
    os.utime(run.output, (70.0, 70.0))
    assert last_sign_s(run) == 70.0
    run.report.touch()
    os.utime(run.report, (60.0, 60.0))
    assert last_sign_s(run) == 70.0
    os.utime(run.report, (1e11, 1e11))
    assert (last_sign_s(run) or 1e11) <= time.time()
