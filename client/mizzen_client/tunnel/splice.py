"""Connects a TCP connection with a channel, in both directions."""

import asyncio
import contextlib

from mizzen_client.tunnel.channels import ByteChannel, ChannelReset
from mizzen_client.tunnel.frames import MAX_DATA_BYTES


async def splice(channel: ByteChannel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forwards bytes until both directions have ended or one has failed. Closes the TCP connection."""
    works = [asyncio.create_task(_to_tcp(channel, writer)), asyncio.create_task(_to_channel(reader, channel))]
    why = "the connection was closed"
    try:
        done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_EXCEPTION)
        for work in done:
            work.result()
        return
    except (ChannelReset, OSError) as error:
        why = str(error) or why
    finally:
        for work in works:
            work.cancel()
        await asyncio.wait(works)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    await channel.reset(why)


async def _to_tcp(channel: ByteChannel, writer: asyncio.StreamWriter) -> None:
    while data := await channel.read():
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def _to_channel(reader: asyncio.StreamReader, channel: ByteChannel) -> None:
    while data := await reader.read(MAX_DATA_BYTES):
        await channel.write(data)
    await channel.end()
