"""Issues of a single layer, each with the code change that fixes this layer."""

from __future__ import annotations

from collections.abc import Sequence

from sonde.schema.names import as_code
from sonde.show.flow.issue import Issue, IssueSeverity
from sonde.show.flow.metrics import Layer


def numerical(layer: Layer) -> Issue:
    return Issue(
        type="NUMERICAL",
        severity="CRITICAL",
        layer=layer.name,
        message=f"{layer.name}: {layer.metrics.nonfinite} values are NaN or Inf",
        recommendation=(
            f"x = x.clamp(-1e4, 1e4)  # before {as_code(layer.name)}; and add an eps to every division, log and sqrt\n"
            "torch.autograd.set_detect_anomaly(True)  # reports the operation that produced the first NaN"
        ),
        value=float(layer.metrics.nonfinite),
        healthy="0",
    )


def dead(layer: Layer) -> Issue:
    """Parameters that get no gradient."""
    why = "its output is detached" if layer.route.is_detached else "all of it is zero"
    return Issue(
        type="DEAD",
        severity="HIGH",
        layer=layer.name,
        message=f"{layer.name} ({layer.type}) gets no gradient at all: {why}",
        recommendation=(
            f"x = {as_code(layer.name)}(x)  # keep its path to the loss free of detach(), no_grad() and argmax\n"
            f"{as_code(layer.name)}.requires_grad_(False)  # or freeze it, if it is not meant to train"
        ),
        value=0.0,
        healthy="above 0",
    )


def without_gradient(num_parameters: int) -> Issue:
    """The whole network."""
    return Issue(
        type="DEAD",
        severity="CRITICAL",
        layer="",
        message=f"none of the {num_parameters} parameters of the model gets a gradient: it cannot learn anything",
        recommendation=(
            "loss = loss_fn(model(x), y)  # without detach() or no_grad() on the way\n"
            "torch.nn.init.kaiming_normal_(weight)  # and do not start two successive layers at zero"
        ),
        value=0.0,
        healthy="above 0",
    )


def unused(names: Sequence[str], fraction: float) -> Issue:
    """Layers that take no part in the loss. `fraction`: of the trainable parameters."""
    first = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return Issue(
        type="UNUSED",
        severity="HIGH" if fraction > 0.5 else "LOW",
        layer="",
        message=f"{first}: did not run, or ran without affecting the loss; {fraction:.1%} of the trainable parameters",
        recommendation=f"{as_code(names[0])}.requires_grad_(False)  # or remove it, or use its output in the loss",
        value=fraction,
        healthy="0 %",
    )


def silent(layer: Layer, severity: IssueSeverity) -> Issue:
    """Units of a rectifier that are zero for every input."""
    zeros, units = layer.metrics.activation_zero_fraction, layer.metrics.silent_units
    how = f"{units:.0%} of its units are zero for the whole batch" if units else f"{zeros:.0%} of its values are zero"
    is_module = "ReLU" in layer.type or layer.type in ("Threshold", "Hardtanh")
    mended = f"{as_code(layer.name)} = nn.LeakyReLU(0.01)" if is_module else "x = F.leaky_relu(x, 0.01)"
    where = "" if is_module else f" in {layer.name}"
    return Issue(
        type="DEAD",
        severity=severity,
        layer=layer.name,
        message=f"{layer.name} ({layer.type}{f', {layer.silent_where}' if layer.silent_where else ''}): {how}",
        recommendation=f"{mended}  # instead of ReLU{where}; also lower the learning rate, or start its bias at 0.1",
        value=max(units, zeros),
        healthy="few silent units, 30 to 75 % zeros",
    )


def saturated(layer: Layer, severity: IssueSeverity, threshold: float) -> Issue:
    width = layer.input_shape[-1] if layer.input_shape else "…"
    is_module = layer.type in ("Sigmoid", "Tanh", "Hardtanh", "Hardsigmoid")
    place = f"{as_code(layer.name)} = nn.Sequential(nn.LayerNorm({width}), nn.{layer.type}())" if is_module else (
        f"x = nn.LayerNorm({width})(x)  # in {as_code(layer.name)}"
    )  # fmt: skip
    return Issue(
        type="SATURATED",
        severity=severity,
        layer=layer.name,
        message=f"{layer.name} ({layer.type}): {layer.metrics.saturated:.0%} of its values are saturated",
        recommendation=(
            f"{place}\n# or a smaller init before it: nn.init.xavier_normal_(…); for an output, a loss on logits"
        ),
        value=layer.metrics.saturated,
        healthy=f"below {threshold:.0%}",
    )


def vanishing(layer: Layer, severity: IssueSeverity, level: float, threshold: float, unit: str) -> Issue:
    return Issue(
        type="VANISHING",
        severity=severity,
        layer=layer.name,
        message=f"the gradient reaching {layer.name} ({layer.type}) is {level:.1e}{unit}",
        recommendation=f"{_way_around(layer)}\n{_init(layer)}  # and ReLU/GELU instead of sigmoid/tanh",
        value=level,
        healthy=f"above {threshold:g}",
    )


def _way_around(layer: Layer) -> str:
    """A residual connection if input and output have the same shape, otherwise a norm after the layer."""
    code, taken, given = as_code(layer.name), layer.input_shape, layer.output_shape
    is_conv = layer.type.startswith("Conv")
    if taken and taken == given:
        norm = f"nn.GroupNorm(1, {taken[1]})" if is_conv and len(taken) > 1 else f"nn.LayerNorm({taken[-1]})"
        return f"x = x + {code}({norm}(x))  # add a residual connection"
    if is_conv and len(given) > 2:
        return f"x = nn.BatchNorm{len(given) - 2}d({given[1]})({code}(x))"
    return f"x = nn.LayerNorm({given[-1] if given else '…'})({code}(x))"


def _init(layer: Layer) -> str:
    """An initialisation that suits the layer."""
    code = as_code(layer.name)
    if "Norm" in layer.type:
        return f"nn.init.ones_({code}.weight)"
    if layer.type in ("RNN", "LSTM", "GRU"):
        return f"nn.init.orthogonal_({code}.weight_hh_l0)"
    return f"nn.init.kaiming_normal_({code}.weight)"


def exploding(layer: Layer, severity: IssueSeverity, level: float, threshold: float, unit: str) -> Issue:
    return Issue(
        type="EXPLODING",
        severity=severity,
        layer=layer.name,
        message=f"the gradient reaching {layer.name} ({layer.type}) is {level:.1e}{unit}",
        recommendation=(
            f"x = gradient_scale(x, {1 / level:.1g})  # after {as_code(layer.name)}; or normalise the layers after it\n"
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
        ),
        value=level,
        healthy=f"below {threshold:g}",
    )
