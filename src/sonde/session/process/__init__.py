"""The recording process: its training threads, how it ends, and what happens to runs in its forked children."""
