"""An HTTP server that imitates a bucket, and a source that reads its records from the server.

    python -m benchmarks.range_server FILE LATENCY_MS

This command serves one file on loopback, prints the port, and ends when its standard input is
closed. It answers each request after LATENCY_MS. Any number of requests wait at the same time, as
at a bucket. The server is a process of its own, so requests have real costs: a socket, a header to
read, and bytes to copy.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import SupportsIndex


class RangeSource:
    """A source of records in a file on an HTTP server, each read by a request for its bytes.

    Args:
        port: Port of the server.
        num_records: Number of records in the file.
        record_bytes: Bytes of each record.
    """

    def __init__(self, port: int, num_records: int, record_bytes: int):
        self._port, self._num_records, self._record_bytes = port, num_records, record_bytes
        # Each thread has a connection of its own, because a connection serves one request at a
        # time.
        self._of_this_thread = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, index: SupportsIndex) -> bytes:
        start = index.__index__() * self._record_bytes
        stop = start + self._record_bytes
        response = self._ask({"Range": f"bytes={start}-{stop - 1}"})
        body = response.read()
        if response.status != http.HTTPStatus.PARTIAL_CONTENT or len(body) != self._record_bytes:
            raise OSError(f"bytes {start} to {stop} gave {response.status}, {len(body)} bytes")
        return body

    def close(self) -> None:
        """Closes the connections of all threads. The source cannot be read afterwards."""
        for connection in self._connections:
            connection.close()

    def _ask(self, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = getattr(self._of_this_thread, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            self._of_this_thread.connection = connection
            self._connections.append(connection)
        connection.request("GET", "/", headers=headers)
        return connection.getresponse()


@contextmanager
def serving(path: Path, latency_ms: float) -> Iterator[int]:
    """Serves a file from a process of its own, until the block ends, and yields the port."""
    command = [sys.executable, "-m", "benchmarks.range_server", str(path), str(latency_ms)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        # At the end of the block, Popen closes the server's standard input and waits for its end.


async def _serve(path: Path, latency_s: float) -> None:
    content = path.read_bytes()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(latency_s)
                asked = re.search(rb"range: bytes=(\d+)-(\d+)", request, re.IGNORECASE)
                first, last = map(int, asked.groups()) if asked else (0, len(content) - 1)
                body = content[first : last + 1]
                status = f"HTTP/1.1 {'206 Partial Content' if asked else '200 OK'}\r\n"
                range_ = f"Content-Range: bytes {first}-{last}/{len(content)}\r\n" if asked else ""
                header = f"{status}{range_}Content-Length: {len(body)}\r\n\r\n"
                writer.write(header.encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()  # the client has gone, or the server is about to end

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2]) / 1e3))
