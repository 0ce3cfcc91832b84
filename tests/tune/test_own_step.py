"""A method's own `train_step` against a loop written by hand: gradients, losses and weights, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.errors import UsageError
from sonde.tune import FineTuningMethod, TrainingWrapper
from sonde.tune.config import ModelConfig
from sonde.tune.methods.full import Method as Full
from sonde.tune.train.data import generate

pytestmark = [pytest.mark.slow]

TINY = ModelConfig(
    architecture="llama",
    options={
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
)
RATE = 0.05


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(Path.cwd() / "cache"))


class Own(FineTuningMethod):
    """Keeps its batches and the model it began with, so that the training can be repeated by hand."""

    def __init__(self, ending: str = "backward") -> None:
        self.ending = ending
        self.batches: list[Any] = []
        self.dtypes: set[torch.dtype] = set()

    def setup_training(self, model, config):
        self.model = model.requires_grad_(True)
        self.start = copy.deepcopy(model)
        return model

    def train_step(self, batch):
        self.batches.append({name: value.clone() for name, value in batch.items()})
        output = self.model(**batch)
        self.dtypes.add(self.model.lm_head(torch.ones(1, 16)).dtype)
        return self._end(output.loss)

    def _end(self, loss):
        match self.ending:
            case "backward":
                loss.backward()
                return loss.detach()
            case "graph":
                return loss
            case "number":
                loss.backward()
                return loss.item()
            case "parts":
                torch.autograd.backward([0.25 * loss, 0.75 * loss], retain_graph=True)
                return loss.detach()
            case "none":
                return loss.backward()
            case "detached":
                return loss.detach()
            case "vector":
                return torch.stack([loss, loss])
        raise AssertionError(self.ending)

    def save_checkpoint(self, path):
        Path(path).mkdir(parents=True)


def tuned(method: Any, num_texts: int = 32, **options: Any) -> Any:
    training = {"learning_rate": RATE, "batch_size": 4, "max_length": 24, "scheduler": "constant", "max_grad_norm": 0.0}
    arguments = {"disable_tqdm": True, "optim": "sgd", **options.pop("arguments", {})}
    made = TrainingWrapper(model=TINY, training_method=method, arguments=arguments, **training, **options)
    return made.train(generate("copying", num_texts), "out", 1)


def by_hand(method: Own, num_micro: int, dtype: torch.dtype = torch.float32) -> tuple[Any, list[float]]:
    """Plain PyTorch: each micro-batch counts as one of those in its step."""
    model = method.start.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for start in range(0, len(method.batches), num_micro):
        batches = method.batches[start : start + num_micro]
        found = []
        for batch in batches:
            loss = model(**batch).loss
            (loss / len(batches)).backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(found) / len(found))
    return model, losses


def gradient_norms(model: Any, batches: list[Any]) -> dict[str, float]:
    (sum(model(**batch).loss for batch in batches) / len(batches)).backward()
    return {name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()}


def recorded(result: Any, name: str) -> list[float]:
    return sonde.open(result.run).scalars(name)["value"].to_pylist()


@pytest.mark.parametrize("ending", ["backward", "graph", "number", "parts"])
def test_own_step_under_accumulation_is_the_loop_by_hand(ending: str) -> None:
    method = Own(ending)
    result = tuned(method, num_texts=28, gradient_accumulation=4)  # seven micro-batches: the last step has three
    model, losses = by_hand(method, 4)
    assert recorded(result, "loss") == pytest.approx(losses, rel=1e-6)
    tolerance = {"rtol": 1e-5, "atol": 1e-8} if ending == "parts" else {"rtol": 0, "atol": 0}
    for (name, ours), theirs in zip(result.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name, **tolerance)


def test_own_step_is_right_in_float64() -> None:
    method = Own()
    result = tuned(method, gradient_accumulation=3)
    first = gradient_norms(copy.deepcopy(method.start).double(), method.batches[:3])
    norms = sonde.open(result.run).stats("grad/*/norm", steps=0)
    found = dict(zip(norms["site"].to_pylist(), norms["value"].to_pylist(), strict=True))
    assert found == pytest.approx({name: first[name] for name in found}, rel=1e-4)
    model, losses = by_hand(method, 3, torch.float64)
    assert recorded(result, "loss") == pytest.approx(losses, rel=1e-6)
    for ours, theirs in zip(result.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("ending", ["backward", "graph"])
def test_own_step_runs_in_the_precision_of_the_training(ending: str) -> None:
    method = Own(ending)
    result = tuned(method, gradient_accumulation=2, precision="bfloat16")
    assert method.dtypes == {torch.bfloat16}
    _, losses = by_hand(method, 2)
    assert recorded(result, "loss") == pytest.approx(losses, rel=0.02)


class Kept(Full):
    """A built-in method that keeps its batches and the model it began with."""

    def prepare(self, model: Any, config: Any) -> Any:
        prepared = super().prepare(model, config)
        self.start, self.batches = copy.deepcopy(prepared), []
        prepared.register_forward_pre_hook(lambda _, args, given: self.batches.append(given), with_kwargs=True)
        return prepared


def test_built_in_methods_weight_micro_batches_by_their_tokens() -> None:
    method = Kept()
    result = tuned(method, num_texts=28, gradient_accumulation=4)
    model, losses = method.start.double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for start in range(0, len(method.batches), 4):
        step = [dict(batch, num_items_in_batch=None) for batch in method.batches[start : start + 4]]
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)
        sums = [model(**b).loss * int((b["labels"][:, 1:] != -100).sum()) for b in step]
        loss = sum(sums) / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert recorded(result, "loss") == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(result.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("none", r"Own.train_step returned None; return the loss of the batch"),
        ("detached", r"without a graph and never called backward\(\), so nothing would train"),
        ("vector", r"a tensor of shape \(2,\); return a single number"),
    ],
)
def test_a_step_that_gives_no_loss_is_an_error_that_says_so(ending: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tuned(Own(ending))
    original = torch.autograd.backward
    assert original.__module__ == "torch.autograd"  # nothing of torch stays replaced
