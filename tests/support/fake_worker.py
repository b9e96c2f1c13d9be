"""A fake compile worker: it follows the orders in a job's text, including faults, in the protocol of the real one.

The text is JSON: the `value` to reply with, and what to `do` before, `unless` a file exists. It is created if the orders are to
be followed `once`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-S", "-P", str(Path(__file__).resolve()))
REAL = Path(__file__).resolve().parents[2] / "onepass" / "runtime" / "offline_worker.py"


def text(value: int, *do: Any, once: Path | None = None, unless: Path | None = None, reply: dict[str, Any] | None = None) -> str:
    """The text of a job; `reply` is sent instead of a binary."""
    mark = once or unless
    return json.dumps({"value": value, "do": do, "mark": mark and str(mark), "leave": once is not None, "reply": reply})


def request(value: int, *do: Any, once: Path | None = None) -> dict[str, Any]:
    """A request for a pool; the binary's registers are `value`, its shared memory the worker's process id."""
    return {"job": {"text": text(value, *do, once=once)}}


def binary(value: int) -> dict[str, Any]:
    """A reply like the real worker's."""
    counts = dict.fromkeys(("spill_bytes", "stack_bytes", "barriers", "tma_copies", "mbarriers"), 0)
    return {**counts, "registers": value, "smem_bytes": os.getpid(), "loads": {"16": value}, "stores": {}, "spills_in_loop": False}


def act(order: str, argument: Any, channel: socket.socket) -> None:
    """Follow one order."""
    match order:
        case "sleep":
            time.sleep(argument)
        case "print":
            for stream in (1, 2):
                os.write(stream, argument.encode())
        case "signal":
            os.kill(os.getpid(), argument)
        case "interrupt parent":
            os.kill(os.getppid(), signal.SIGINT)
        case "exit":
            os._exit(argument)
        case "write":
            channel.sendall(bytes.fromhex(argument))
        case "close":
            channel.shutdown(socket.SHUT_RDWR)
            time.sleep(argument)
        case "litter":  # like a compiler that is killed
            Path(tempfile.gettempdir(), argument).touch()
        case "hold":  # the reader of that pipe notices when this process ends
            os.open(argument, os.O_WRONLY)
        case _:
            raise ValueError(order)


def main() -> None:
    """Serve as the real worker does."""
    spec = importlib.util.spec_from_file_location("offline_worker", REAL)
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    channel = worker.prepare(int(sys.argv[1]), sys.argv[2])
    from onepass.runtime import frames

    with suppress(ConnectionError):  # the parent is gone
        while (message := frames.receive(channel)) is not None:
            script = json.loads(message["job"]["text"])
            mark, number = script["mark"] and Path(script["mark"]), message["id"]
            if not (mark and mark.exists()):
                if script["leave"]:
                    mark.touch()
                for order, argument in script["do"]:
                    if order == "number":
                        number += argument
                    else:
                        act(order, argument, channel)
            reply = {"binary": binary(script["value"])} if script["reply"] is None else script["reply"]
            frames.send(channel, {**reply, "heard": [], "id": number})
    worker.leave(sys.argv[2])


if __name__ == "__main__":
    main()
