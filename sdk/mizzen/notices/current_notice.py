"""Holds the current notice of this process. Signal handlers and a polling thread set it; readers need no lock.

Signal handlers and the polling thread write different variables, so no lock is needed: a signal handler that takes a
lock could deadlock with the frame that it interrupts. A forked child inherits its parent's notices, but does not watch
until it calls `watch`.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from mizzen.logger import logger
from mizzen.notices.notice import Notice, Watcher

PREEMPTED_EXIT_CODE = 143
"""128 + SIGTERM. mizzen counts any exit after a notice as a preemption; other supervisors recognise this code."""

MAX_BACKOFF_S = 30.0

_noticed = False
_signalled: Notice | None = None  # Written by signal handlers, which run in the main thread only.
_polled: Notice | None = None  # Written by the thread that polls.
_watcher: Watcher | None = None
_fallback: Watcher | None = None  # Interprets signals while the platform is unknown.
_poller: "_Poller | None" = None
_starting = threading.Lock()


def preempted() -> bool:
    """Return whether a notice was received that this process or its machine will certainly be stopped soon."""
    return _noticed


def current() -> Notice | None:
    """Return the most urgent notice: the earliest certain end, else a recommendation; None if there is no notice.

    Returns the same object until a more urgent notice replaces it.
    """
    signalled, polled = _signalled, _polled
    if signalled is not None and signalled.supersedes(polled):
        return signalled
    return polled


def watcher() -> Watcher | None:
    """Return the platform's watcher; None if `watch` was not called or the platform is still being detected."""
    return _watcher


def watching() -> bool:
    """Return whether a thread of this process polls the platform, or is detecting it."""
    return _poller is not None and _poller.is_alive()


def watch(chosen: Watcher | None = None) -> bool:
    """Start watching for notices: install signal handlers, and poll the platform in a background thread.

    Returns at once. If the environment does not name the platform, it is detected in the background within a second. A
    thread keeps running only if the platform must be polled. A repeated call changes nothing, except that another
    `chosen` watcher replaces the previous one.

    Args:
        chosen: the watcher to use; by default the platform is detected (`detect`).

    Returns:
        Whether the signal handlers are installed. Only the main thread can install them.

    Raises:
        ValueError: an environment variable for notices is invalid. The message names it.
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
    """Stop polling, and drop the watcher. Received notices and installed signal handlers stay."""
    global _watcher, _poller
    with _starting:
        if _poller is not None:
            _poller.stop()
        _poller = _watcher = None


def acknowledge() -> bool:
    """Acknowledge the notice to the platform after the last save, if its watcher supports that and is set to (Azure).

    Returns whether it succeeded; never raises.
    """
    try:
        if _watcher is not None:
            _watcher.acknowledge()
    except Exception as error:
        logger(__name__).warning("notices: the notice could not be acknowledged: %s", error)
        return False
    return True


before_exit: list[Callable[[], object]] = []
"""Calls of `exit_preempted` before the process exits."""


def watch_sigterm() -> bool:
    """Install a SIGTERM handler that records a notice instead of killing the process, then calls the previous handler.

    Returns whether the handler is installed. Only the main thread can install it.
    """
    return _install((signal.SIGTERM,))


def exit_preempted() -> NoReturn:
    """Exit the process with code 143, after flushing its output and its report."""
    for call in before_exit:
        call()
    flush_output()
    raise SystemExit(PREEMPTED_EXIT_CODE)


def flush_output() -> None:
    """Flush standard output and error; drop what cannot be written.

    On a full disk, the interpreter would replace the exit code by 120, because its own flush at the exit fails.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())
        except (AttributeError, ValueError):
            continue  # There is no stream, or it is closed.


class _Handler:
    """Handler of one signal. Each handler stores its predecessor, so that handlers cannot call each other in a loop."""

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
            # In a forked child, such as a data loader worker, SIGTERM must still terminate the process.
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
    """Return the watcher that interprets signals if none was started: from the environment. Never raises."""
    from mizzen.notices.detection import from_environment
    from mizzen.notices.signals import SigtermWatcher

    try:
        return from_environment(os.environ) or SigtermWatcher()
    except ValueError as error:
        logger(__name__).warning("notices: %s", error)
        return SigtermWatcher({})


def _install(signals: tuple[signal.Signals, ...]) -> bool:
    """Install a handler for each signal. Return whether all are installed."""
    global _fallback
    if _fallback is None:
        # Not in the handler, because imports take locks.
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
    """A thread that polls the platform. Errors are logged once and never raised."""

    def __init__(self, watcher: Watcher | None) -> None:
        super().__init__(name="mizzen-notices", daemon=True)
        self._watcher = watcher
        self._stopped = threading.Event()
        self._complained = False

    def stop(self) -> None:
        """Stop recording notices. The thread ends after its current request."""
        self._stopped.set()

    def run(self) -> None:
        """Detect the platform if it is unknown, then poll it until stopped."""
        watcher = self._watcher or self._find()
        if watcher is None or watcher.period_s is None:
            return
        failures = 0
        while not self._stopped.is_set():
            try:
                notice = watcher.poll()
                failures = 0
                self._publish(notice)
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
            logger(__name__).warning("notices: the platform could not be detected: %s", error)
            return None
        with _starting:
            if self._stopped.is_set():
                return None
            _watcher = found
        logger(__name__).info(
            "notices: platform %s, window %g s (%s)", found.platform, found.window.seconds, found.window.source
        )
        return found

    def _publish(self, notice: Notice | None) -> None:
        global _noticed, _polled
        if notice is None or self._stopped.is_set() or not notice.supersedes(_polled):
            return
        _polled = notice
        if notice.certain:
            _noticed = True
        left_s = notice.left_s(time.time())
        left = "an unknown time" if left_s is None else f"{left_s:.0f} s"
        logger(__name__).warning("notice: %s reports %s, %s left: %s", notice.platform, notice.kind, left, notice.words)

    def _complain(self, watcher: Watcher, error: Exception) -> None:
        if not self._complained:
            logger(__name__).warning("notices: polling %s failed and is retried: %s", watcher.platform, error)
        self._complained = True


def backoff_s(period_s: float, window_s: float, failures: int) -> float:
    """Return the seconds until the next poll, after `failures` consecutive failures.

    Exponential backoff, limited to a third of the notice window and to 30 s, so that a notice is still seen in time.
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
            # None: a handler that was not installed from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


os.register_at_fork(after_in_child=_after_fork)
