"""How the layers of each framework store their tensors: the meaning of each axis, and the order of gates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from sonde.schema.frameworks.layouts import (
    LEAVES,
    PROJECTIONS,
    Canonical,
    Framework,
    Part,
    Shape,
    Step,
    detect,
    split_name,
)

KERNELS: Final[Mapping[int, tuple[int, ...]]] = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}
"""(…, in, out) of Keras and Flax to (out, in, …) of PyTorch, by the number of axes."""

_TORCH_RNN: Final = re.compile(r"(weight|bias)_(ih|hh)_(l\d+(_reverse)?)")
_LSTM_GATES: Final = "ifgo"
_GRU_GATES: Final = "rzn"
_KERAS_GRU: Final[Step] = ("gates", (1, 0, 2))
"""Keras stores update, reset, new; PyTorch reset, update, new. For the LSTM both store input, forget, cell, output."""

Leaves = Mapping[str, tuple[str, Shape]]
"""Tensors of one layer by their last name: the full name and the shape."""


def canonical(shapes: Mapping[str, Shape], framework: Framework | None = None) -> list[Canonical]:
    """Every tensor of a model in PyTorch's name and layout, in the order in which layers first appear.

    >>> [found] = canonical({"params/Dense_0/kernel": (3, 8)})
    >>> found.name, found.shape, found.parts[0].steps
    ('Dense_0.weight', (8, 3), (('transpose', (1, 0)),))
    """
    kind = framework or detect(shapes)
    layers = _layers(shapes)
    prefix = _common_prefix(list(layers)) if kind != "torch" else 0
    cells = _cells(layers) if kind == "flax" else {}
    inside = {layer for gates in cells.values() for layer in gates.values()}
    found: list[Canonical] = []
    for layer, leaves in layers.items():
        if layer in inside:
            continue
        found.extend(_layer(layer, leaves, kind))
    for layer, gates in cells.items():
        found.extend(_flax_cell(layer, {gate: layers[path] for gate, path in gates.items()}))
    return [replace(c, layer=c.layer[prefix:]) for c in _with_attention(found)]


def _with_attention(found: Sequence[Canonical]) -> list[Canonical]:
    """Projections as parts of their attention: the four have one shape, and only their names distinguish them."""
    inside: dict[tuple[str, ...], set[str]] = {}
    for c in found:
        if c.layer and c.layer[-1] in PROJECTIONS:
            inside.setdefault(c.layer[:-1], set()).add(PROJECTIONS[c.layer[-1]])
    attentions = {layer for layer, names in inside.items() if {"q_proj", "k_proj", "v_proj"} <= names}
    return [
        replace(c, layer=c.layer[:-1], role=f"{PROJECTIONS[c.layer[-1]]}.{c.role}", layer_type="Attention")
        if c.layer and c.layer[-1] in PROJECTIONS and c.layer[:-1] in attentions
        else c
        for c in found
    ]


def _layers(shapes: Mapping[str, Shape]) -> dict[tuple[str, ...], dict[str, tuple[str, Shape]]]:
    layers: dict[tuple[str, ...], dict[str, tuple[str, Shape]]] = {}
    for name, shape in shapes.items():
        *layer, leaf = split_name(name) or (name,)
        layers.setdefault(tuple(layer), {})[leaf] = name, tuple(shape)
    return layers


def _common_prefix(layers: Sequence[tuple[str, ...]]) -> int:
    """The number of leading parts that all layers share: the model's own name, which the other framework does not
    have."""
    shared = 0
    while len(layers) > 1 and all(len(layer) > shared + 1 for layer in layers):
        if len({layer[shared] for layer in layers}) > 1:
            break
        shared += 1
    return shared


def _layer(layer: tuple[str, ...], leaves: Leaves, kind: Framework) -> Iterator[Canonical]:
    if kind == "torch":
        return _torch_layer(layer, leaves)
    if "recurrent_kernel" in leaves:
        return _keras_cell(layer[:-1] if len(layer) > 1 and layer[-1].endswith("cell") else layer, leaves)
    if layer and layer[-1] in PROJECTIONS and len(leaves.get("kernel", ("", ()))[1]) == 3:
        return _projection(layer, leaves)
    return _plain_layer(layer, leaves, kind)


# --------------------------------------------------------------------------------------------------- dense, conv, norms


def _plain_layer(layer: tuple[str, ...], leaves: Leaves, kind: Framework) -> Iterator[Canonical]:
    layer_type = _layer_type(layer, leaves)
    for leaf, (name, shape) in leaves.items():
        steps: tuple[Step, ...] = ()
        if leaf in ("kernel", "depthwise_kernel", "pointwise_kernel"):
            steps = _kernel_steps(layer_type, shape, kind)
        yield Canonical(layer, LEAVES.get(leaf, leaf), layer_type, _after(shape, steps), (Part(name, steps),))


def _layer_type(layer: tuple[str, ...], leaves: Leaves) -> str:
    own = layer[-1].lower() if layer else ""
    if "embeddings" in leaves or "embedding" in leaves:
        return "Embedding"
    if {"moving_mean", "mean", "running_mean"} & leaves.keys():
        return "BatchNorm"
    weight = leaves.get("kernel") or leaves.get("weight")
    if weight is None or len(weight[1]) == 1:
        return "Norm" if {"gamma", "scale", "weight", "beta"} & leaves.keys() else ""
    if len(weight[1]) == 2:
        return "Embedding" if re.search(r"emb|wte|wpe", own) else "Linear"
    if "depthwise" in own:
        return "DepthwiseConv"
    return "ConvTranspose" if "transpose" in own else "Conv"


def _kernel_steps(layer_type: str, shape: Shape, kind: Framework) -> tuple[Step, ...]:
    if len(shape) not in KERNELS:
        return ()
    spatial = tuple(range(len(shape) - 2))
    if layer_type == "DepthwiseConv":  # (…, in, multiplier) -> (in · multiplier, 1, …)
        channels = shape[-2] * shape[-1]
        order = (len(shape) - 2, len(shape) - 1, *spatial)
        return ("transpose", order), ("reshape", (channels, 1, *shape[:-2]))
    if layer_type == "ConvTranspose" and kind == "flax":
        # Flax stores (…, in, out) and does not flip the kernel; PyTorch stores (in, out, …) and does.
        order = (len(shape) - 2, len(shape) - 1, *spatial)
        return ("transpose", order), ("flip", tuple(range(2, len(shape))))
    return (("transpose", KERNELS[len(shape)]),)


def _after(shape: Shape, steps: Sequence[Step]) -> Shape:
    for step, numbers in steps:
        if step == "transpose":
            shape = tuple(shape[axis] for axis in numbers)
        elif step == "reshape":
            shape = numbers
        elif step == "rows":
            shape = (numbers[1] - numbers[0], *shape[1:])
    return shape


# ------------------------------------------------------------------------------------------------------------ attention


def _projection(layer: tuple[str, ...], leaves: Leaves) -> Iterator[Canonical]:
    """(width, heads, head width) or, for the output, (heads, head width, width), to (out, in)."""
    path = (*layer[:-1], PROJECTIONS[layer[-1]])
    is_output = path[-1] == "out_proj"
    for leaf, (name, shape) in leaves.items():
        flat: Shape = (math.prod(shape),)
        if leaf == "kernel":
            flat = (shape[0] * shape[1], shape[2]) if is_output else (shape[0], shape[1] * shape[2])
        steps: tuple[Step, ...] = (("reshape", flat),)
        if leaf == "kernel":
            steps = (*steps, ("transpose", (1, 0)))
        yield Canonical(path, LEAVES.get(leaf, leaf), "Attention", _after(shape, steps), (Part(name, steps),))


# ---------------------------------------------------------------------------------------------------------------- torch


def _torch_layer(layer: tuple[str, ...], leaves: Leaves) -> Iterator[Canonical]:
    recurrent = {leaf: match for leaf in leaves if (match := _TORCH_RNN.fullmatch(leaf))}
    if recurrent:
        yield from _torch_rnn(layer, leaves)
        return
    layer_type = _layer_type(layer, leaves)
    for leaf, (name, shape) in leaves.items():
        if leaf in ("in_proj_weight", "in_proj_bias"):
            yield from _split_projection(layer, leaf, name, shape)
        else:
            yield Canonical(layer, leaf, layer_type, shape, (Part(name),))


def _split_projection(layer: tuple[str, ...], leaf: str, name: str, shape: Shape) -> Iterator[Canonical]:
    """nn.MultiheadAttention stores the three projections of its input in one tensor."""
    third = shape[0] // 3
    for place, projection in enumerate(("q_proj", "k_proj", "v_proj")):
        steps: tuple[Step, ...] = (("rows", (place * third, (place + 1) * third)),)
        role = leaf.removeprefix("in_proj_")
        yield Canonical((*layer, projection), role, "Attention", (third, *shape[1:]), (Part(name, steps),))


# ----------------------------------------------------------------------------------------------------------- recurrence


def _torch_rnn(layer: tuple[str, ...], leaves: Leaves) -> Iterator[Canonical]:
    for suffix in dict.fromkeys(match[3] for leaf in leaves if (match := _TORCH_RNN.fullmatch(leaf))):
        weight, recurrent = leaves[f"weight_ih_{suffix}"], leaves[f"weight_hh_{suffix}"]
        num_gates = recurrent[1][0] // recurrent[1][1]
        layer_type = {4: "LSTM", 3: "GRU"}.get(num_gates, "RNN")
        for role, (name, shape) in ((f"weight_ih_{suffix}", weight), (f"weight_hh_{suffix}", recurrent)):
            yield Canonical(layer, role, layer_type, shape, (Part(name),))
        biases = [leaves[leaf] for leaf in (f"bias_ih_{suffix}", f"bias_hh_{suffix}") if leaf in leaves]
        if biases:
            yield from _biases(layer, layer_type, suffix, [(name, shape[0], ()) for name, shape in biases])


def _biases(
    layer: tuple[str, ...], layer_type: str, suffix: str, biases: Sequence[tuple[str, int, tuple[Step, ...]]]
) -> Iterator[Canonical]:
    """The bias vectors add up to one bias; only the GRU's new gate needs both separately."""
    size = biases[0][1]
    if layer_type != "GRU":
        parts = tuple(Part(name, steps) for name, _, steps in biases)
        yield Canonical(layer, f"bias_{suffix}", layer_type, (size,), parts, "sum")
        return
    split = size // 3 * 2
    both = tuple(Part(name, (*steps, ("rows", (0, split)))) for name, _, steps in biases)
    yield Canonical(layer, f"bias_rz_{suffix}", layer_type, (split,), both, "sum")
    for role, (name, _, steps) in zip(("bias_in", "bias_hn"), biases, strict=False):
        part = Part(name, (*steps, ("rows", (split, size))))
        yield Canonical(layer, f"{role}_{suffix}", layer_type, (size - split,), (part,))


def _keras_cell(layer: tuple[str, ...], leaves: Leaves) -> Iterator[Canonical]:
    (kernel, (width, gated)), (recurrent, (units, _)) = leaves["kernel"], leaves["recurrent_kernel"]
    layer_type = {4: "LSTM", 3: "GRU"}.get(gated // units, "RNN")
    order: tuple[Step, ...] = (_KERAS_GRU,) if layer_type == "GRU" else ()
    steps: tuple[Step, ...] = (("transpose", (1, 0)), *order)
    yield Canonical(layer, "weight_ih_l0", layer_type, (gated, width), (Part(kernel, steps),))
    yield Canonical(layer, "weight_hh_l0", layer_type, (gated, units), (Part(recurrent, steps),))
    if "bias" not in leaves:
        return
    name, shape = leaves["bias"]
    if len(shape) == 1:
        yield from _biases(layer, layer_type, "l0", [(name, gated, order)])
        return
    rows: list[tuple[str, int, tuple[Step, ...]]] = [
        (name, gated, (("rows", (row, row + 1)), ("reshape", (gated,)), *order)) for row in (0, 1)
    ]
    yield from _biases(layer, layer_type, "l0", rows)


def _cells(layers: Mapping[tuple[str, ...], Leaves]) -> dict[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Cells of Flax: layers whose inner layers are named after gates, `ii if ig io hi …` or `ir iz in hr hz hn`."""
    inner: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    for layer in layers:
        if len(layer) > 1:
            inner.setdefault(layer[:-1], {})[layer[-1]] = layer
    wanted = [{f"{side}{gate}" for side in "ih" for gate in gates} for gates in (_LSTM_GATES, _GRU_GATES)]
    return {cell: gates for cell, gates in inner.items() if any(names <= gates.keys() for names in wanted)}


def _flax_cell(layer: tuple[str, ...], gates: Mapping[str, Leaves]) -> Iterator[Canonical]:
    layer_type, order = ("LSTM", _LSTM_GATES) if "ii" in gates else ("GRU", _GRU_GATES)
    turn: tuple[Step, ...] = (("transpose", (1, 0)),)
    for side, role in (("i", "weight_ih_l0"), ("h", "weight_hh_l0")):
        kernels = [gates[f"{side}{gate}"]["kernel"] for gate in order]
        shape = (sum(shape[1] for _, shape in kernels), kernels[0][1][0])
        yield Canonical(layer, role, layer_type, shape, tuple(Part(name, turn) for name, _ in kernels))
    if layer_type == "LSTM":
        biases = [gates[f"h{gate}"]["bias"] for gate in order if "bias" in gates[f"h{gate}"]]
        yield from _joined(layer, "bias_l0", layer_type, biases)
        return
    yield from _joined(layer, "bias_rz_l0", layer_type, [gates[gate]["bias"] for gate in ("ir", "iz")])
    yield from chain.from_iterable(
        _joined(layer, role, layer_type, [gates[gate]["bias"]])
        for role, gate in (("bias_in_l0", "in"), ("bias_hn_l0", "hn"))
    )


def _joined(
    layer: tuple[str, ...], role: str, layer_type: str, sources: Sequence[tuple[str, Shape]]
) -> Iterator[Canonical]:
    if sources:
        shape = (sum(shape[0] for _, shape in sources),)
        yield Canonical(layer, role, layer_type, shape, tuple(Part(name) for name, _ in sources))
