"""Messages between a run and a worker: length-prefixed, sent and received with a deadline.

The trainer's end reads file descriptors with `poll`: a detached child may keep the pipe open forever, and a worker
may never read, write garbage, or print without end. The worker's end (`read_frame`, `write_frame`) blocks.
"""

import os
import select
import struct
import subprocess
import time
from contextlib import suppress
from typing import BinaryIO

HEADER = struct.Struct(">Q")  # bytes of the message that follows
MAX_REPLY_BYTES = 16 * 2**20
MAX_OUTPUT_BYTES = 64 * 2**10  # of what a reward prints in one call; the rest is counted
CHUNK = 64 * 2**10
POLL_S = 0.05  # between two checks that the process is alive: its end may not close the pipe


class MalformedReply(ValueError):
    """The received bytes are not a reply."""


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message; None if the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    payload = stream.read(size)
    return payload if len(payload) == size else None


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    """Send one message."""
    stream.write(HEADER.pack(len(payload)) + payload)
    stream.flush()


class Pipe:
    """The trainer's end.

    Args:
        process: reads requests on its standard input and replies on its standard output. What it prints on its standard
            error goes to this process's, at most `MAX_OUTPUT_BYTES` a message.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.process = process
        self.requests, self.replies = process.stdin.fileno(), process.stdout.fileno()
        self.output = process.stderr.fileno()
        self._printed = 0
        self._output_open = True
        for descriptor in (self.requests, self.replies, self.output):
            os.set_blocking(descriptor, False)

    def exchange(self, payload: bytes, limit_s: float) -> bytes:
        """Send a message and return the reply.

        Raises:
            TimeoutError: not done within `limit_s`. EOFError: the other end is closed or its process gone.
            MalformedReply: a reply that is too large, an extra one, or bytes that are not a reply.
        """
        deadline = time.monotonic() + limit_s
        self._printed = 0
        try:
            if self._is_ready(self.replies) and self._read(self.replies, 1):
                raise MalformedReply("it sent something before it was asked")
            self._send(HEADER.pack(len(payload)) + payload, deadline)
            (size,) = HEADER.unpack(self._receive(HEADER.size, deadline))
            if size > MAX_REPLY_BYTES:
                raise MalformedReply(f"it announced {size:,} bytes, and a reply has at most {MAX_REPLY_BYTES:,}")
            reply = self._receive(size, deadline)
            with suppress(EOFError):  # a worker that has ended after its reply
                if self._is_ready(self.replies) and self._read(self.replies, 1):
                    raise MalformedReply("it sent more than one reply")
            return reply
        finally:
            self._forward_rest()

    def _send(self, message: bytes, deadline: float) -> None:
        rest = memoryview(message)
        while rest:
            self._wait(self.requests, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self.requests, rest[:CHUNK]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise EOFError from None

    def _receive(self, size: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            self._wait(self.replies, select.POLLIN, deadline)
            received += self._read(self.replies, min(CHUNK, size - len(received)))
        return bytes(received)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        """Wait until `descriptor` is ready; forward what the reward prints meanwhile."""
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            poll = select.poll()
            poll.register(descriptor, event)
            if self._output_open:
                poll.register(self.output, select.POLLIN)
            ready = [found for found, _ in poll.poll(1000 * min(left_s, POLL_S))]
            if self.output in ready:
                self._forward()
            if descriptor in ready:
                return
            if self.process.poll() is not None and not self._is_ready(descriptor):
                raise EOFError

    def _is_ready(self, descriptor: int) -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def _read(self, descriptor: int, size: int) -> bytes:
        try:
            found = os.read(descriptor, size)
        except BlockingIOError:
            return b""
        if not found:
            raise EOFError
        return found

    def _forward(self) -> None:
        try:
            chunk = self._read(self.output, CHUNK)
        except EOFError:
            self._output_open = False
            return
        kept = chunk[: max(0, MAX_OUTPUT_BYTES - self._printed)]
        self._printed += len(chunk)
        _print(kept)

    def _forward_rest(self) -> None:
        """Forward what is left in the pipe, but not endlessly for a process that prints faster than it is read."""
        until = self._printed + 2**20
        while self._output_open and self._printed < until and self._is_ready(self.output):
            self._forward()
        if self._printed > MAX_OUTPUT_BYTES:
            left_out = self._printed - MAX_OUTPUT_BYTES
            _print(f"\n... {left_out:,} further bytes that a reward printed in this call are left out\n".encode())


def _print(output: bytes) -> None:
    with suppress(OSError):
        while output:
            output = output[os.write(2, output) :]
