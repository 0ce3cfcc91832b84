"""The autograd graph of one pass as plain numbers, read once between forward and backward.

Nodes are numbered from the loss to the inputs, so that every consumer has a smaller number than what it consumes.
Parameters are not nodes: a weight used twice does not connect two layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from sonde.flow.fetch import fetch

_VIEWS: Final = (
    "TBackward", "View", "Unsafe", "Expand", "Unsqueeze", "Squeeze", "Permute", "Transpose",
    "ToCopy", "Alias", "Reshape", "Slice",
)  # fmt: skip
"""Operations between a parameter and the one that uses it, which change none of its values."""
_MAX_HOPS: Final = 4
_PRODUCTS: Final = ("mm", "mul", "linear", "conv", "norm")
"""Parts of the names of operations that multiply by a parameter."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A parameter that multiplies the input of a node."""

    parameter: str
    fan_in: int
    """How many products each output is a sum of; 1 for a scale of single elements."""


@dataclass(slots=True)
class Joint:
    """A concatenation, and whether each of its inputs gets any gradient: known after the backward pass."""

    node: int
    inputs: list[int | None]
    flags: list[Tensor] = field(default_factory=list)

    def note(self, grads: Sequence[Tensor | None], _: object) -> None:
        if not self.flags and all(grad is not None for grad in grads):
            self.flags = [grad.detach().any() for grad in grads if grad is not None]


@dataclass(slots=True)
class Graph:
    """The nodes between the loss and the inputs."""

    inputs: list[list[int]] = field(default_factory=list)
    consumers: list[list[int]] = field(default_factory=list)
    scales: dict[int, Scale] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """The nodes of a module's outputs, one for each call that reaches the loss."""
    cut_off: frozenset[str] = frozenset()
    """Modules whose output was detached."""
    joints: list[Joint] = field(default_factory=list)

    def cut_unused(self) -> None:
        """Remove edges of concatenations that carried no gradient: of tokens of which only the class is used, say."""
        flags = fetch([flag.float() for joint in self.joints for flag in joint.flags])
        used = iter(flag > 0 for (flag,) in flags)
        for joint in self.joints:
            carried = [next(used) for _ in joint.flags]
            if len(carried) != len(joint.inputs) or not any(carried):
                continue  # no gradient came by
            kept = {number for number, is_used in zip(joint.inputs, carried, strict=True) if is_used}
            for number in {number for number in joint.inputs if number is not None} - kept:
                self.inputs[joint.node].remove(number)
                self.consumers[number].remove(joint.node)
        self.joints.clear()
        for node in range(1, len(self.inputs)):  # what only leads to such an edge leads nowhere
            if not self.consumers[node]:
                for number in self.inputs[node]:
                    self.consumers[number].remove(node)
                self.inputs[node] = []


def read_graph(
    loss: Tensor,
    outputs: Sequence[tuple[str, Any]],
    detached: Iterable[Any],
    parameters: Mapping[int, tuple[str, tuple[int, ...]]],
) -> Graph:
    """`outputs`: (module, node); `detached`: nodes of detached tensors; `parameters`: name and shape by id."""
    roots = [loss.grad_fn] if loss.grad_fn is not None else []
    numbers, inputs, consumers = _numbered(roots)
    graph = Graph(inputs, consumers)
    for node, number in numbers.items():
        if type(node).__name__ == "CatBackward0":
            joint = Joint(number, [numbers.get(other) for other, _ in node.next_functions])
            node.register_hook(joint.note)
            graph.joints.append(joint)
        scale = _scale_of(node, parameters)
        if scale is not None:
            graph.scales[number] = scale
    for module, node in outputs:
        if node in numbers:
            graph.outputs.setdefault(module, []).append(numbers[node])
    above = _numbered([node for node in detached if node is not None])[0]
    graph.cut_off = frozenset(module for module, node in outputs if node in above)
    return graph


def _numbered(roots: Sequence[Any]) -> tuple[dict[Any, int], list[list[int]], list[list[int]]]:
    """The number of each node, and the nodes that it consumes and is consumed by; every consumer comes first."""
    num_consumers: dict[Any, int] = dict.fromkeys(roots, 0)
    upstream: dict[Any, list[Any]] = {}
    waiting = list(num_consumers)
    while waiting:
        node = waiting.pop()
        upstream[node] = [n for n, _ in node.next_functions if n is not None and not hasattr(n, "variable")]
        for other in upstream[node]:
            if other not in num_consumers:
                num_consumers[other] = 0
                waiting.append(other)
            num_consumers[other] += 1
    ready = deque(node for node, num in num_consumers.items() if num == 0)
    numbers: dict[Any, int] = {}
    while ready:
        node = ready.popleft()
        numbers[node] = len(numbers)
        for other in upstream[node]:
            num_consumers[other] -= 1
            if not num_consumers[other]:
                ready.append(other)
    inputs = [list(dict.fromkeys(numbers[n] for n in upstream[node])) for node in numbers]
    consumers: list[list[int]] = [[] for _ in inputs]
    for number, others in enumerate(inputs):
        for other in others:
            consumers[other].append(number)
    return numbers, inputs, consumers


def _scale_of(node: Any, parameters: Mapping[int, tuple[str, tuple[int, ...]]]) -> Scale | None:
    """The weight of a linear, convolution or norm, or a parameter in a product. A bias and an embedding are none."""
    kind = type(node).__name__.lower()
    if not any(word in kind for word in _PRODUCTS):
        return None
    for other, _ in node.next_functions:
        named = parameters.get(id(_variable(other)))
        if named is None:
            continue
        name, shape = named
        size = max(shape, default=1)
        count = 1
        for length in shape:
            count *= length
        if count > size:  # a matrix, or the kernel of a convolution
            return Scale(name, count // max(shape[0], 1))
        if "norm" in kind or kind.startswith("mul"):
            return Scale(name, 1)
    return None


def _variable(node: Any) -> Any:
    """The parameter at this edge of the graph, seen through views."""
    for _ in range(_MAX_HOPS):
        if node is None:
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:
            return variable
        following = node.next_functions
        if len(following) != 1 or not type(node).__name__.startswith(_VIEWS):
            return None
        node = following[0][0]
    return None
