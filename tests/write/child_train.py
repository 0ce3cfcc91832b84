"""Records steps until killed, and tells on stdout which are acknowledged. Arguments: run folder, steps per flush."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from conftest import put_steps
from sonde.write.writer import Writer, WriterOptions

run, stride = Path(sys.argv[1]), int(sys.argv[2])
options = WriterOptions(flush_interval_s=0.01, heartbeat_s=0.05, seal_steps=16, system_interval_s=0)
writer = Writer(run, options, resume=True)
step = writer.next_step
print("ready", flush=True)
while True:
    put_steps(writer, range(step, step + stride))
    if writer.flush(10):
        print(step + stride - 1, flush=True)
    step += stride
