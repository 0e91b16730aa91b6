"""Tools: the ways in which models write calls, by the name that `--tool-call-parser` takes; one file each."""

from __future__ import annotations

from server.tools.calls import ToolFormat
from server.tools.hermes import Hermes

DEFAULT_FORMAT = "hermes"
FORMATS: dict[str, ToolFormat] = {"hermes": Hermes()}
