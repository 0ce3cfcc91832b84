"""model.eval() is forgotten in validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

ALMOST_ALL: Final = 0.9
MIN_EVALUATIONS: Final = 2


@rule(causes=("overfitting", "label_shuffling"), references=("PyTorch documentation: Module.eval",))
def train_mode_validation(window: Window) -> Iterator[Found]:
    """The model is validated in train mode: dropout is on, and batch norm uses and learns the validation batches."""
    share = seen(window, "data/loss/validation_train_mode")
    norms, drops = _affected(window)
    if len(share) < MIN_EVALUATIONS or not share.typical > ALMOST_ALL or not norms + drops:
        return
    effects = ["dropout is on"] if drops else []
    if norms:
        effects.append("batch norm normalises with the validation batches and adds them to its running statistics")
    yield Found(
        f"The model is validated in train mode: {' and '.join(effects)}.",
        step=int(share.steps[0]),
        confidence=0.9,
        sites=tuple(norms + drops)[:8],
        remedy="Call `model.eval()` before each validation, and `model.train()` after it.",
        evidence=(
            Evidence(
                "data/loss/validation_train_mode",
                share.typical,
                "0",
                int(share.steps[0]),
                "fraction of validation batches in train mode",
            ),
        ),
    )


def _affected(window: Window) -> tuple[list[str], list[str]]:
    """Batch norms, and dropouts that drop: only they differ between the modes."""
    modules = structure(window).modules
    norms = [m.name for m in modules if m.kind == "norm" and m.type.startswith(("BatchNorm", "SyncBatch"))]
    drops = [m.name for m in modules if m.kind == "dropout" and m.detail.get("p", 0.5)]
    return norms, drops
