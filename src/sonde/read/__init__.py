"""From disk to tables: find a run, tell the truth about it, read its series lazily. Never writes, never needs torch."""
