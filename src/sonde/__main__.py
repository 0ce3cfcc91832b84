"""`python -m sonde` is the `sonde` command."""

from __future__ import annotations

from sonde.cli.main import main

if __name__ == "__main__":
    main()
