"""Finds linear layers that feed each other without a nonlinearity in between, from autograd's graph.

Two linear layers in a row are one linear layer. Modules cannot show whether there is something between them: an
activation may be a function or arithmetic; the graph knows every operation. Only names of operations are read, never
values. Unknown operations count as nonlinear: only certain cases are reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor

# Moves numbers without changing them; autograd appends "Backward0" and the like to these names.
_MOVES: Final = frozenset(
    {"View", "UnsafeView", "ReshapeAlias", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T", "Clone",
     "Expand", "ToCopy", "Alias", "Contiguous", "Movedim", "Flatten"}
)  # fmt: skip
# Linear when all but one operand are constants: dropout's mask, a scale.
_SCALES: Final = frozenset({"Mul", "Div", "NativeDropout", "Neg"})
_MAX_NODES: Final = 16
_MAX_GRAPH: Final = 20_000


class Feeding:
    """Collects the calls of linear layers in one forward pass. Holds the graph until `end`."""

    def __init__(self) -> None:
        self.fed_by: dict[str, str] = {}
        """name of a layer -> name of the layer whose output, up to linear operations, is its only input.

        Known after `end`. An output that is also used elsewhere, as by a skip connection, does not count.
        """
        self._made_by: dict[Any, str] = {}
        self._ways: dict[str, list[Any]] = {}
        """name of a layer -> nodes from its input back to the output of the layer that feeds it."""

    def called(self, name: str, given: object, output: object) -> None:
        """A linear layer was called with `given` and returned `output`."""
        if isinstance(given, Tensor) and given.grad_fn is not None:
            way = self._way(given.grad_fn)
            if way and self._made_by[way[-1]] != name:
                self._ways[name] = way
        if isinstance(output, Tensor) and output.grad_fn is not None:
            self._made_by[output.grad_fn] = name

    def end(self, outputs: Iterable[Tensor] = ()) -> None:
        """The forward pass has returned `outputs`. Releases the graph."""
        if self._ways:
            uses = _uses([output.grad_fn for output in outputs if output.grad_fn is not None])
            for name, way in self._ways.items():
                if all(uses.get(node) == 1 for node in way):
                    self.fed_by[name] = self._made_by[way[-1]]
        self.forget()

    def forget(self) -> None:
        self._made_by.clear()
        self._ways.clear()

    def _way(self, node: Any) -> list[Any]:
        way = [node]
        for _ in range(_MAX_NODES):
            if node in self._made_by:
                return way
            operation = node.name().rpartition("Backward")[0]
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if operation not in _MOVES | _SCALES or len(parents) != 1:
                break
            node = parents[0]
            way.append(node)
        return []


def _uses(ends: list[Any]) -> dict[Any, int]:
    """The number of operations that use the result of each node; empty if the graph is too large to walk."""
    uses: dict[Any, int] = {}
    seen, waiting = set(ends), list(ends)
    for node in ends:
        uses[node] = uses.get(node, 0) + 1  # what the model returns is used outside of it
    while waiting:
        for parent, _ in waiting.pop().next_functions:
            if parent is None:
                continue
            uses[parent] = uses.get(parent, 0) + 1
            if parent not in seen:
                if len(seen) >= _MAX_GRAPH:
                    return {}
                seen.add(parent)
                waiting.append(parent)
    return uses
