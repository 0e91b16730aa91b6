"""The end of a process whose orderly end does not come: some thread hangs in a call that nothing can interrupt."""

from __future__ import annotations

import logging
import threading

from server.start import end_process

log = logging.getLogger("pagekv")


class LastResort:
    """Ends the process with status 1 some time after it was armed, unless the process has ended by then.

    A daemon thread waits, so that it neither holds up an orderly end nor depends on the event loop.
    """

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def arm(self, seconds: float) -> None:
        """From now on; an earlier arming counts no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._end, args=(seconds,))
        self._timer.daemon = True
        self._timer.start()

    def _end(self, seconds: float) -> None:
        names = ", ".join(sorted(thread.name for thread in threading.enumerate()))
        log.error("the server did not end within %g seconds; ending it by force. Threads: %s", seconds, names)
        end_process(1)
