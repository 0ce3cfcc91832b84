"""The process that records: how it ends, and what becomes of the runs in its forked children."""
