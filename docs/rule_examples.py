"""Create the examples of the rules' pages:  python docs/rule_examples.py [RULE …]

Trains a program of `tests/programs/faults` for each rule, diagnoses the run, and keeps what `sonde diagnose` prints
about the rule in `src/sonde/diagnose/examples`. A rule without a program of its own is taken from a run in which it is
found, as a consequence or a remark. Numbers differ from machine to machine, so no test compares them.
"""

from __future__ import annotations

import io
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "src" / "sonde" / "diagnose" / "examples"
WIDTH = 100


def shown(finding: Any, window: Any) -> str:
    """The finding as `sonde diagnose` prints it."""
    from rich.console import Console

    from sonde.show.term.finding import FindingNote

    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
    console.print(FindingNote(finding, window))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def record(program: Any, folder: str) -> Any:
    """Train a program under sonde, with only the calls a user would write."""
    import sonde
    from faults.program import Observer, train

    class Recorded(Observer):
        def start(self, model: Any, optimizer: Any, loss_fn: Any, total_steps: int, val: Any = None) -> None:
            self.session = sonde.init(project="faults", dir=folder, verbose=False, live_rules=False)
            self.session.watch(model, optimizer)

        def before_step(self, step: int, batch: Any) -> None:
            sonde.batch(*batch)

        def after_step(self, step: int, loss: float) -> None:
            sonde.log({"loss": loss})

        def validation(self, step: int, metrics: dict[str, float]) -> None:
            sonde.log(metrics)

        def finish(self) -> Any:
            sonde.finish()
            return sonde.open(self.session.path).diagnosis()

    return train(program.build(0, fixed=False), Recorded())


def main(wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT / "tests" / "programs")]
    import torch

    from faults.program import programs

    torch.set_num_threads(1)
    own: set[str] = set()
    for program in sorted(programs(), key=lambda program: program.id):
        missing = {label for label in program.labels if label not in own and (not wanted or label in wanted)}
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = record(program, folder)
        for finding in found.findings:
            path = FOLDER / f"{finding.rule}.txt"
            if finding.rule in missing or (not path.exists() and finding.rule not in own):
                path.write_text(shown(finding, found.window), encoding="utf-8")
                own |= {finding.rule} & missing
        print(program.id, sorted(missing), "->", [finding.rule for finding in found.findings], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
