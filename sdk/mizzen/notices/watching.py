"""The current notice of this process: set by signals and by a thread that polls, read without a lock.

Each of the two writers has a name of its own, so neither needs a lock: a handler that takes one can meet the frame that
holds it. A forked child keeps what its parent was told, but watches nothing until it asks to.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from mizzen.notices.notice import Notice, Watcher

PREEMPTED_EXIT_CODE = 143
"""128 + SIGTERM. mizzen counts any exit after a notice as preempted; other supervisors know this one."""

MAX_BACKOFF_S = 30.0

_log = logging.getLogger(__name__)

_noticed = False
_signalled: Notice | None = None  # Written by signal handlers, which run in the main thread only.
_polled: Notice | None = None  # Written by the thread that polls.
_watcher: Watcher | None = None
_fallback: Watcher | None = None  # What signals mean while the platform is not known.
_poller: "_Poller | None" = None
_starting = threading.Lock()


def preempted() -> bool:
    """Whether this process was told that it, or its machine, will certainly be stopped soon."""
    return _noticed


def current() -> Notice | None:
    """The notice to act upon: the certain end that comes first, or else a recommendation; None: nothing was said.

    It is the same object until a more urgent one takes its place.
    """
    signalled, polled = _signalled, _polled
    if signalled is not None and signalled.supersedes(polled):
        return signalled
    return polled


def watcher() -> Watcher | None:
    """The platform's watcher; None: `watch` was not called, or the platform is still being looked for."""
    return _watcher


def watching() -> bool:
    """Whether a thread of this process polls the platform, or is looking for it."""
    return _poller is not None and _poller.is_alive()


def watch(chosen: Watcher | None = None) -> bool:
    """Watch for notices from now on: the platform's signals, and what it says when it is polled.

    Returns at once. A platform that the environment does not name is looked for in the background, for a second; a
    thread goes on only where there is something to poll. Calling it again changes nothing, but another `chosen` watcher
    takes the place of the one before.

    Args:
        chosen: the platform's watcher; by default the platform is found (`detect`).

    Returns:
        Whether the signals' handlers are in place: only the main thread can put them there.

    Raises:
        ValueError: a variable that configures notices has a bad value; the message names it.
    """
    global _watcher, _poller
    from mizzen.notices.detection import from_environment

    with _starting:
        if chosen is None and (_watcher is not None or watching()):
            return _install(_watcher.signals if _watcher else (signal.SIGTERM,))
        found = chosen if chosen is not None else from_environment(os.environ)
        if found is not None and found is _watcher:
            return _install(found.signals)
        if _poller is not None:
            _poller.stop()
            _poller = None
        _watcher = found
        if found is None or found.period_s is not None:
            _poller = _Poller(found)
            _poller.start()
        return _install(found.signals if found is not None else (signal.SIGTERM,))


def unwatch() -> None:
    """Stop polling, and forget the watcher. What was noticed stays noticed, and handlers of signals stay in place."""
    global _watcher, _poller
    with _starting:
        if _poller is not None:
            _poller.stop()
        _poller = _watcher = None


def acknowledge() -> bool:
    """Tell the platform that the last save is done, where one listens and its watcher was asked to (Azure).

    Returns whether it worked; never raises.
    """
    try:
        if _watcher is not None:
            _watcher.acknowledge()
    except Exception as error:
        _log.warning("the notice could not be acknowledged: %s", error)
        return False
    return True


def watch_sigterm() -> bool:
    """Let SIGTERM set the flag instead of killing the process, and call the Python handler that was there before.

    Returns whether the handler is in place: only the main thread can put it there.
    """
    return _install((signal.SIGTERM,))


def exit_preempted() -> NoReturn:
    """End the process with exit code 143 after its output and its report are written."""
    from mizzen import report

    report.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(PREEMPTED_EXIT_CODE)


class _Handler:
    """Handles one signal. Each has its own predecessor, so that one put over another's wrapper cannot call in a
    circle.
    """

    def __init__(self, previous: Callable[[int, FrameType | None], object] | int | None) -> None:
        self.previous = previous
        self.pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _noticed, _signalled
        if os.getpid() == self.pid:
            notice = _notice_of(number)
            if notice.supersedes(_signalled):
                _signalled = notice
            _noticed = True
        elif self.previous == signal.SIG_DFL:
            # A forked child, such as a data loader's: its parent's handler must not keep it from being terminated.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if callable(self.previous):
            self.previous(number, frame)


def _notice_of(number: int) -> Notice:
    global _fallback
    known = _watcher
    if known is None or number not in known.signals:
        known = _fallback
        if known is None:
            known = _fallback = _plain()
    return known.on_signal(number)


def _plain() -> Watcher:
    """What a signal means where no watcher was started: what the environment says, and never an error."""
    from mizzen.notices.detection import from_environment
    from mizzen.notices.sigterm import SigtermWatcher

    try:
        return from_environment(os.environ) or SigtermWatcher()
    except ValueError as error:
        _log.warning("notices: %s", error)
        return SigtermWatcher({})


def _install(signals: tuple[signal.Signals, ...]) -> bool:
    """Put a handler over each signal's; whether all are in place."""
    global _fallback
    if _fallback is None:
        # Not in the handler: imports take locks.
        _fallback = _plain()
    for number in signals:
        before = signal.getsignal(number)
        if isinstance(before, _Handler) and before.pid == os.getpid():
            continue
        if threading.current_thread() is not threading.main_thread():
            return False
        signal.signal(number, _Handler(before))
    return True


class _Poller(threading.Thread):
    """Asks the platform again and again. Its errors are logged once and never leave it."""

    def __init__(self, watcher: Watcher | None) -> None:
        super().__init__(name="mizzen-notices", daemon=True)
        self._watcher = watcher
        self._stopped = threading.Event()
        self._complained = False

    def stop(self) -> None:
        """Say nothing any more; the thread ends after the request that it waits for."""
        self._stopped.set()

    def run(self) -> None:
        """Find the platform if it is not known, then poll it until stopped."""
        watcher = self._watcher or self._find()
        if watcher is None or watcher.period_s is None:
            return
        failures = 0
        while not self._stopped.is_set():
            try:
                notice = watcher.poll()
                failures = 0
                self._tell(notice)
            except Exception as error:
                failures += 1
                self._complain(watcher, error)
            self._stopped.wait(backoff_s(watcher.period_s, watcher.window.seconds, failures))

    def _find(self) -> Watcher | None:
        global _watcher
        from mizzen.notices.detection import detect

        try:
            found = detect()
        except Exception as error:
            _log.warning("notices: the platform is not known: %s", error)
            return None
        with _starting:
            if self._stopped.is_set():
                return None
            _watcher = found
        _log.info("notices: on %s, which leaves %g s (%s)", found.platform, found.window.seconds, found.window.source)
        return found

    def _tell(self, notice: Notice | None) -> None:
        global _noticed, _polled
        if notice is None or self._stopped.is_set() or not notice.supersedes(_polled):
            return
        _polled = notice
        if notice.certain:
            _noticed = True
        left_s = notice.left_s(time.time())
        left = "an unknown time" if left_s is None else f"{left_s:.0f} s"
        _log.warning("notice: %s says %s, %s left: %s", notice.platform, notice.kind, left, notice.words)

    def _complain(self, watcher: Watcher, error: Exception) -> None:
        if not self._complained:
            _log.warning("notices of %s cannot be read, and will be tried again: %s", watcher.platform, error)
        self._complained = True


def backoff_s(period_s: float, window_s: float, failures: int) -> float:
    """Seconds until the next poll after `failures` in a row: doubled with each, but never more than a third of the
    window that a notice leaves (or 30 s), so that one is still seen in time.
    """
    longest_s = max(period_s, min(MAX_BACKOFF_S, window_s / 3))
    return min(longest_s, period_s * 2.0 ** min(failures, 20))


def _after_fork() -> None:
    global _poller, _watcher, _fallback, _starting
    _poller = _watcher = _fallback = None
    _starting = threading.Lock()
    for number in signal.Signals:
        handler = signal.getsignal(number)
        if isinstance(handler, _Handler):
            while isinstance(handler, _Handler):
                handler = handler.previous
            # None: a handler that is not Python's, and which cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


os.register_at_fork(after_in_child=_after_fork)
