"""Parameters that get gradients but are in no optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sonde.diagnose.finding import Evidence, Finding
from sonde.diagnose.rule import found, rule
from sonde.diagnose.structure import Parameter, structure
from sonde.schema.window import Window


@rule(
    severity="critical",
    needs=("grad/*/norm",),
    causes=(
        "underfitting", "lr_too_low", "frozen_layers", "vanishing_gradients", "missing_zero_grad", "bottleneck_layer",
        "exploding_gradients", "qkv_imbalance", "label_shuffling",
    ),
    references=("Jiang et al. 2025, TrainCheck",),
)  # fmt: skip
def optimizer_missing_params(window: Window) -> Iterator[Finding]:
    """Trainable parameters that no optimizer knows stay as they were initialised."""
    known = structure(window)
    unregistered = _unregistered(window)
    missing = [p for p in known.parameters if p.trainable and not p.in_optimizer and _has_gradient(window, p)]
    if not known.optimizers or (not missing and not unregistered):
        return
    matrices = [p for p in missing if len(p.shape) >= 2] or missing
    owners = list(dict.fromkeys(p.owner for p in matrices))
    trainable = sum(p.trainable for p in known.parameters)
    what = f"{len(missing)} of {trainable} trainable parameters ({', '.join(owners[:3])}{', …' if owners[3:] else ''})"
    if not missing:
        what = f"layers that the model holds in a plain list or dict ({', '.join(unregistered[:3])})"
    yield found(
        window,
        "optimizer_missing_params",
        f"{what} take part in every forward but are in no optimizer: they never change",
        step=0,
        confidence=0.95,
        remedy=(
            "build the optimizer after the model is complete: "
            f"{known.optimizer_type or 'optimizer'}(model.parameters(), lr={known.group_value('lr')})"
            if missing
            else "keep them in nn.ModuleList(...) or nn.ModuleDict(...)"
        ),
        sites=tuple(p.name for p in missing),
        evidence=tuple(
            Evidence(
                f"grad/{p.name}/norm", float(np.median(window.get(f"grad/{p.name}/norm")[1])), "used by the optimizer"
            )
            for p in matrices[:2]
        ),
    )


def _unregistered(window: Window) -> list[str]:
    document = window.facts.get("model")
    names = document.get("unregistered") if isinstance(document, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _has_gradient(window: Window, parameter: Parameter) -> bool:
    """Whether a gradient was seen; where gradients outside the optimizer are not recorded, being trainable must do."""
    values = window.get(f"grad/{parameter.name}/norm")[1]
    return bool((values[np.isfinite(values)] > 0).any())
