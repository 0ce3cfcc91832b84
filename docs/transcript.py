"""Make the transcript in README.md by really running it:  python docs/transcript.py

Runs the demo in an empty folder, then the commands below, and puts what they print between `<!-- transcript -->` and
`<!-- end -->`. Times and losses differ from run to run, so no test compares them; the commands are tested like all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SQL = (
    "select step, ratio from stats where kind = 'update' and site = 'blocks.2.mlp.0.weight' "
    "and step between 298 and 301"
)
COMMANDS = [
    ["show", "latest"],
    [
        "query",
        "latest",
        SQL,
    ],
]
_PLACE = re.compile(r"(<!-- transcript -->\n).*?(<!-- end -->)", re.DOTALL)


def run(folder: Path, *arguments: str) -> str:
    plain = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=plain, text=True, check=True, stdout=subprocess.PIPE
    )
    return done.stdout


def transcript() -> str:
    """Commands and what they print, with the folder they ran in taken out."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        run(folder, str(ROOT / "examples" / "demo.py"))
        for words in COMMANDS:
            shown = " ".join(f'"{word}"' if " " in word else word for word in words)
            output = run(folder, "-c", "from sonde.cli.main import main; main()", *words)
            lines += [f"$ sonde {shown}", *(line.rstrip().replace(f"{folder}/", "") for line in output.splitlines())]
    return "```console\n" + "\n".join(lines) + "\n```\n"


def main() -> None:
    readme = ROOT / "README.md"
    made = transcript()
    readme.write_text(
        _PLACE.sub(lambda match: match[1] + made + match[2], readme.read_text(encoding="utf-8")), encoding="utf-8"
    )
    print(made)


if __name__ == "__main__":
    main()
