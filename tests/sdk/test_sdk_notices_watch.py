"""The current notice of a process: signals, the polling thread, and forks."""

from collections.abc import Callable

import pytest

from tests.sdk.clouds import Aws, Azure, Cloud, Fixed, refusing, serving, silent, talking
from tests.sdk.scripts import passes, run

ACTION = '{"action": "terminate", "time": "2100-01-01T00:00:00Z"}'


class Staged(Aws):
    """AWS's metadata server; it runs the next stage at every `each`-th request for the interruption."""

    def __init__(self, *stages: Callable[[Aws], None], each: int = 3) -> None:
        super().__init__()
        self._stages = list(stages)
        self._each = each
        self._count = 0

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], str]:
        if path.endswith("instance-action"):
            self._count += 1
            if self._count % self._each == 0 and self._stages:
                self._stages.pop(0)(self)
        return super().answer(method, path, headers, body)


def test_a_polled_notice_needs_no_signal() -> None:
    """A recommendation does not set `preempted`, an interruption does. Each is logged once and is the same object."""

    def advise(cloud: Aws) -> None:
        cloud.rebalance = '{"noticeTime": "2023-11-14T22:13:00Z"}'

    def interrupt(cloud: Aws) -> None:
        cloud.action = ACTION

    script = """
watcher = notices.AwsWatcher()
watcher.period_s = 0.01
assert notices.watch(watcher) and notices.watcher() is watcher
until(notices.current)
advice = notices.current()
assert advice.kind is notices.Kind.REBALANCE and not advice.certain
assert notices.decide(advice, save_s=None).flush
until(notices.preempted)
told = notices.current()
assert told.kind is notices.Kind.PREEMPT and told.certain and told.ends_at_s == 4102444800
asked = watcher._metadata.request
count = []
watcher._metadata.request = lambda *a, **k: (count.append(1), asked(*a, **k))[1]
until(lambda: len(count) > 5)
assert notices.current() is told and notices.watching()
"""
    with serving(Staged(advise, interrupt, each=20)) as base:
        written = passes(script, MIZZEN_AWS_METADATA=base)
    assert written.count("notice: aws reports rebalance") == 1
    assert written.count("notice: aws reports preempt") == 1


def test_errors_are_logged_once_and_tried_again() -> None:
    """Polling errors of a server are logged once, and polling continues until the notice arrives."""

    def fail(cloud: Aws) -> None:
        cloud.action = "garbage"

    def recover(cloud: Aws) -> None:
        cloud.action = None

    def interrupt(cloud: Aws) -> None:
        cloud.action = ACTION

    script = """
watcher = notices.AwsWatcher()
watcher.period_s = 0.001
notices.watch(watcher)
until(notices.preempted)
"""
    with serving(Staged(fail, recover, fail, interrupt)) as base:
        written = passes(script, MIZZEN_AWS_METADATA=base)
    assert written.count("notices: polling aws failed") == 1
    assert "Traceback" not in written


def test_a_watcher_that_breaks_does_not_break_the_training() -> None:
    """An unexpected exception of a poll is logged once, and polling continues."""
    script = """
class Broken(notices.SigtermWatcher):
    polls = 0
    def poll(self):
        self.polls += 1
        raise KeyError("unexpected error")
broken = Broken()
broken.period_s = 0.001
notices.watch(broken)
until(lambda: broken.polls > 3)
assert notices.watching() and notices.current() is None
"""
    assert passes(script).count("unexpected error") == 1


def test_the_platform_is_found_in_the_background() -> None:
    """`watch` returns before the metadata servers respond; the watcher is set after they have responded."""
    script = """
from mizzen.notices import detection
detection.detect = functools.partial(detection.detect, timeout_s=60)
assert notices.watch()
until(notices.watcher)
assert notices.watcher().platform == "azure" and notices.watching()
until(notices.preempted)
assert notices.current().kind is notices.Kind.PREEMPT
"""
    cloud = Azure()
    cloud.evict([cloud.name], "Fri, 01 Jan 2100 00:00:00 GMT")
    with serving(cloud) as base:
        passes(script, **{f"MIZZEN_{name}_METADATA": base for name in ("AWS", "GCP", "AZURE")})


def test_a_process_ends_while_a_server_is_silent() -> None:
    """`watch` and the exit of the process do not wait for a server that does not respond."""
    script = """
from mizzen.notices import detection
detection.detect = functools.partial(detection.detect, timeout_s=60)
assert notices.watch()
assert notices.watching() and notices.watcher() is None
assert notices.watch()
os.kill(os.getpid(), signal.SIGTERM)
assert notices.preempted() and notices.current().platform == "sigterm"
print("left")
"""
    with talking(silent) as (base, freed):
        ended = run(script, **{f"MIZZEN_{name}_METADATA": base for name in ("AWS", "GCP", "AZURE")})
        assert not freed.is_set()
    assert (ended.returncode, ended.stdout) == (0, "left\n"), ended.stderr


def test_no_thread_stays_where_there_is_nothing_to_poll() -> None:
    """If no cloud is detected, or the platform sends signals, no thread remains, only the signal handler."""
    script = """
assert notices.watch()
until(lambda: not notices.watching())
assert notices.watcher().platform == "sigterm" and threads() == []
"""
    nowhere = refusing()
    passes(script, **{f"MIZZEN_{name}_METADATA": nowhere for name in ("AWS", "GCP", "AZURE")})
    passes("notices.watch(); assert threads() == [] and notices.watcher().platform == 'mizzen'", MIZZEN_GRACE_S="3")


def test_one_thread_a_process() -> None:
    """`watch` is idempotent, another watcher replaces the first, and `unwatch` ends the polling thread."""
    script = """
class Counting(notices.SigtermWatcher):
    polls = 0
    def poll(self):
        self.polls += 1
first, second = Counting(), Counting()
first.period_s = second.period_s = 0.001
for _ in range(3):
    assert notices.watch(first) and notices.watch()
    assert notices.watcher() is first
assert threads() == ["mizzen-notices"]
until(lambda: first.polls)
notices.watch(second)
until(lambda: second.polls and len(threads()) == 1)
polls = first.polls
until(lambda: second.polls > 20)
assert first.polls == polls
notices.unwatch()
until(lambda: threads() == [])
assert not notices.watching() and notices.watcher() is None
"""
    passes(script)


def test_a_signal_says_what_the_platform_means_by_it() -> None:
    """Under mizzen's agent, SIGTERM is a preemption that ends after the grace period. A previous handler still runs."""
    script = """
called = []
signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
assert notices.watch() and notices.watch_sigterm()
assert not notices.preempted() and notices.current() is None
os.kill(os.getpid(), signal.SIGTERM)
told = notices.current()
assert notices.preempted() and called == [15]
assert (told.platform, told.kind, told.certain, told.words) == ("mizzen", "preempt", True, "SIGTERM")
assert told.ends_at_s == told.seen_at_s + 7.5
os.kill(os.getpid(), signal.SIGTERM)
assert notices.current() is told and called == [15, 15]
"""
    passes(script, MIZZEN_GRACE_S="7.5")


def test_a_signal_means_the_same_without_a_watcher() -> None:
    """After only `watch_sigterm`, the window of the environment's platform determines the end of the notice."""
    script = """
assert notices.watch_sigterm() and notices.watcher() is None
os.kill(os.getpid(), signal.SIGTERM)
told = notices.current()
assert (told.platform, told.ends_at_s) == ("runpod", told.seen_at_s + 5)
"""
    passes(script, RUNPOD_POD_ID="x")


def test_slurm_has_another_signal() -> None:
    """The signal of Slurm's `--signal` is a notice and does not end the process."""
    script = """
assert notices.watch()
os.kill(os.getpid(), signal.SIGUSR1)
assert notices.current().kind is notices.Kind.WALLTIME
"""
    passes(script, SLURM_JOB_ID="7", MIZZEN_SLURM_SIGNAL="B:USR1@300")


def test_of_a_signal_and_a_poll_the_earlier_end_counts() -> None:
    """Of a signal and a polled notice, the one that ends first is current, in any order of arrival."""
    script = """
class Polled(notices.SigtermWatcher):
    ends_in_s = 1000
    def poll(self):
        return notices.Notice("x", notices.Kind.PREEMPT, time.time(), time.time() + self.ends_in_s, True, "")
polled = Polled()
polled.period_s = 0.001
notices.watch(polled)
until(notices.preempted)
os.kill(os.getpid(), signal.SIGTERM)
assert notices.current().platform == "sigterm"
polled.ends_in_s = 1
until(lambda: notices.current().platform == "x")
"""
    passes(script)


def test_outside_the_main_thread_it_polls_all_the_same() -> None:
    """In another thread no handler can be set, so `watch` returns False; polled notices still arrive."""
    script = """
class Polled(notices.SigtermWatcher):
    def poll(self):
        return self.on_signal(signal.SIGTERM)
polled = Polled()
polled.period_s = 0.001
answers = []
thread = threading.Thread(target=lambda: answers.append((notices.watch_sigterm(), notices.watch(polled))))
thread.start()
thread.join()
until(notices.preempted)
assert answers == [(False, False)] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    passes(script)


FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Newer Pythons warn about forks in multi-threaded processes.

def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

class Quiet(notices.SigtermWatcher):
    def poll(self):
        return None
"""


def test_a_forked_child_does_not_think_that_it_watches() -> None:
    """A forked child has no polling thread and no watcher, keeps the current notice, and can call `watch` itself."""
    script = f"""{FORK}
quiet = Quiet()
quiet.period_s = 0.001
notices.watch(quiet)

def unwatched():
    assert not notices.watching() and notices.watcher() is None and threads() == []
    assert not notices.preempted()
    mine = Quiet()
    mine.period_s = 0.001
    assert notices.watch(mine) and notices.watching() and notices.watcher() is mine
    os.kill(os.getpid(), signal.SIGTERM)
    assert notices.preempted()

assert child(unwatched) == 0
assert notices.watching() and not notices.preempted() and notices.watcher() is quiet
os.kill(os.getpid(), signal.SIGTERM)

def told():
    assert notices.preempted() and notices.current().platform == "sigterm"

assert child(told) == 0
"""
    passes(script)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "under a user's handler"])
def test_a_forked_child_can_be_terminated(wrapped: bool) -> None:
    """SIGTERM ends a forked child, such as a data loader, and is no notice in the parent."""
    script = f"""{FORK}
notices.watch_sigterm()
if {wrapped}:
    ours = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))

def stopped():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

assert child(stopped) == -signal.SIGTERM
assert not notices.preempted()
os.kill(os.getpid(), signal.SIGTERM)
assert notices.preempted()
"""
    passes(script)


def test_a_forked_child_has_the_handler_from_before() -> None:
    """A forked child has the user's own handler, as before `watch_sigterm`."""
    script = f"""{FORK}
called = []
handler = lambda number, frame: called.append(number)
signal.signal(signal.SIGTERM, handler)
notices.watch_sigterm()

def own():
    assert signal.getsignal(signal.SIGTERM) is handler
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == [15] and not notices.preempted()

assert child(own) == 0
"""
    passes(script)


def test_a_bad_variable_is_an_error_of_watch_only() -> None:
    """For an invalid variable, `watch` raises an error that names it, and `watch_sigterm` only logs it."""
    script = """
try:
    notices.watch()
except ValueError as error:
    assert "MIZZEN_PLATFORM='moon'" in str(error), error
else:
    raise AssertionError("no error")
assert notices.watch_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
assert notices.preempted()
"""
    assert "MIZZEN_PLATFORM='moon'" in passes(script, MIZZEN_PLATFORM="moon")


@pytest.mark.parametrize("cloud", [Azure(), Fixed(500, "")], ids=["heard", "failing"])
def test_acknowledging_never_raises(cloud: Cloud) -> None:
    """`acknowledge` returns whether it succeeded, and True if there is nothing to acknowledge."""
    script = """
assert notices.acknowledge()
watcher = notices.AzureWatcher(acknowledges=True)
watcher._event = "event-0"
watcher.period_s = None
notices.watch(watcher)
print(notices.acknowledge())
"""
    with serving(cloud) as base:
        ended = run(script, MIZZEN_AZURE_METADATA=base)
    heard = isinstance(cloud, Azure)
    assert (ended.returncode, ended.stdout) == (0, f"{heard}\n"), ended.stderr
    assert ("could not be acknowledged" in ended.stderr) is not heard
