"""Records while the largest file it may write shrinks and grows again, as a disk does that fills up and is cleared.

Argument: run folder. Prints JSON: what happened in each phase.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from conftest import put_steps
from sonde.write.writer import Writer, WriterOptions

sys.dont_write_bytecode = True  # Python does not notice that it could write only half a file
run = Path(sys.argv[1])
told: list[str] = []
options = WriterOptions(
    flush_interval_s=0.01, heartbeat_s=0.02, seal_steps=10_000, queue_mib=0.05, flush_mib=0.01, system_interval_s=0
)
writer = Writer(run, options, on_warning=told.append)
put_steps(writer, range(10))
flushed_before = writer.flush(20)

log = run / "stats" / "rank-0000" / "live.log"
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 1000, limit[1]))  # room for one frame and a part of one
taken_during = put_steps(writer, range(10, 500))
while not writer.degraded:
    time.sleep(0.01)
flushed_during = writer.flush(0.2)
degraded_during, dropped_during = writer.degraded, writer.dropped

resource.setrlimit(resource.RLIMIT_FSIZE, limit)
flushed_after = writer.flush(30)
put_steps(writer, range(500, 510))
last_flush = writer.flush(30)
while writer.degraded:
    time.sleep(0.01)
degraded_after = writer.degraded
writer.close("finished", deadline_s=20)
print(
    json.dumps(
        {
            "flushed": [flushed_before, flushed_during, flushed_after, last_flush],
            "taken_during": taken_during,
            "degraded": [degraded_during, degraded_after],
            "dropped_during": dropped_during,
            "dropped": writer.dropped,
            "told": told,
        }
    )
)
