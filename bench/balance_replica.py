"""A replica that streams, for the suite `balance`: `python -m bench.balance_replica PORT CHUNKS EVERY_S`.

Each chunk has the monotonic time at which it was sent.
"""

import asyncio
import sys
import time


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    chunks, every_s = int(sys.argv[2]), float(sys.argv[3])
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(chunks):
            line = b"sent %.6f\n" % time.monotonic()
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
            await writer.drain()
            await asyncio.sleep(every_s)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
