"""Two linear layers without an activation between them are equivalent to one linear layer."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Parameter, Structure, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted
from sonde.schema.window import Window


@rule(
    severity="warning",
    causes=("underfitting", "bottleneck_layer"),
    references=("UMLAUT, Schoop et al. 2021", "NeuraLint, Nikanjam et al. 2021"),
)
def missing_nonlinearity(window: Window) -> Iterator[Found]:
    """Two linear layers follow each other without an activation in between."""
    model, loss = structure(window), learned(window)
    pairs = [pair for pair in _pairs(model) if _is_pointless(*pair)]
    if not pairs or loss is None:
        return
    names = [weight.owner for pair in pairs for weight in pair]
    first, second = pairs[0]
    more = f" (nor in {counted(len(pairs) - 1, 'more such pair')})" if len(pairs) > 1 else ""
    yield Found(
        f"There is no activation between {first.owner} and {second.owner}{more}: "
        "two linear layers in a row compute no more than one.",
        step=int(loss.steps[0]),
        confidence=0.95,
        sites=list(dict.fromkeys(names)),
        evidence=[
            Evidence(
                "model", float(len(pairs)), "0", meaning="pairs of linear layers without an activation between them"
            )
        ],
        remedy=f"Put `nn.ReLU()` or `nn.GELU()` after {first.owner}, or merge the two layers into one.",
        # A model that learns the task anyway has no problem.
        severity="info" if loss.left < 0.05 else None,
    )


def _pairs(model: Structure) -> list[tuple[Parameter, Parameter]]:
    """Weights of consecutive layers without a nonlinearity in between."""
    weights = {weight.owner: weight for weight in model.parameters if weight.name.endswith("weight")}
    return [
        (weights[source], weights[module.name])
        for module in model.in_order
        if isinstance(source := module.detail.get("fed_by"), str) and source in weights and module.name in weights
    ]


def _is_pointless(first: Parameter, second: Parameter) -> bool:
    """Whether a pair serves no purpose. Pairs that save parameters are intended: low rank, depthwise and pointwise,
    1xn and nx1, adapters. Next to a convolution over tokens, a linear layer is the pointwise part."""
    if first.is_lora or second.is_lora or not (first.trainable and second.trainable):
        return False
    middle = first.shape[0]
    if middle < min(first.fan_in or (first.shape[1] if len(first.shape) > 1 else 1), second.shape[0]):
        return False
    kernels = [weight.shape[2:] for weight in (first, second)]
    if any(len(set(kernel)) > 1 for kernel in kernels):
        return False
    is_pointwise = [set(kernel) <= {1} for kernel in kernels]
    return not (any(is_pointwise) and any(kernels))
