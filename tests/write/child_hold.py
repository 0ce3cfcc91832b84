"""Opens a writer on a run and waits. Argument: run folder."""

from __future__ import annotations

import sys
from pathlib import Path

from sonde.write.writer import Writer, WriterOptions

writer = Writer(Path(sys.argv[1]), WriterOptions())
print("ready", flush=True)
sys.stdin.readline()
