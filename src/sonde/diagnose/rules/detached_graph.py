"""Layers that run but never get a gradient: the graph is cut behind them."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.rule import Found, rule
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
    """Trainable layers take part in the forward pass but no gradient ever reaches them."""
    known = structure(window)
    order = {module.name: module.order for module in known.modules}
    # Gradients of what is in no optimizer are not recorded.
    ran = [p for p in known.matrices if order.get(p.owner, -1) >= 0 and p.in_optimizer]
    reached = [p for p in ran if _has_gradient(window, p)]
    cut = [p for p in ran if not _has_gradient(window, p)]
    if not cut or not reached:
        return
    # Layers behind the last one that learns are a second output nobody asked for, not a cut.
    before = [p for p in cut if order[p.owner] < max(order[r.owner] for r in reached)]
    if len(before) < len(cut) or min(order[r.owner] for r in reached) < min(order[p.owner] for p in before):
        return
    first = min(reached, key=lambda p: order[p.owner])
    last = max(before, key=lambda p: order[p.owner])
    yield Found(
        f"no gradient ever reaches {_names(before)}: the graph is cut between {last.owner} and {first.owner}",
        step=0,
        confidence=0.95,
        remedy=f"look for .detach(), .data, .numpy(), torch.no_grad() or argmax between {last.owner} and {first.owner}",
        sites=tuple(p.name for p in before),
        evidence=(
            Evidence(f"grad/{last.name}/norm", 0.0, "there at every step", meaning="gradients seen"),
            Evidence(f"grad/{first.name}/norm", float(window.get(f"grad/{first.name}/norm")[1][0]), "", 0),
        ),
    )


def _has_gradient(window: Window, parameter: Parameter) -> bool:
    return any(len(window.get(f"grad/{name}/norm")[0]) > 0 for name in (parameter.name, *parameter.aliases))


def _names(parameters: list[Parameter]) -> str:
    owners = list(dict.fromkeys(p.owner for p in parameters))
    return ", ".join(owners[:3]) + (f" and {len(owners) - 3} more layers" if owners[3:] else "")
