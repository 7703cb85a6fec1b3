"""vast.ai: an interruptible instance is paused without a notice, so only regular saves protect the training."""

from mizzen.notices import sigterm
from mizzen.notices.notice import Notice, Watcher, Window


class VastWatcher(Watcher):
    """Watcher of vast.ai, which gives no notice. A SIGTERM has another origin: it is handled by `SigtermWatcher`."""

    platform = "vast"

    def __init__(self) -> None:
        super().__init__(Window(0.0, "vast.ai pauses an instance at once"))

    def poll(self) -> Notice | None:
        """Return None: vast.ai cannot be polled."""
        return None

    def on_signal(self, received: int) -> Notice:
        """Return the notice of a signal. It is not from vast.ai: a user or a supervisor stops the container."""
        return sigterm.SigtermWatcher({}).on_signal(received)
