"""Tools: what clients let a model call. The ways in which models write calls are registered by name, one file each."""

DEFAULT_FORMAT = "hermes"
FORMAT_NAMES = ("hermes",)  # as `--tool-call-parser` takes them; server/tools/registry.py has what they name
