"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    try:
        return version("pagekv")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"


VERSION = installed_version()
