"""Measure the verdicts of `sonde.flow` on healthy models that were not written for it, and on planted faults.

    python benchmarks/flow_zoo.py            writes benchmarks/results/flow-zoo.md; needs `make zoo`
    python benchmarks/flow_zoo.py --only NAME

Healthy models: those of the foreign zoo (torchvision, timm, diffusers, transformers from a configuration), untrained,
on one batch. Models of transformers are analyzed twice: with weights in proportion to their small width, as the zoo
trains them, and exactly as their package initialises them. Faults: those of `tests/flow/test_issues.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[variable] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "foreign"), str(ROOT / "tests" / "flow")]

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import specimens_initial  # noqa: E402
import specimens_other  # noqa: E402
import specimens_text  # noqa: E402
import specimens_timm  # noqa: E402
import specimens_torchvision  # noqa: E402
import specimens_vision  # noqa: E402
from sonde.flow import FlowReport, analyze  # noqa: E402
from specimen import Specimen, own_loss  # noqa: E402

OF_TRANSFORMERS = (*specimens_text.ALL, *specimens_vision.ALL, *specimens_other.ALL)
OTHERS = (*specimens_timm.ALL, *specimens_torchvision.ALL, *specimens_initial.ALL)
SCALES = ("initializer_range", "init_std", "initializer_std", "initializer_factor", "layer_scale_init_value")
"""Values of a configuration that the zoo sets and the package's own initialisation does not."""
HEAD = """\
# Flow on foreign models

`python benchmarks/flow_zoo.py` builds each model, untrained, and analyzes it on one batch. Every healthy model should
have no CRITICAL and no HIGH issue; every planted fault should be found.
"""


class Whole(nn.Module):
    """A model together with its loss."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.net, batch)


def report_of(specimen: Specimen) -> FlowReport:
    torch.manual_seed(0)
    model, batch = specimen.build().train(), next(iter(specimen.batches()))
    if specimen.loss is own_loss:
        return analyze(model, batch)
    return analyze(Whole(model, specimen.loss), (batch,))


def unscaled(values: dict[str, Any]) -> dict[str, Any]:
    return {k: unscaled(v) if isinstance(v, dict) else v for k, v in values.items() if k not in SCALES}


def report_as_packaged(specimen: Specimen) -> FlowReport:
    original = transformers.AutoConfig.for_model
    with patch.object(transformers.AutoConfig, "for_model", lambda kind, **values: original(kind, **unscaled(values))):
        return report_of(specimen)


def healthy(only: str = "") -> Iterator[tuple[str, str, FlowReport]]:
    for specimen in (*OF_TRANSFORMERS, *OTHERS):
        if only.lower() in specimen.name.lower():
            yield specimen.group, specimen.name, report_of(specimen)
    for specimen in OF_TRANSFORMERS:
        if only.lower() in specimen.name.lower():
            yield "transformers, as initialised by the package", specimen.name, report_as_packaged(specimen)


def planted() -> Iterator[tuple[str, bool]]:
    from test_issues import PAIRS, kind_of, report_of

    for name, (where, faulty, _) in PAIRS.items():
        yield name, where in [issue.layer for issue in report_of(faulty).issues if issue.type == kind_of(name)]


def table(rows: list[tuple[str, str, FlowReport]]) -> str:
    lines = ["", "| package | model | modules | status | health | severe issues |", "|---|---|---|---|---|---|"]
    for group, name, report in rows:
        severe = [
            f"{i.severity} {i.type} {i.layer}".strip() for i in report.issues if i.severity in ("HIGH", "CRITICAL")
        ]
        cells = group, name, str(len(report.layers)), report.status, f"{report.health:.0f}", "; ".join(severe) or "none"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: list[tuple[str, str, FlowReport]], found: list[tuple[str, bool]]) -> str:
    lines = []
    packaged = [row for row in rows if row[0].endswith("by the package")]
    for title, part in (("as the zoo trains them", [r for r in rows if r not in packaged]), ("as packaged", packaged)):
        issues = [issue.severity for _, _, report in part for issue in report.issues]
        status = [report.status for _, _, report in part]
        lines.append(
            f"- healthy models {title}: {len(part)}; CRITICAL issues {issues.count('CRITICAL')}, HIGH issues "
            f"{issues.count('HIGH')}; {status.count('HEALTHY')} HEALTHY, {status.count('WARNING')} WARNING, "
            f"{status.count('CRITICAL')} CRITICAL"
        )
    missed = [name for name, is_found in found if not is_found]
    num_found = len(found) - len(missed)
    lines.append(f"- planted faults: {num_found} of {len(found)} found; missed: {', '.join(missed) or 'none'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="analyze models whose name has this in it, and write no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for row in healthy(options.only):
        rows.append(row)
        print(f"{row[1]:44} {row[2].status:8} {row[2].health:3.0f}", flush=True)
    found = [] if options.only else list(planted())
    text = f"{HEAD}\n{summary(rows, found)}\n{table(rows)}\n"
    print(text)
    if not options.only:
        (ROOT / "benchmarks" / "results" / "flow-zoo.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
