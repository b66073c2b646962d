"""The script for a machine with a GPU, on one where it cannot do anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

CHECK = Path(__file__).parents[1] / "gpu" / "check.sh"
NOTHING = 77


def test_the_check_says_that_it_could_try_nothing() -> None:
    """Without a GPU, or without the command, it ends at once with a code of its own, and says why."""
    result = subprocess.run(
        [CHECK, "/no/such/hibernode"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == NOTHING, result
    assert result.stdout.startswith("nothing was tried: ")
