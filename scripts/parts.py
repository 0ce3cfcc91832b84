"""Run parts of the Makefile one after the other, then print how long each took:  parts.py make lint types

Stops at the first part that fails and exits with its exit code.
"""

from __future__ import annotations

import subprocess
import sys
import time


def main() -> None:
    make, *parts = sys.argv[1:]
    took: dict[str, float] = {}
    code = 0
    for part in parts:
        began = time.monotonic()
        code = subprocess.run([make, "--no-print-directory", part], check=False).returncode
        took[part] = time.monotonic() - began
        if code:
            break
    print()
    for part, seconds in took.items():
        failed = "  failed" if code and part == [*took][-1] else ""
        print(f"  {part:<12}{int(seconds) // 60:>4} min {int(seconds) % 60:02d} s{failed}")
    total = int(sum(took.values()))
    print(f"  {'in all':<12}{total // 60:>4} min {total % 60:02d} s", flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
