"""Which linear layer feeds which other one with nothing that bends in between: read off autograd's graph.

Two linear layers in a row are one linear layer. Whether there is something between them cannot be told from modules:
an activation may be a function or arithmetic; the graph knows every operation. Only names of operations are looked at,
never values. Unknown operations count as bending: what is not surely linear is not reported.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

# Moves numbers about without changing them; autograd appends "Backward0" and the like to these names.
_MOVES: Final = frozenset(
    {"View", "UnsafeView", "ReshapeAlias", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T", "Clone",
     "Expand", "ToCopy", "Alias", "Contiguous", "Movedim", "Flatten"}
)  # fmt: skip
# Linear when all but one operand are constants: dropout's mask, a scale.
_SCALES: Final = frozenset({"Mul", "Div", "NativeDropout", "Neg"})
_MAX_NODES: Final = 16


class Feeding:
    """Told of every call of a linear layer in one forward pass. Holds the graph until `end`."""

    def __init__(self) -> None:
        self.fed_by: dict[str, str] = {}
        """name of a layer -> name of the layer whose output is, but for linear operations, its input."""
        self._made_by: dict[Any, str] = {}

    def called(self, name: str, given: object, output: object) -> None:
        """A linear layer was called with `given` and returned `output`."""
        if isinstance(given, Tensor) and given.grad_fn is not None:
            source = self._source(given.grad_fn)
            if source is not None and source != name:
                self.fed_by[name] = source
        if isinstance(output, Tensor) and output.grad_fn is not None:
            self._made_by[output.grad_fn] = name

    def end(self) -> None:
        """Let go of the graph."""
        self._made_by.clear()

    def _source(self, node: Any) -> str | None:
        for _ in range(_MAX_NODES):
            if node in self._made_by:
                return self._made_by[node]
            operation = node.name().rpartition("Backward")[0]
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if operation not in _MOVES | _SCALES or len(parents) != 1:
                return None
            node = parents[0]
        return None
