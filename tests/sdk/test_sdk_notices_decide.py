"""The decision whether to save at a notice, the precedence of notices, and the platforms that send signals."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.notices import (
    DEFAULT_MARGIN,
    AgentWatcher,
    KubernetesWatcher,
    Notice,
    RunPodWatcher,
    SigtermWatcher,
    SlurmWatcher,
    VastWatcher,
    Watcher,
    decide,
)
from mizzen.notices.current_notice import backoff_s
from mizzen.notices.notice import Kind

NOW_S = 1_700_000_000.0
SECONDS = st.floats(0, 1e6)
MARGINS = st.floats(1, 10)
NOTICES = st.builds(
    Notice,
    platform=st.sampled_from(["aws", "gcp"]),
    kind=st.sampled_from(Kind),
    seen_at_s=st.just(NOW_S),
    ends_at_s=st.none() | st.integers(-100, 1000).map(lambda s: NOW_S + s),
    certain=st.booleans(),
    words=st.just(""),
)


def ends_in(left_s: float | None, certain: bool = True) -> Notice:
    return Notice("aws", Kind.PREEMPT, NOW_S, None if left_s is None else NOW_S + left_s, certain, "")


@given(left_s=st.integers(1, 10**6), save_s=SECONDS, margin=MARGINS)
def test_a_save_is_started_exactly_if_it_fits(left_s: int, save_s: float, margin: float) -> None:
    """If the end is certain, a save is started exactly if its time multiplied by the margin fits in the time left."""
    decision = decide(ends_in(left_s), save_s, margin, now_s=NOW_S)
    assert decision.flush is (save_s * margin <= left_s)
    assert decision.why.startswith("Save now: " if decision.flush else "Rely on the last checkpoint: ")
    assert decision.why.count(". ") == 0 and decision.why.endswith(".")


@given(notice=NOTICES, save_s=SECONDS, less_s=SECONDS, margin=MARGINS, passed_s=st.integers(0, 2000))
def test_later_and_slower_never_turn_no_into_yes(
    notice: Notice, save_s: float, less_s: float, margin: float, passed_s: int
) -> None:
    """If a save is started with some time left, it is also started with more time left or with a faster save."""
    if decide(notice, max(save_s, less_s), margin, now_s=NOW_S + passed_s).flush:
        assert decide(notice, min(save_s, less_s), margin, now_s=NOW_S).flush


@given(save_s=st.none() | SECONDS, margin=MARGINS, left_s=st.none() | st.integers(-10, 10))
def test_advice_is_always_taken(save_s: float | None, margin: float, left_s: int | None) -> None:
    """At a recommendation, or if the end is not known, a save is always started."""
    assert decide(ends_in(left_s, certain=False), save_s, margin, now_s=NOW_S).flush
    assert decide(ends_in(None), save_s, margin, now_s=NOW_S).flush


@given(late_s=st.integers(0, 1000), save_s=st.none() | SECONDS)
def test_nothing_is_started_when_no_time_is_left(late_s: int, save_s: float | None) -> None:
    """At or after the end no save is started, even if its time is not known."""
    assert not decide(ends_in(-late_s), save_s, now_s=NOW_S).flush


def test_the_reason_has_the_figures() -> None:
    """The reason has the platform, the time left, the save's time and the margin, or says that no save was measured."""
    assert decide(ends_in(120), 30, now_s=NOW_S).why == (
        "Save now: aws reports preempt in 120.0 s, and a save takes 30.0 s, times 1.5 for the margin."
    )
    assert "Rely" in decide(ends_in(44), 30, DEFAULT_MARGIN, now_s=NOW_S).why
    assert decide(ends_in(5), None, now_s=NOW_S).why.endswith("no save has been measured yet.")


@pytest.mark.parametrize("save_s", [-1.0, float("nan"), float("inf")])
def test_a_bad_duration_is_named(save_s: float) -> None:
    """For an invalid time of a save, the error has the value and the valid values."""
    with pytest.raises(ValueError, match=f"save_s={save_s}: must be 0 or more"):
        decide(ends_in(1), save_s)


@pytest.mark.parametrize("margin", [0.0, 0.99, float("nan"), float("inf")])
def test_a_bad_margin_is_named(margin: float) -> None:
    """For an invalid margin, the error has the value and the valid values."""
    with pytest.raises(ValueError, match=f"margin={margin}: must be a factor of 1 or more"):
        decide(ends_in(1), 1, margin)


@given(notices=st.lists(NOTICES, min_size=1, max_size=6))
def test_the_most_urgent_notice_stays(notices: list[Notice]) -> None:
    """In any order of arrival, the certain notice that ends first is current; without one, an uncertain notice."""
    held: Notice | None = None
    for notice in notices:
        if notice.supersedes(held):
            held = notice
    assert held is not None
    certain = [n for n in notices if n.certain]
    assert held.certain is bool(certain)
    ends = [n.ends_at_s for n in certain if n.ends_at_s is not None]
    if certain:
        assert held.ends_at_s == (min(ends) if ends else None)
    assert not held.supersedes(held)


@given(period_s=st.floats(0.1, 60), window_s=st.floats(0, 1000), failures=st.integers(0, 10**6))
def test_backing_off_keeps_the_window(period_s: float, window_s: float, failures: int) -> None:
    """The wait between polls grows with each failure, up to a third of the window or the period if that is longer."""
    wait_s = backoff_s(period_s, window_s, failures)
    assert period_s <= wait_s <= max(period_s, window_s / 3)
    assert backoff_s(period_s, window_s, failures + 1) >= wait_s
    assert backoff_s(period_s, window_s, 0) == period_s


@pytest.mark.parametrize(
    ("watcher", "kind", "seconds"),
    [
        (AgentWatcher({"MIZZEN_GRACE_S": "25.5", "MIZZEN_NOTICE_WINDOW_S": "9"}), Kind.PREEMPT, 25.5),
        (RunPodWatcher({}), Kind.PREEMPT, 5),
        (KubernetesWatcher({}), Kind.STOP, 30),
        (KubernetesWatcher({"MIZZEN_NOTICE_WINDOW_S": "600"}), Kind.STOP, 600),
        (SlurmWatcher({}), Kind.PREEMPT, 30),
        (SigtermWatcher({}), Kind.STOP, 10),
        (SigtermWatcher({"MIZZEN_NOTICE_WINDOW_S": "90"}), Kind.STOP, 90),
    ],
    ids=["agent", "runpod", "pod", "pod that was told", "slurm", "plain", "plain that was told"],
)
def test_a_signal_ends_after_the_window(watcher: Watcher, kind: Kind, seconds: float) -> None:
    """SIGTERM is a certain notice that ends after the platform's window, and nothing is polled."""
    notice = watcher.on_signal(signal.SIGTERM)
    assert (notice.platform, notice.kind, notice.certain) == (watcher.platform, kind, True)
    assert notice.ends_at_s == notice.seen_at_s + seconds == notice.seen_at_s + watcher.window.seconds
    assert "SIGTERM" in notice.words
    assert watcher.poll() is None
    assert watcher.period_s is None
    assert watcher.signals == (signal.SIGTERM,)
    assert watcher.window.source


def test_vast_tells_nothing() -> None:
    """Vast has no window and nothing to poll; a SIGTERM there counts as a notice of the platform `sigterm`."""
    watcher = VastWatcher()
    assert (watcher.window.seconds, watcher.period_s, watcher.poll()) == (0, None, None)
    notice = watcher.on_signal(signal.SIGTERM)
    assert (notice.platform, notice.ends_at_s) == ("sigterm", notice.seen_at_s + 10)


@pytest.mark.parametrize("variable", ["MIZZEN_NOTICE_WINDOW_S", "MIZZEN_GRACE_S"])
@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_bad_window_is_named(variable: str, text: str) -> None:
    """For an invalid window in an environment variable, the error has the name, the value and the valid values."""
    with pytest.raises(ValueError, match=f"{variable}='{text}': must be 0 or more seconds"):
        AgentWatcher({variable: text})


def slurm(at_s: float, lead_s: float = 120, **environ: str) -> SlurmWatcher:
    return SlurmWatcher({"SLURM_JOB_END_TIME": str(int(NOW_S)), **environ}, lead_s=lead_s, clock=lambda: at_s)


def test_slurm_tells_the_time_limit_ahead() -> None:
    """The poll reports the job's time limit `lead_s` ahead, without a signal; without a limit nothing is polled."""
    assert slurm(NOW_S - 121).poll() is None
    notice = slurm(NOW_S - 120).poll()
    assert notice is not None
    assert (notice.kind, notice.ends_at_s, notice.certain) == (Kind.WALLTIME, NOW_S, True)
    assert slurm(NOW_S - 120).period_s is not None
    for text in ("", "Unknown", "0", "-1"):
        unknown = SlurmWatcher({"SLURM_JOB_END_TIME": text}, clock=lambda: NOW_S * 2)
        assert (unknown.poll(), unknown.period_s) == (None, None)


def test_slurm_signals_are_told_apart() -> None:
    """The signal of `--signal` after its lead, or any after the limit, is walltime; an earlier one is preemption."""
    asked = {"SBATCH_SIGNAL": "B:TERM@360", "SLURM_RESTART_COUNT": "2"}
    early = slurm(NOW_S - 5000, **asked).on_signal(signal.SIGTERM)
    assert (early.kind, early.ends_at_s) == (Kind.PREEMPT, NOW_S - 5000 + 30)
    assert "requeued 2 times" in early.words
    for before_s in (420, 360, 1):
        lead = slurm(NOW_S - before_s, **asked).on_signal(signal.SIGTERM)
        assert (lead.kind, lead.ends_at_s) == (Kind.WALLTIME, NOW_S)
    limit = slurm(NOW_S + 2).on_signal(signal.SIGTERM)
    assert (limit.kind, limit.ends_at_s) == (Kind.WALLTIME, NOW_S + 32)


def test_slurm_watches_the_signal_that_was_asked_for() -> None:
    """The signal of `--signal` is watched in addition to SIGTERM; without a known end its lead is the time left."""
    watcher = SlurmWatcher({"MIZZEN_SLURM_SIGNAL": "USR1@300", "SBATCH_SIGNAL": "USR2@5"}, clock=lambda: NOW_S)
    assert watcher.signals == (signal.SIGTERM, signal.SIGUSR1)
    assert watcher.on_signal(signal.SIGUSR1).ends_at_s == NOW_S + 300
    term = SlurmWatcher({"SBATCH_SIGNAL": "TERM@300"}, clock=lambda: NOW_S)
    assert term.on_signal(signal.SIGTERM).ends_at_s == NOW_S + 30


@pytest.mark.parametrize(
    ("text", "number"), [("10", 10), ("R:SIGUSR2@60", 12), ("RB:int", 2), ("B:TERM", 15)]
)  # fmt: skip
def test_slurm_forms_of_a_signal(text: str, number: int) -> None:
    """Signals can be numbers or names, with or without SIG, options and a time, as in Slurm."""
    assert number in SlurmWatcher({"MIZZEN_SLURM_SIGNAL": text}).signals


@pytest.mark.parametrize("text", ["NOPE@60", "TERM@soon", "KILL@9", "999", "@60", "TERM@-1"])
def test_a_bad_signal_of_slurm_is_named_where_it_is_ours(text: str) -> None:
    """An invalid signal in mizzen's variable is an error that names it; in Slurm's own variable it is ignored."""
    with pytest.raises(ValueError, match=r"MIZZEN_SLURM_SIGNAL='.*': must be as in Slurm's --signal"):
        SlurmWatcher({"MIZZEN_SLURM_SIGNAL": text})
    assert SlurmWatcher({"SBATCH_SIGNAL": text}).signals == (signal.SIGTERM,)
