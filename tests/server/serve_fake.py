"""`python -m tests.server.serve_fake PORT [slow|broken|hung]`: the server as the command runs it, on a fake engine."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

from scheduler.messages import EngineInfo
from server.serve import ServeError, ServeOptions, run
from server.start import end_process, leave_at_signals
from server.text.encoding import Encoded, EncodeJob
from server.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.harness import ByteTokenizer


class SlowEngine(FakeEngine):
    def start(self, found: Callable[[str], None] = lambda path: None) -> EngineInfo:
        print("loading", file=sys.stderr, flush=True)
        time.sleep(30)
        return super().start(found)


class BrokenEngine(FakeEngine):
    def start(self, found: Callable[[str], None] = lambda path: None) -> EngineInfo:
        raise ValueError("the weights\nare upside down")


def hang() -> None:
    """In a call that nothing can interrupt; the interpreter's lock is free meanwhile."""
    print("hanging", file=sys.stderr, flush=True)
    libc = ctypes.CDLL(None)
    while True:
        libc.sleep(1000)


class HungEngine(FakeEngine):
    def stop(self) -> None:
        hang()


class HungTokenizer(ByteTokenizer):
    def encode_job(self, job: EncodeJob) -> Encoded:
        if job.text == "hang":
            hang()
        return super().encode_job(job)


def main() -> None:
    kinds = {"slow": SlowEngine, "broken": BrokenEngine, "hung": HungEngine}
    kind = kinds.get(sys.argv[2], FakeEngine) if len(sys.argv) > 2 else FakeEngine
    Tokenizer.load = classmethod(lambda cls, *_: HungTokenizer())  # type: ignore[assignment,method-assign,return-value]
    leave_at_signals()
    try:
        run(lambda deliver: kind(deliver, lambda _: [65], interval=0.01), ServeOptions(port=int(sys.argv[1])))
    except ServeError as error:
        sys.exit(f"Error: {error}")
    end_process(0)


if __name__ == "__main__":
    main()
