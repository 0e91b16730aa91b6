"""`python -m tests.server.serve_fake PORT [slow|broken]`: the server as the command runs it, around a fake engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from scheduler.messages import EngineInfo
from server.serve import ServeError, ServeOptions, run
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


def main() -> None:
    kinds = {"slow": SlowEngine, "broken": BrokenEngine}
    kind = kinds.get(sys.argv[2], FakeEngine) if len(sys.argv) > 2 else FakeEngine
    Tokenizer.load = classmethod(lambda cls, *_: ByteTokenizer())  # type: ignore[assignment,method-assign,return-value]
    try:
        run(lambda deliver: kind(deliver, lambda _: [65], interval=0.01), ServeOptions(port=int(sys.argv[1])))
    except ServeError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
