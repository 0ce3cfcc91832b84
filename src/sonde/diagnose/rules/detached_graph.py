"""Layers run but never get a gradient: the graph is cut after them."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import listed
from sonde.schema.window import Window


@rule(
    severity="critical",
    needs=("grad/*/norm",),
    causes=(
        "underfitting", "lr_too_low", "frozen_layers", "vanishing_gradients", "optimizer_missing_params", "init_scale",
        "bottleneck_layer", "label_shuffling", "residual_decay", "rank_collapse", "over_regularisation",
    ),
    references=("PyTorch documentation: Tensor.detach",),
)  # fmt: skip
def detached_graph(window: Window) -> Iterator[Found]:
    """Trainable layers take part in the forward pass, but no gradient ever reaches them."""
    known = structure(window)
    order = {module.name: module.order for module in known.modules}
    # Gradients are recorded only for parameters in an optimizer.
    ran = [p for p in known.matrices if order.get(p.owner, -1) >= 0 and p.in_optimizer]
    reached = [p for p in ran if _has_gradient(window, p)]
    cut = [p for p in ran if not _has_gradient(window, p)]
    if not cut or not reached:
        return
    # Layers after the last one that learns belong to an unused output, not to a cut graph.
    before = [p for p in cut if order[p.owner] < max(order[r.owner] for r in reached)]
    if len(before) < len(cut) or min(order[r.owner] for r in reached) < min(order[p.owner] for p in before):
        return
    first = min(reached, key=lambda p: order[p.owner])
    last = max(before, key=lambda p: order[p.owner])
    yield Found(
        f"No gradient ever reaches {_names(before)}: the graph is cut between {last.owner} and {first.owner}.",
        step=0,
        confidence=0.95,
        remedy="Look for `.detach()`, `.data`, `.numpy()`, `torch.no_grad()` or `argmax` between "
        f"{last.owner} and {first.owner}.",
        sites=tuple(p.name for p in before),
        evidence=(
            Evidence(f"grad/{last.name}/norm", 0.0, "one per step", meaning="number of gradients"),
            Evidence(f"grad/{first.name}/norm", float(window.get(f"grad/{first.name}/norm")[1][0]), "", 0),
        ),
    )


def _has_gradient(window: Window, parameter: Parameter) -> bool:
    return any(len(window.get(f"grad/{name}/norm")[0]) > 0 for name in (parameter.name, *parameter.aliases))


def _names(parameters: list[Parameter]) -> str:
    return listed(list(dict.fromkeys(p.owner for p in parameters)), "layer")
