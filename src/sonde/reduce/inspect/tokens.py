"""How targets are aligned with the tokens of the input: whether they are the next tokens, and which are padding.

No branch depends on a value, so nothing waits for the device.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from sonde.reduce.inspect.data import MAX_ELEMENTS, Values, is_integer

_MIN_LENGTH: Final = 3


def shift(x: Tensor, y: Tensor, ignore_index: int = -100, *, is_raw: bool = False) -> Tensor | None:
    """Fraction of positions where the target is the next token of the input; None unless both are token sequences.

    Labels that never went through a loss (`is_raw`) may also be the tokens themselves: some models shift them inside.
    """
    pair = _paired(x, y)
    if pair is None:
        return None
    x, y = pair
    found = _agree(y[:, : x.shape[1] - 1], x[:, 1:], ignore_index)
    if is_raw and y.shape == x.shape:
        return found.maximum(_agree(y, x, ignore_index))
    return found


def alignment(x: Tensor, y: Tensor, ignore_index: int = -100) -> Values:
    """Fractions of the targets that a loss received: the input's next tokens, the same tokens, those two ahead, and
    padding. Empty unless both are token sequences."""
    pair = _paired(x, y)
    if pair is None:
        return {}
    x, y = pair
    length = x.shape[1]
    values: dict[str, Tensor | float] = {
        "shift": _agree(y[:, : length - 1], x[:, 1:], ignore_index),
        "copy": _agree(y, x[:, : y.shape[1]], ignore_index),
    }
    if length >= _MIN_LENGTH:
        counts = y != ignore_index
        is_padding = _padding(x)[:, : y.shape[1]] & counts
        values["skip"] = _agree(y[:, : length - 2], x[:, 2:], ignore_index)
        values["padding"] = is_padding.sum() / counts.sum()
    return values


def _paired(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Rows of tokens and their targets, sampled; the targets may lack the last position."""
    if x.ndim != 2 or x.shape[1] < 2 or not (is_integer(x) and is_integer(y)):
        return None
    num, length = x.shape
    if y.numel() not in (num * length, num * (length - 1)):
        return None
    step = -(-num // max(MAX_ELEMENTS // length, 1))
    return x[::step], y.reshape(num, -1)[::step]


def _padding(x: Tensor) -> Tensor:
    """Positions within a run of equal tokens at the end of a row, where the token before is the same. The first token
    of the run may be the end of the text, which is worth learning."""
    is_run = (x == x[:, -1:]).flip(1).cumprod(1).flip(1).bool()
    is_inside = is_run.clone()
    is_inside[:, -1] = is_run[:, -2]  # one token is not a run
    return is_inside


def _agree(y: Tensor, x: Tensor, ignore_index: int) -> Tensor:
    counts = y != ignore_index
    return ((y == x) & counts).sum() / counts.sum()
