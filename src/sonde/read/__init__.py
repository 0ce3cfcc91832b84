"""Reading of runs: find a run, determine its true status, read its series lazily. Never writes, never needs torch."""
