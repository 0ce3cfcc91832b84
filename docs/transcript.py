"""Create the transcript in README.md by running its commands:  python docs/transcript.py

Runs the demo in an empty folder, then diagnoses the run, and puts their output between `<!-- transcript -->` and
`<!-- end -->`; of the demo, only the line that announces the fault during training. Numbers differ from machine to
machine, so no test compares them; the commands are tested like all others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PLACE = re.compile(r"(<!-- transcript -->\n).*?(<!-- end -->)", re.DOTALL)


def run(folder: Path, *arguments: str) -> str:
    """Run Python and return its output, including stderr. Exit code 1 means that something critical was found."""
    plain = os.environ | {"COLUMNS": "122", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=plain,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode in (0, 1), done.stdout
    return done.stdout


def transcript() -> str:
    """The commands and their output."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        demo = run(folder, str(ROOT / "examples" / "demo.py"))
        answer = run(folder, "-c", "from sonde.cli.main import main; main()", "diagnose", "latest")
    live = [line for line in demo.splitlines() if line.startswith("sonde: critical")]
    lines = ["$ make demo", "…", *live, "$ sonde diagnose latest", *answer.splitlines()]
    return "```console\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


def main() -> None:
    readme = ROOT / "README.md"
    made = transcript()
    readme.write_text(
        _PLACE.sub(lambda match: match[1] + made + match[2], readme.read_text(encoding="utf-8")), encoding="utf-8"
    )
    print(made)


if __name__ == "__main__":
    main()
