"""For all tests: compute threads that wait for one another sleep rather than spin, since tests share their cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
