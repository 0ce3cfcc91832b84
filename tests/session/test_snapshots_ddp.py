"""Two processes that train together: the first takes the snapshots, of gradients that live in shared buckets too."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "child_snapshots_ddp.py"


@pytest.mark.distributed
def test_the_first_rank_keeps_what_was_there(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(CHILD), str(tmp_path), str(port)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "all as it was" in result.stdout
