"""Recurrent programs: memory that fades or explodes over time, and healthy ones whose memory is short on purpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.data import language, recall
from faults.program import Batch, Job, program

SHORT_OF = ("underfitting", "vanishing_gradients", "init_scale", "lr_too_low")
LOUD = (
    "exploding_gradients", "loss_oscillation", "loss_spikes", "init_scale", "clip_too_tight", "nan_inf", "underfitting",
    "output_logit_growth", "lr_too_high",
)  # fmt: skip


class Recurrent(nn.Module):
    """A recurrent layer read at its last step."""

    def __init__(self, cell: nn.RNNBase, classes: int) -> None:
        super().__init__()
        self.cell = cell
        self.head = nn.Linear(cell.hidden_size, classes)

    def forward(self, x: Tensor) -> Any:
        h, _ = self.cell(x)
        return self.head(h[:, -1])


class Tagger(nn.Module):
    """A recurrent language model: one output per step."""

    def __init__(self, vocabulary: int = 24, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Any:
        h, _ = self.cell(self.tokens(x))
        return self.head(h)


def recurrence(cell: nn.RNNBase) -> nn.Parameter:
    """The weights that lead from one step to the next."""
    return cell.get_parameter("weight_hh_l0")


def per_token(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every position that is scored."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=-100)


def _job(model: nn.Module, batches: Iterable[Batch], *, lr: float, steps: int = 240, clip: float | None = 1.0) -> Job:
    optimizer = torch.optim.Adam(model.parameters(), lr)
    held_out = next(recall(500, batch=256))
    return Job(
        model,
        optimizer,
        functional.cross_entropy,
        batches,
        steps,
        clip=clip,
        val=held_out,
        val_every=40,
        is_accuracy=True,
    )


@program("rnn_weak_memory", "rnn_vanishing_temporal", also_ok=SHORT_OF, where="cell", source="Pascanu 2013")
def _(seed: int, fixed: bool) -> Job:
    cell = nn.RNN(4, 40, batch_first=True)
    if fixed:
        nn.init.orthogonal_(recurrence(cell))
    else:
        nn.init.normal_(recurrence(cell), 0, 0.03)
    return _job(Recurrent(cell, 4), recall(seed), lr=2e-3)


@program(
    "lstm_forgets", "rnn_vanishing_temporal", also_ok=SHORT_OF, where="cell", source="Jozefowicz 2015, forget bias"
)
def _(seed: int, fixed: bool) -> Job:
    cell = nn.LSTM(4, 32, batch_first=True)
    for name in ("bias_ih_l0", "bias_hh_l0"):
        bias = getattr(cell, name)
        nn.init.zeros_(bias)
        bias.data[32:64] = 1.5 if fixed else -2.0  # input, forget, cell, output gates
    return _job(Recurrent(cell, 4), recall(seed), lr=4e-3)


@program(
    "gru_forgets_two_layers", "rnn_vanishing_temporal", also_ok=SHORT_OF, where="cell", source="closed update gate"
)
def _(seed: int, fixed: bool) -> Job:
    cell = nn.GRU(4, 32, 2, batch_first=True)
    for layer in range(2):
        bias = getattr(cell, f"bias_hh_l{layer}")
        bias.data[32:64] = 3.0 if fixed else -5.0  # reset, update, new gates
    return _job(Recurrent(cell, 4), recall(seed), lr=4e-3)


@program("rnn_loud_memory", "rnn_exploding_temporal", also_ok=LOUD, where="cell", source="Pascanu 2013")
def _(seed: int, fixed: bool) -> Job:
    cell = nn.RNN(4, 40, batch_first=True)
    nn.init.orthogonal_(recurrence(cell), gain=1.0 if fixed else 3.0)
    return _job(Recurrent(cell, 4), recall(seed), lr=2e-3, clip=None)


@program(
    "rnn_relu_loud", "rnn_exploding_temporal", also_ok=LOUD, where="cell", source="Le 2015, identity initialisation"
)
def _(seed: int, fixed: bool) -> Job:
    cell = nn.RNN(4, 32, batch_first=True, nonlinearity="relu")
    nn.init.eye_(recurrence(cell))
    recurrence(cell).data *= 1.0 if fixed else 1.5
    return _job(Recurrent(cell, 4), recall(seed), lr=4e-4)


def _last_only(seed: int) -> Iterable[Batch]:
    """The class is shown in the last two steps: nothing before them matters."""
    for x, y in recall(seed, length=30):
        yield x.flip(1), y


@program("h_rnn_short_task", source="control: the memory fades, and nothing needs it")
def _(seed: int, fixed: bool) -> Job:
    cell = nn.RNN(4, 32, batch_first=True)
    nn.init.normal_(recurrence(cell), 0, 0.05)
    job = _job(Recurrent(cell, 4), _last_only(seed), lr=2e-3)
    job.val = next(iter(_last_only(501)))
    return job


@program("h_lstm_recall", source="control: an LSTM with an open forget gate learns to remember")
def _(seed: int, fixed: bool) -> Job:
    cell = nn.LSTM(4, 32, batch_first=True)
    cell.get_parameter("bias_hh_l0").data[32:64] = 3.0
    return _job(Recurrent(cell, 4), recall(seed), lr=5e-3)


@program("h_gru_language", source="control: a first-order chain needs one step of memory")
def _(seed: int, fixed: bool) -> Job:
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    held_out = next(language(77, batch=32, pool=1))
    return Job(model, optimizer, per_token, language(seed), 150, clip=1.0, val=held_out, val_every=30)
