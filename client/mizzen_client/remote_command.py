"""Runs a command in a running task: the local terminal or pipes on one side, the session's channels on the other."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import struct
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from mizzen_client.errors import Unreachable
from mizzen_client.tunnel import ByteChannel, ChannelReset, Channels, FrameKind, control, unpack
from mizzen_client.tunnel.dial import CannotConnect, dial
from mizzen_client.tunnel.frames import STDERR, STDIN, STDOUT

if TYPE_CHECKING:
    from mizzen_client.client import Client
    from mizzen_client.views import Session

_PIECE_BYTES = 32 << 10
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the command gets instead of this process, if it has no terminal."""


class SessionClosed(Exception):
    """The session ended before its command. The message says why."""


async def connect(client: "Client", session: "Session") -> ClientConnection:
    """Connect to a session.

    Raises:
        Unreachable: the API does not answer, or refuses the session.
    """
    try:
        return await dial(client.url, session["path"], session["token"], tls=client.tls)
    except CannotConnect as error:
        raise Unreachable(f"{client.url}: the session cannot be opened: {error}") from None


def run_command(
    client: "Client", session: "Session", command: Sequence[str], *, terminal: bool, reads_stdin: bool = True
) -> int:
    """Run a command with this process's terminal, or with its stdin, stdout and stderr. Return its exit status.

    `reads_stdin` False: the command has no input.

    Raises:
        SessionClosed: the session ended before the command.
        Unreachable: the API does not answer, or refuses the session.
    """
    return asyncio.run(_run_command(client, session, command, terminal=terminal, reads_stdin=reads_stdin))


async def _run_command(
    client: "Client", session: "Session", command: Sequence[str], *, terminal: bool, reads_stdin: bool
) -> int:
    connection = await connect(client, session)
    try:
        return await _Command(connection, terminal=terminal, reads_stdin=reads_stdin).run(command)
    except ConnectionClosed:
        raise SessionClosed("the connection to the API was lost") from None
    finally:
        await connection.close()


class _Command:
    def __init__(self, connection: ClientConnection, *, terminal: bool, reads_stdin: bool) -> None:
        self._reads_stdin = reads_stdin
        self._connection = connection
        self._terminal = terminal
        channels = self._channels = Channels(self._send)
        self._stdin, self._stdout = channels.open(STDIN), channels.open(STDOUT)
        self._stderr = channels.open(STDERR)
        self._works: list[asyncio.Task[Any]] = []

    async def _send(self, message: bytes) -> None:
        """Send a frame. After the end of the session it is dropped, but output that has arrived is still shown."""
        with contextlib.suppress(ConnectionClosed):
            await self._connection.send(message)

    async def run(self, command: Sequence[str]) -> int:
        columns, rows = shutil.get_terminal_size()
        size = {"rows": rows, "columns": columns, "term": os.environ.get("TERM", "xterm")}
        await self._connection.send(control("begin", command=list(command), terminal=self._terminal, **size))
        with contextlib.ExitStack() as stack:
            try:
                return await self._until_the_end(stack)
            finally:
                self._channels.close("the session has ended")
                for work in self._works:
                    work.cancel()
                if self._works:
                    await asyncio.wait(self._works)

    async def _until_the_end(self, stack: contextlib.ExitStack) -> int:
        outputs: list[asyncio.Task[None]] = []
        while True:
            receiving = asyncio.ensure_future(self._connection.recv())
            await asyncio.wait({receiving, *outputs}, return_when=asyncio.FIRST_COMPLETED)
            for output in outputs:
                if output.done():
                    output.result()  # Raises if nothing reads the output any more.
            outputs = [output for output in outputs if not output.done()]
            frame = unpack(await receiving)
            if frame.kind is not FrameKind.CONTROL:
                self._channels.receive(frame)
                continue
            said = frame.message()
            if said["type"] == "started":
                outputs = self._begin(stack)
            elif said["type"] == "exit":
                await asyncio.gather(*outputs)
                return int(said["code"])
            elif said["type"] == "closed":
                self._channels.close("")
                await asyncio.gather(*outputs)
                raise SessionClosed(said["because"])
            elif said["type"] == "notice":
                os.write(2, f"{said['text']}\r\n".encode())

    def _begin(self, stack: contextlib.ExitStack) -> list[asyncio.Task[None]]:
        """Connect the terminal or the pipes to the channels. Return the asyncio tasks that write the output."""
        stack.enter_context(self._raw() if self._terminal else self._signals())
        writers = stack.enter_context(_pool())
        outputs = [asyncio.create_task(_show(self._stdout, 1, writers))]
        if not self._terminal:
            outputs.append(asyncio.create_task(_show(self._stderr, 2, writers)))
        self._works += [asyncio.create_task(_feed(self._stdin) if self._reads_stdin else self._stdin.end()), *outputs]
        return outputs

    @contextlib.contextmanager
    def _raw(self) -> Iterator[None]:
        """Pass all keys on, and changes of the window's size."""
        loop, before = asyncio.get_running_loop(), termios.tcgetattr(0)
        tty.setraw(0, termios.TCSADRAIN)  # Input that was typed already is not lost.
        loop.add_signal_handler(signal.SIGWINCH, self._resize)
        self._resize()
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)
            termios.tcsetattr(0, termios.TCSADRAIN, before)

    def _resize(self) -> None:
        rows, columns = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))[:2]
        if rows and columns:
            self._say(control("resize", rows=rows, columns=columns))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals on to the command. A second SIGINT ends this process."""
        loop = asyncio.get_running_loop()
        for number in _PASSED_ON:
            loop.add_signal_handler(number, self._pass_on, number)
        try:
            yield
        finally:
            for number in _PASSED_ON:
                loop.remove_signal_handler(number)

    def _pass_on(self, number: signal.Signals) -> None:
        self._say(control("signal", number=int(number)))
        if number is signal.SIGINT:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    def _say(self, message: bytes) -> None:
        self._works.append(asyncio.create_task(self._send(message)))


async def _feed(channel: ByteChannel) -> None:
    """Send stdin to its end."""
    with contextlib.suppress(ChannelReset):
        while data := await _read_stdin():
            await channel.write(data)
        await channel.end()


async def _read_stdin() -> bytes:
    """Return the available bytes of stdin, and take no more: later input may be for another process."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(0, ready.set)
    except (PermissionError, OSError):  # A file, which can always be read; or stdin is closed.
        return _read_now()
    try:
        await ready.wait()
    finally:
        loop.remove_reader(0)
    return _read_now()


def _read_now() -> bytes:
    try:
        return os.read(0, _PIECE_BYTES)
    except OSError:
        return b""


@contextlib.contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Provide threads that write the output, so that a slow reader does not block the answers to keepalives."""
    pool = ThreadPoolExecutor(2)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


async def _show(channel: ByteChannel, descriptor: int, writers: ThreadPoolExecutor) -> None:
    """Write the bytes that arrive on a channel, until it ends."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ChannelReset):
        while data := await channel.read():
            await loop.run_in_executor(writers, _write_all, descriptor, data)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def has_terminal() -> bool:
    """Return whether stdin and stdout are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()
