"""Faults of compile workers at random moments: every reply must match its request, and nothing may hang.

    python -m tests.campaign.workers --count 500 --seed 0 --log workers.jsonl

Appends one line of JSON per fault. An existing log is resumed: faults of this seed that it contains are not repeated. Most
faults hit fake workers that compile nothing, some the real ones. Ends with status 1 if any reply was wrong, late or missing.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEPASS_CACHE_DIR", tempfile.mkdtemp(prefix="onepass-campaign-"))

import socket

from onepass.errors import CompilerUnavailable
from onepass.runtime import frames, offline
from onepass.runtime.module import Job
from onepass.runtime.workers import Pool
from tests.support.fake_worker import COMMAND, text

AGES = 600.0  # seconds that a request without a fault may take
SHORT = 0.7  # the same for each of the two attempts of a request whose worker hangs
SPARE = 60.0  # additional seconds for starting and killing processes on a busy machine
JOB = Job("it", "", (), (), 4, 1, None, 90)
KERNEL = """import triton
import triton.language as tl


@triton.jit
def it(x):
    i = tl.arange(0, {size})
    tl.store(x + i, tl.load(x + i) * {factor})
"""


class Wrong(Exception):
    """A violated expectation."""


@dataclass(frozen=True)
class Asked:
    """A request, and how to check its reply."""

    job: Job
    right: Callable[[Any], bool]

    def check(self, answer: Any) -> None:
        """Raise if this is the reply to another request."""
        if not self.right(answer):
            raise Wrong(f"{self.job.text[:80]!r} was answered with {answer}")


class Campaign:
    """Injects one fault after another into workers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, itertools.count(1000)
        self.pools = {"fake": Pool(1, COMMAND), "fakes": Pool(3, COMMAND), "real": Pool(1, ["-"])}
        self.pools["real"] = offline._pool(os.getpid())
        self.kind = "fake"
        self.truths: dict[int, Any] = {}
        self.armed = False
        offline._pool = lambda process_id: self.pools[self.kind]  # type: ignore[assignment]
        signal.signal(signal.SIGINT, self._interrupted)

    def _interrupted(self, *_: Any) -> None:
        """Raise KeyboardInterrupt, but only while one is expected: the campaign itself must go on."""
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    # ---- requests ------------------------------------------------------------------------------------------------------------

    def question(self, *do: Any, once: bool = False) -> Asked:
        """A new request to the fake worker."""
        number = next(self.numbers)
        order = text(number, *do, once=self.folder / str(number) if once else None)
        return Asked(replace(JOB, text=order), lambda answer: answer.registers == number and dict(answer.loads) == {16: number})

    def kernel(self, rng: random.Random) -> Asked:
        """A request to the real compiler, with a kernel it has not seen yet."""
        size = 128 << rng.randrange(5)
        order = KERNEL.format(size=size, factor=float(next(self.numbers)))
        job = replace(JOB, text=order, signature=(("x", "*fp32"),), aligned=(0,))
        return Asked(job, lambda answer: answer == self.truths[size])

    def learn(self) -> None:
        """Learn the right replies for real kernels before any fault."""
        self.kind = "real"
        for size in (128 << k for k in range(5)):
            job = replace(JOB, text=KERNEL.format(size=size, factor=0.5), signature=(("x", "*fp32"),), aligned=(0,))
            self.truths[size] = offline.measure(job, "h200")
        if len({str(sorted(found.loads.items())) for found in self.truths.values()}) != len(self.truths):
            raise Wrong(f"kernels cannot be told apart: {self.truths}")

    def ask(self, asked: Asked, seconds: float = AGES) -> str:
        """The outcome of a request, in a word; raises Wrong if it is not allowed."""
        os.environ["ONEPASS_COMPILE_TIMEOUT"] = str(seconds)
        began = time.monotonic()
        try:
            asked.check(offline.measure(asked.job, "h200"))
            outcome = "answered"
        except CompilerUnavailable as error:
            outcome = error.code
        finally:
            took = time.monotonic() - began
            if took > 2 * seconds + SPARE:
                raise Wrong(f"it took {took:.0f} s, where {seconds:g} were allowed")
        return outcome

    def certainly(self, asked: Asked) -> None:
        """Send a request that must succeed."""
        if (outcome := self.ask(asked)) != "answered":
            raise Wrong(f"{asked.job.text[:80]!r} was not answered: {outcome}")

    def living(self) -> list[int]:
        """The process ids of the workers in use."""
        processes = [worker._process for worker in self.pools[self.kind]._all]
        return [process.pid for process in processes if process is not None and process.poll() is None]

    def soon(self, delay: float, what: Callable[[], None]) -> threading.Thread:
        """Do something on another thread after a delay."""

        def later() -> None:
            time.sleep(delay)
            what()

        thread = threading.Thread(target=later, daemon=True)
        thread.start()
        return thread

    def strike(self, what: int) -> None:
        """Send a signal to every worker in use."""
        for process in self.living():
            with suppress(ProcessLookupError):
                os.kill(process, what)

    # ---- faults --------------------------------------------------------------------------------------------------------------

    def killed(self, rng: random.Random) -> str:
        """Workers are killed at some moment before, during or after a reply."""
        nap = rng.choice((0.0, 0.005, 0.03))
        thread = self.soon(rng.uniform(0, 2 * nap + 0.002), lambda: self.strike(rng.choice((signal.SIGKILL, signal.SIGSEGV))))
        outcome = self.ask(self.question(("sleep", nap)))
        thread.join()
        return outcome

    def stopped(self, rng: random.Random) -> str:
        """A worker is stopped with SIGSTOP at some moment and never continued."""
        nap = rng.choice((0.0, 0.01))
        thread = self.soon(rng.uniform(0, 2 * nap + 0.002), lambda: self.strike(signal.SIGSTOP))
        outcome = self.ask(self.question(("sleep", nap)), SHORT)
        thread.join()
        return outcome

    def hanging(self, rng: random.Random) -> str:
        """A worker hangs, once or forever."""
        return self.ask(self.question(("sleep", 3600), once=rng.random() < 0.5), SHORT)

    def ending(self, rng: random.Random) -> str:
        """A worker exits or crashes in the middle of a job, once or at each attempt."""
        fault = rng.choice((("exit", 0), ("exit", 3), ("signal", signal.SIGSEGV), ("signal", signal.SIGABRT), ("signal", 9)))
        once = rng.random() < 0.5
        asked = self.question(fault, once=once)
        outcome = self.ask(asked)
        if outcome != ("answered" if once else "ONEPASS-331"):
            raise Wrong(f"{fault} {once} came to {outcome}")
        return outcome

    def garbage(self, rng: random.Random) -> str:
        """Garbage bytes precede the reply."""
        junk = rng.randbytes(rng.randrange(1, 200))
        if rng.random() < 0.5:
            junk = b"1pas" + junk
        asked = self.question(("write", junk.hex()), ("exit", 0), once=True)
        self.certainly(asked)
        return "answered"

    def half(self, rng: random.Random) -> str:
        """Part of a reply arrives, then the worker exits, hangs or sends another."""
        frame = frames.pack({"id": 1, "binary": {"registers": 1}})
        part = frame[: rng.randrange(1, len(frame))]
        then = rng.choice((("exit", 0), ("signal", signal.SIGKILL), ("sleep", 3600), ("sleep", 0)))
        return self.ask(self.question(("write", part.hex()), then, once=True), SHORT if then == ("sleep", 3600) else AGES)

    def other(self, rng: random.Random) -> str:
        """The reply has the number of another request."""
        outcome = self.ask(self.question(("number", rng.choice((-2, -1, 1, 2))), once=rng.random() < 0.5))
        if outcome not in ("answered", "ONEPASS-334"):
            raise Wrong(outcome)
        return outcome

    def printing(self, rng: random.Random) -> str:
        """Something prints on both streams, which is not a fault."""
        self.certainly(self.question(("print", rng.randbytes(rng.randrange(20_000)).decode("latin-1"))))
        return "answered"

    def interrupt(self, asked: Asked, delay: float) -> str:
        """Send a request while Ctrl-C reaches the main thread after `delay` seconds."""
        main = threading.main_thread().ident or 0
        thread = self.soon(delay, lambda: signal.pthread_kill(main, signal.SIGINT))
        try:
            self.armed = True
            outcome = self.ask(asked)
            self.armed = False
        except KeyboardInterrupt:
            outcome = "interrupted"
        thread.join()
        self.armed = False
        return outcome

    def interrupted(self, rng: random.Random) -> str:
        """Ctrl-C reaches the main thread at some moment; then the request is repeated."""
        nap = rng.choice((0.003, 0.01, 0.03))
        asked = self.question(("sleep", nap))
        outcome = self.interrupt(asked, rng.uniform(0, nap + 0.003))
        self.certainly(asked)
        return outcome

    def many(self, rng: random.Random) -> str:
        """Several threads send requests while workers are killed and the main thread is interrupted."""
        self.kind = "fakes"
        outcomes: Counter[str] = Counter()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                outcomes.update(self.ask(self.question(("sleep", 0.002))) for _ in range(5))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        threads += [self.soon(rng.uniform(0, 0.05), lambda: self.strike(signal.SIGKILL)) for _ in range(2)]
        for thread in threads[:4]:
            thread.start()
        asked = self.question(("sleep", 0.02))
        self.interrupt(asked, rng.uniform(0, 0.02))
        for thread in threads:
            thread.join(2 * AGES)
        self.certainly(asked)  # only now, because two kills may hit both attempts of one request
        if failures or any(thread.is_alive() for thread in threads):
            raise Wrong(f"threads: {failures}")
        return ", ".join(sorted(outcomes))

    def forked(self, rng: random.Random) -> str:
        """The process forks while a worker is busy; the child uses its own workers."""
        thread = threading.Thread(target=self.certainly, args=(self.question(("sleep", 0.05)),), daemon=True)
        thread.start()
        time.sleep(rng.uniform(0, 0.05))
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                self.pools = {"fake": Pool(1, COMMAND)}
                self.certainly(self.question())
                os._exit(0)
            os._exit(1)
        thread.join(2 * AGES)
        _, status = os.waitpid(child, 0)
        if status or thread.is_alive():
            raise Wrong(f"the child ended with {status}, the thread lives: {thread.is_alive()}")
        return "answered"

    def starved(self, rng: random.Random) -> str:
        """No more file descriptors are available when a worker is started."""
        self.pools[self.kind].close()
        real = socket.socketpair

        def full() -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        socket.socketpair = full  # type: ignore[assignment]
        asked = self.question()
        try:
            outcome = self.ask(asked)
        finally:
            socket.socketpair = real
        if outcome != "ONEPASS-333":
            raise Wrong(outcome)
        self.certainly(asked)
        return outcome

    def real_killed(self, rng: random.Random) -> str:
        """A worker that really compiles is killed; partial files in Triton's cache must do no harm."""
        self.kind = "real"
        asked = self.kernel(rng)
        thread = self.soon(rng.uniform(0, 0.4), lambda: self.strike(signal.SIGKILL))
        self.certainly(asked)
        thread.join()
        offline._measured.cache_clear()
        self.certainly(asked)
        return "answered"

    def real_interrupted(self, rng: random.Random) -> str:
        """Ctrl-C while a worker really compiles."""
        self.kind = "real"
        asked = self.kernel(rng)
        outcome = self.interrupt(asked, rng.uniform(0, 0.12))
        self.certainly(asked)
        return outcome

    FAULTS = (
        (killed, 14),
        (stopped, 6),
        (hanging, 3),
        (ending, 10),
        (garbage, 10),
        (half, 8),
        (other, 8),
        (printing, 4),
        (interrupted, 22),
        (many, 4),
        (forked, 3),
        (starved, 3),
        (real_killed, 2),
        (real_interrupted, 3),
    )

    def run(self, rng: random.Random) -> dict[str, Any]:
        """One fault, and whether everything works after it."""
        self.kind = "fake"
        began = time.monotonic()
        (fault,) = rng.choices([fault for fault, _ in self.FAULTS], [weight for _, weight in self.FAULTS])
        found = {"kind": fault.__name__, "ok": True}
        try:
            found["outcome"] = fault(self, rng)
            for _ in range(3):
                self.certainly(self.kernel(rng) if self.kind == "real" else self.question())
        except Exception as error:
            found |= {"ok": False, "why": f"{type(error).__name__}: {error}"}
        return found | {"seconds": round(time.monotonic() - began, 3)}


def done_before(log: Path, seed: int) -> set[int]:
    """The faults of a seed that are in a log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {row["fault"] for row in map(json.loads, filter(None, lines)) if row["seed"] == seed}


def handles() -> dict[str, str]:
    """The open descriptors of this process, and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor that lists the folder
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def rows(count: int, seed: int, before: set[int]) -> Iterator[dict[str, Any]]:
    """One row per fault; the last row says what was left behind."""
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder))
        campaign.learn()
        campaign.pools["real"].close()
        held = handles()
        for fault in range(count):
            if fault not in before:
                yield {"seed": seed, "fault": fault, **campaign.run(random.Random(f"{seed}/{fault}"))}
        for pool in campaign.pools.values():
            pool.end()
            pool._threads.close(SPARE)  # a thread whose worker ended may still be about to release it
        children = [child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()]
        left = {number: what for number, what in handles().items() if number not in held}
        ok = not children and not left
        yield {"seed": seed, "fault": -1, "kind": "left behind", "ok": ok, "children": children, "handles": left}


def command(rows: Callable[[int, int, set[int]], Iterator[dict[str, Any]]], about: str | None, count: int) -> int:
    """Run, log and count the outcomes of a campaign of numbered faults; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True)
    given = parser.parse_args()
    counted: Counter[tuple[str, str]] = Counter()
    with given.log.open("a") as log:
        for row in rows(given.count, given.seed, done_before(given.log, given.seed)):
            log.write(json.dumps(row) + "\n")
            log.flush()
            counted[row["kind"], row.get("outcome", "-") if row["ok"] else "WRONG: " + row.get("why", str(row))] += 1
    for (kind, outcome), times in sorted(counted.items()):
        print(f"{times:5} {kind:18} {outcome}")
    return int(any("WRONG" in outcome for _, outcome in counted))


if __name__ == "__main__":
    raise SystemExit(command(rows, __doc__, 500))
