"""One name and one layout for a tensor, whichever framework it comes from: PyTorch's, because most runs use it.

`canonical` says how each tensor of a Keras, TensorFlow, Flax or PyTorch model is converted to its canonical form; it
returns every transpose, flip and reordering, which are applied only when the tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from sonde.schema.snapshots.tensors import AnyArray

Framework = Literal["torch", "keras", "flax"]
Shape = tuple[int, ...]
Step = tuple[Literal["transpose", "flip", "reshape", "rows", "gates"], tuple[int, ...]]
"""One change of layout. `rows` keeps rows first to stop; `gates` reorders equal groups of rows."""

LEAVES: Final[Mapping[str, str]] = {
    "kernel": "weight", "embeddings": "weight", "embedding": "weight", "gamma": "weight", "scale": "weight",
    "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var", "mean": "running_mean",
    "var": "running_var",
}  # fmt: skip
"""The PyTorch name of a tensor; other names stay the same."""
PROJECTIONS: Final[Mapping[str, str]] = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "attention_output": "out_proj", "out": "out_proj",
    "query_dense": "q_proj", "key_dense": "k_proj", "value_dense": "v_proj", "output_dense": "out_proj",
    "q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "out_proj", "o_proj": "out_proj",
}  # fmt: skip
"""Projections of attention, by their names in PyTorch's own attention."""

LAYER_TYPES: Final[Mapping[str, str]] = {
    r"(Lazy)?(Linear|Dense|DenseGeneral|EinsumDense|Einsum)": "Linear",
    r"(Lazy)?Conv([123][dD])?": "Conv",
    r"(Lazy)?Conv(Transpose[123]d|[123]DTranspose|Transpose)": "ConvTranspose",
    r"DepthwiseConv[12]D": "DepthwiseConv",
    r"Embedding|Embed": "Embedding",
    r"(Lazy|Sync)?BatchNorm([123]d|alization)?": "BatchNorm",
    r"LayerNorm(alization)?": "LayerNorm",
    r"GroupNorm(alization)?": "GroupNorm",
    r"(\w*RMSNorm|RMSNormalization)": "RMSNorm",
    r"Multi[hH]ead(DotProduct)?Attention": "Attention",
    r"(Optimized|Simple)?LSTM(Cell)?": "LSTM",
    r"GRU(Cell)?": "GRU",
    r"(Simple)?RNN(Cell)?|SimpleCell": "RNN",
    r"(Spatial)?Dropout([123][dD])?": "Dropout",
}
"""Class names in the three frameworks, and the common name."""

_COLLECTIONS: Final = frozenset({"params", "batch_stats", "value"})
_FLAX_LAYER: Final = re.compile(r"[A-Z][A-Za-z0-9]*_\d+")
_SEPARATOR: Final = re.compile(r"/|%2F|\.")


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor, and its changes of layout."""

    source: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Canonical:
    """One tensor in PyTorch's name and layout, and the stored tensors it consists of."""

    layer: tuple[str, ...]
    """The path to the layer, without framework-specific parts."""
    role: str
    """`weight`, `bias`, `running_mean`, `weight_ih_l0`, `q_proj.weight`, …"""
    layer_type: str
    """Linear, Conv, ConvTranspose, Embedding, BatchNorm, Norm, Attention, LSTM, GRU; empty if unknown."""
    shape: Shape
    parts: tuple[Part, ...]
    join: Literal["concat", "sum"] = "concat"

    @property
    def name(self) -> str:
        return ".".join((*self.layer, self.role))

    @property
    def is_as_stored(self) -> bool:
        """Whether it is one stored tensor, element for element: then both have the same statistics."""
        return len(self.parts) == 1 and not any(step == "rows" for step, _ in self.parts[0].steps)

    def read(self, read: Callable[[str], AnyArray]) -> AnyArray:
        """The tensor in its canonical layout."""
        arrays = [change_layout(read(part.source), part.steps) for part in self.parts]
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate(arrays) if self.join == "concat" else np.add.reduce(arrays)


def change_layout(array: AnyArray, steps: Iterable[Step]) -> AnyArray:
    """Apply changes of layout in turn.

    >>> change_layout(np.zeros((3, 3, 8, 16)), [("transpose", (3, 2, 0, 1))]).shape
    (16, 8, 3, 3)
    """
    for step, numbers in steps:
        if step == "transpose":
            array = array.transpose(numbers)
        elif step == "flip":
            array = np.flip(array, numbers)
        elif step == "reshape":
            array = array.reshape(numbers)
        elif step == "rows":
            array = array[numbers[0] : numbers[1]]
        else:
            gates = array.reshape(len(numbers), -1, *array.shape[1:])
            array = gates[list(numbers)].reshape(array.shape)
    return array


def layer_type(class_name: str) -> str:
    """One name for a type of layer, whichever framework's class it is; other classes keep their own.

    >>> layer_type("Dense"), layer_type("Conv2D"), layer_type("Conv2d"), layer_type("MyBlock")
    ('Linear', 'Conv', 'Conv', 'MyBlock')
    """
    return next((name for pattern, name in LAYER_TYPES.items() if re.fullmatch(pattern, class_name)), class_name)


_KINDS: Final[Mapping[str, str]] = {
    "Linear": "linear", "Conv": "conv", "ConvTranspose": "conv", "DepthwiseConv": "conv", "Embedding": "embedding",
    "BatchNorm": "norm", "LayerNorm": "norm", "GroupNorm": "norm", "RMSNorm": "norm", "Attention": "attention",
    "LSTM": "rnn", "GRU": "rnn", "RNN": "rnn", "Dropout": "dropout", "Softmax": "softmax",
}  # fmt: skip
_ACTIVATION: Final = re.compile(r"Activation|(Leaky|P|R)?ReLU6?|[CS]?ELU|GELU|SiLU|Sigmoid|Tanh|Softplus|Softsign")
_KIND_ENDINGS: Final = (("norm", r"Norm(alization)?"), ("attention", "Attention"), ("dropout", "Dropout"))


def kind_of_layer(class_name: str) -> str:
    """One word for the function of a layer, as in model.json; `other` for an unknown class.

    >>> [kind_of_layer(name) for name in ("Dense", "Conv2DTranspose", "UnitNormalization", "Net")]
    ['linear', 'conv', 'norm', 'other']
    """
    known = _KINDS.get(layer_type(class_name))
    if known is not None:
        return known
    if _ACTIVATION.fullmatch(class_name):
        return "activation"
    return next((kind for kind, ending in _KIND_ENDINGS if re.search(f"{ending}$", class_name)), "other")


def split_name(name: str) -> tuple[str, ...]:
    """The parts of a name, with any framework's separator; without Flax collections and TensorFlow's `:0`.

    >>> split_name("params/Dense_0/kernel"), split_name("dense/kernel:0")
    (('Dense_0', 'kernel'), ('dense', 'kernel'))
    """
    parts = [part for part in _SEPARATOR.split(name.removesuffix(":0")) if part]
    return tuple(part for i, part in enumerate(parts) if part not in _COLLECTIONS or not _is_collection(parts, i))


def _is_collection(parts: Sequence[str], place: int) -> bool:
    """`params` and `batch_stats` at the start, `value` at the end (Flax NNX); a layer may be called `value`."""
    return place == 0 if parts[place] != "value" else place == len(parts) - 1


def detect(names: Iterable[str]) -> Framework:
    """The framework that uses these names. Layouts of Keras and Flax differ only where the layer's name shows it."""
    names = list(names)
    leaves = {split_name(name)[-1] for name in names if split_name(name)}
    if any(leaf.startswith("weight") for leaf in leaves) and "kernel" not in leaves:
        return "torch"  # although a layer scale may be called gamma, and a norm's weight scale
    if not leaves & {"kernel", "gamma", "embeddings", "embedding", "moving_mean", "recurrent_kernel", "scale"}:
        return "torch"
    if leaves & {"gamma", "embeddings", "moving_mean", "recurrent_kernel"}:
        return "keras"
    is_flax = any(name.startswith(("params/", "params.", "batch_stats")) for name in names) or leaves & {"embedding"}
    return "flax" if is_flax or any(_FLAX_LAYER.search(name) for name in names) else "keras"
