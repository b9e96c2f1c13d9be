"""Messages between a process and its compile workers: JSON in frames with a mark and a length, over a socket of their own.

Worker processes import this module too, so it needs nothing but the standard library.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct("!4sI")  # a mark, and how many bytes follow
_MARK = b"1pas"
LONGEST = 64 << 20  # bytes: no job and no answer is longer
CHUNK = 1 << 16


class MalformedMessage(Exception):
    """Bytes that are no message. Never reaches a user."""


def pack(message: dict[str, Any]) -> bytes:
    """The frame of a message."""
    body = json.dumps(message).encode()
    if len(body) > LONGEST:
        raise MalformedMessage(f"a message of {len(body)} bytes is too long")
    return _HEAD.pack(_MARK, len(body)) + body


def unpack(received: bytes | bytearray) -> dict[str, Any] | None:
    """The message that `received` holds, None while bytes are missing; Garbled if it can never be one message and nothing more."""
    mark, length = _HEAD.unpack(received[:_HEAD.size]) if len(received) >= _HEAD.size else (bytes(received[:4]), 0)
    if not _MARK.startswith(mark):
        raise MalformedMessage(f"it begins with {bytes(received[:16])!r}")
    if length > LONGEST:
        raise MalformedMessage(f"it is said to have {length} bytes")
    end = _HEAD.size + length
    if len(received) < end:
        return None
    if len(received) > end:
        raise MalformedMessage(f"{len(received) - end} bytes follow it")
    try:
        message = json.loads(received[_HEAD.size:])
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"it is not JSON ({error})") from None
    if not isinstance(message, dict):
        raise MalformedMessage(f"it is {type(message).__name__}, not an object")
    return message


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next message, however long it takes; None once the other side has gone."""
    received = bytearray()
    while True:
        more = channel.recv(CHUNK)
        if not more:
            return None
        received += more
        message = unpack(received)
        if message is not None:
            return message


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, however long it takes."""
    channel.sendall(pack(message))
