"""The ways in which models write calls, by name."""

from __future__ import annotations

from server.tools.calls import ToolFormat
from server.tools.hermes import Hermes

FORMATS: dict[str, ToolFormat] = {"hermes": Hermes()}
