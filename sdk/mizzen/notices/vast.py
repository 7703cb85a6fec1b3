"""vast.ai: an interruptible instance is paused without a word, so the interval of saving is all there is."""

from mizzen.notices import sigterm
from mizzen.notices.notice import Notice, Watcher, Window


class VastWatcher(Watcher):
    """No notice at all. A SIGTERM, which vast.ai does not send, is what it is anywhere."""

    platform = "vast"

    def __init__(self) -> None:
        super().__init__(Window(0.0, "vast.ai pauses an instance at once"))

    def poll(self) -> Notice | None:
        """None, always."""
        return None

    def on_signal(self, received: int) -> Notice:
        """Somebody else's: stopping the container by hand, or the user's own supervisor."""
        return sigterm.SigtermWatcher({}).on_signal(received)
