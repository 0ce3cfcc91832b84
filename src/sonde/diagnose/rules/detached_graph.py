"""Layers run but never get a gradient: the graph is cut after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import listed
from sonde.schema.window import Window

MIN_STEPS: Final = 20
"""Steps of an optimizer without any gradient; some wait for another model to be trained first."""


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
    alone = _without_any(window, ran, reached)
    if alone:
        yield _of_optimizer(alone)
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


def _without_any(window: Window, ran: list[Parameter], reached: list[Parameter]) -> list[Parameter]:
    """The weights of an optimizer that makes steps, none of which ever gets a gradient, while another's do."""
    for number in dict.fromkeys(p.optimizer for p in ran):
        own = [p for p in ran if p.optimizer == number]
        steps = window.get("optim/lr" if number == 0 else f"optim/{number}/lr")[0]
        if len(steps) >= MIN_STEPS and not any(p in reached for p in own):
            return own
    return []


def _of_optimizer(own: list[Parameter]) -> Found:
    return Found(
        f"No gradient ever reaches {_names(own)}, the layers of a whole optimizer: its loss does not depend on them.",
        step=0,
        confidence=0.9,
        remedy="Compute the loss of this optimizer from outputs that still have their graph. A generator's output may "
        "be detached for the loss of the discriminator, but not for its own.",
        sites=tuple(p.name for p in own),
        evidence=(Evidence(f"grad/{own[0].name}/norm", 0.0, "one per step", meaning="number of gradients"),),
    )


def _has_gradient(window: Window, parameter: Parameter) -> bool:
    return any(len(window.get(f"grad/{name}/norm")[0]) > 0 for name in (parameter.name, *parameter.aliases))


def _names(parameters: list[Parameter]) -> str:
    return listed(list(dict.fromkeys(p.owner for p in parameters)), "layer")
