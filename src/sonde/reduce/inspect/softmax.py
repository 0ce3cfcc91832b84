"""Whether a distribution is a softmax of probabilities instead of logits."""

from __future__ import annotations

from torch import Tensor


def log_spread(rows: Tensor) -> Tensor:
    """The largest sum over classes of log p - min(log p), over rows of logarithms of distributions.

    A softmax of probabilities q has log p - min(log p) = q - min(q), which adds up to at most 1, and nearly to 1 where
    q is confident; a softmax of logits adds up to about the number of classes times their spread.
    """
    return (rows - rows.amin(1, keepdim=True)).sum(1).amax()
