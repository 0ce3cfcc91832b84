"""`LiveAnalyzer`: watches a fine-tuning run while it trains. It shows the terminal monitor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from sonde.errors import RunNotFoundError
from sonde.read.run.link import linked_run
from sonde.write.folder import absolute


class LiveAnalyzer:
    """Watches a folder that `TrainingWrapper` writes to, or a run.

    LiveAnalyzer(checkpoint_dir="./checkpoints").start_monitoring()
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        self.folder = absolute(checkpoint_dir)

    def start_monitoring(self, *, wait_s: float = 60.0, block: bool = True) -> subprocess.Popen[bytes]:
        """Run `sonde monitor` in this terminal until the user leaves it; without a terminal, print one frame. Waits for
        a run to start.

        A separate process: drawing must not slow down training, nor be imported by it.
        """
        command = [sys.executable, "-m", "sonde.cli.main", "monitor", str(self._wait(wait_s))]
        if not (sys.stdout.isatty() and sys.stdin.isatty()):
            command.append("--once")
        process = subprocess.Popen(command)
        if block:
            try:
                process.wait()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
        return process

    def _wait(self, wait_s: float) -> Path:
        deadline = time.monotonic() + wait_s
        while (run := linked_run(self.folder)) is None:
            if time.monotonic() >= deadline:
                raise RunNotFoundError(
                    f"no run started in {self.folder} within {wait_s:g} s. Train with output_dir={str(self.folder)!r}."
                )
            time.sleep(0.2)
        return run
