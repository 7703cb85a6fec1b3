"""Images on this machine: each is fetched once, however many attempts need it."""

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.client import NOT_FOUND
from pathlib import Path

from agent.containers.engine import ContainerEngine, EngineError, EngineFacts, Image, open_engine
from agent.containers.image_cleanup import FetchedImages
from agent.containers.pull_rate import limited

_log = logging.getLogger(__name__)


class ImageUnavailable(Exception):
    """The engine cannot fetch an image, or does not answer. A retry may succeed."""


class BadImage(Exception):
    """The image cannot be used, whatever machine fetches it."""


class ImageStore:
    """The images of this machine's engine. Thread-safe; the methods block."""

    def __init__(self, socket: Path | None, fetched: FetchedImages, bytes_s: float | None = None) -> None:
        """`socket` is the engine's; None: the machine has no engine, and every method raises `ImageUnavailable`.

        `bytes_s` is the bandwidth that fetches may have together; None: any.
        """
        self._socket = socket
        self._bytes_s = bytes_s
        self._warned = False
        self._fetched = fetched
        self._fetching: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._facts: EngineFacts | None = None

    def facts(self) -> EngineFacts:
        """Returns what the engine is.

        Raises:
            ImageUnavailable: see the class.
        """
        if self._facts is None:
            try:
                self._facts = self._engine().describe()
            except EngineError as error:
                raise ImageUnavailable(str(error)) from None
        return self._facts

    def get(self, name: str) -> Image:
        """Returns an image that was fetched.

        Raises:
            ImageUnavailable: it does not exist any more.
        """
        try:
            found = self._engine().image(name)
        except EngineError as error:
            raise ImageUnavailable(f"image {name}: {error}") from None
        if found is None:
            raise ImageUnavailable(f"image {name}: was removed from this machine")
        return found

    def fetch(self, name: str, login: str | None, progress: Callable[[str], None]) -> Image:
        """Fetches an image, unless it is on this machine, and returns it.

        Args:
            name: the image, with its digest.
            login: `USER:PASSWORD` for its registry.
            progress: gets short texts for people.

        Raises:
            BadImage: its registry does not have it.
            ImageUnavailable: see the class.
        """
        engine = self._engine()
        try:
            with self._fetching[name]:
                if (found := engine.image(name)) is None:
                    user, _, password = (login or "").partition(":")
                    _log.info("fetching image %s", name)
                    try:
                        with self._limited():
                            engine.pull(name, (user, password) if login else None, progress)
                    except EngineError as error:
                        if error.status == NOT_FOUND:
                            raise BadImage(f"image {name}: {error}") from None
                        raise
                    if (found := engine.image(name)) is not None:
                        self._fetched.add(name, found.size_bytes)
                self._fetched.use(name)
        except EngineError as error:
            raise ImageUnavailable(f"image {name}: {error}") from None
        if found is None:
            raise ImageUnavailable(f"image {name}: the engine has fetched it, but does not find it")
        return found

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Limits the bandwidth of the engine. If that is not possible, logs a warning once."""
        with contextlib.ExitStack() as limit:
            if self._bytes_s is not None:
                try:
                    limit.enter_context(limited(str(self._socket), self._bytes_s))
                except OSError as error:
                    if not self._warned:
                        self._warned = True
                        _log.warning("images are fetched without a limit on bandwidth (tasks.image_bytes_s): %s", error)
            yield

    def _engine(self) -> ContainerEngine:
        if self._socket is None:
            raise ImageUnavailable("this machine has no container engine")
        return open_engine(str(self._socket))
