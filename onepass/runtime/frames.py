"""Wire format between a process and its compile workers: JSON messages with a magic number and a length, over a socket.

Worker processes import this module too, so it needs only the standard library.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!4sI")  # magic number, length of the body in bytes
_MAGIC = b"1pas"
MAX_MESSAGE_BYTES = 64 << 20  # no valid request or reply is longer
CHUNK = 1 << 16


class MalformedMessage(Exception):
    """Received bytes that are not a valid message. Users see a coded error instead."""


def pack(message: dict[str, Any]) -> bytes:
    """Encode a message."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"a message of {len(body)} bytes is too long")
    return _HEADER.pack(_MAGIC, len(body)) + body


def unpack(received: bytes | bytearray) -> dict[str, Any] | None:
    """Decode a message. None while bytes are missing; MalformedMessage if the bytes can never become exactly one message."""
    magic, length = _HEADER.unpack(received[: _HEADER.size]) if len(received) >= _HEADER.size else (bytes(received[:4]), 0)
    if not _MAGIC.startswith(magic):
        raise MalformedMessage(f"it begins with {bytes(received[:16])!r}")
    if length > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"its header gives a length of {length} bytes")
    end = _HEADER.size + length
    if len(received) < end:
        return None
    if len(received) > end:
        raise MalformedMessage(f"{len(received) - end} bytes follow it")
    try:
        message = json.loads(received[_HEADER.size :])
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"it is not JSON ({error})") from None
    if not isinstance(message, dict):
        raise MalformedMessage(f"it is {type(message).__name__}, not an object")
    return message


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """Wait for the next message, without a timeout; None if the other side closed the connection."""
    received = bytearray()
    while True:
        chunk = channel.recv(CHUNK)
        if not chunk:
            return None
        received += chunk
        message = unpack(received)
        if message is not None:
            return message


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, without a timeout."""
    channel.sendall(pack(message))
