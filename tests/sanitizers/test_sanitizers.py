"""The C backend under the compiler's sanitizers: no access beyond its memory, no undefined behaviour, no leak, no race.

`make sanitize` runs these; they are too slow for the default run.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.model.cpu import compile_c

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DRIVER = Path(__file__).with_name("driver.c")


@pytest.mark.parametrize("word", ["f32", "bf16"])
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_steps_of_every_kind(sanitizers: str, word: str, tmp_path: Path) -> None:
    program = compile_c(
        tmp_path / "driver",
        str(DRIVER),
        f"-DPK_BF16={int(word == 'bf16')}",
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
        "-Og",
        "-g",
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=500, check=False, env=_environment())
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "sound\n" and not done.stderr


def _environment() -> dict[str, str]:
    """Without what would preload another allocator."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def test_a_step_too_far_is_seen(tmp_path: Path) -> None:
    """A vocabulary that the driver's memory is too small for: these tests can fail."""
    program = compile_c(
        tmp_path / "driver", str(DRIVER), "-DPK_BF16=1", "-fsanitize=address", "-Og", "-g", "-DTOO_FAR=1"
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=500, check=False, env=_environment())
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
