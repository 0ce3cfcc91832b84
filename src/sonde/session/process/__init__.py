"""The recording process: how it ends, and what happens to runs in its forked children."""
