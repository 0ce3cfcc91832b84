"""What inspections record of models with planted faults, end to end."""

from __future__ import annotations

import gc
import json
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sonde
from awkward import Awkward
from sonde.probe.loss.functional import TARGETS

Train = Any


def columns(run: Any) -> dict[str, list[tuple[int, float]]]:
    table = run.scalars()
    found: dict[str, list[tuple[int, float]]] = {}
    for step, name, value in zip(*(table[key].to_pylist() for key in ("step", "name", "value")), strict=True):
        found.setdefault(name, []).append((step, value))
    return found


@pytest.fixture
def inspect(begin, reopen):
    """Train a model with everything inspected at every step, and give what was recorded back."""

    def run(model: nn.Module, make: Any, *, steps: int = 3, optimizer: Any = None, after: Any = None, **options: Any):
        optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        session = begin().watch(model, optimizer, **{"inspect": sonde.every(1), **options})
        for step in range(steps):
            optimizer.zero_grad()
            out = model(*make())
            loss = (out if isinstance(out, Tensor) else out["logits"]).float().square().mean()
            loss.backward()
            optimizer.step()
            if after is not None:
                after(step, model, loss)
        assert session.recording.breaker.num_errors == 0
        return reopen()

    torch.manual_seed(0)
    return run


def last(run: Any) -> dict[str, float]:
    return {name: values[-1][1] for name, values in columns(run).items()}


# ------------------------------------------------------------------------------------------------------------- units


class Functional(nn.Module):
    """The same net twice: activations as modules and as functions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 10), nn.Linear(10, 8), nn.Linear(8, 2)
        self.relu, self.tanh, self.how = nn.ReLU(), nn.Tanh(), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "modules":
            return self.c(self.tanh(self.b(self.relu(self.a(x)))))
        if self.how == "methods":
            return self.c(self.b(self.a(x).relu()).tanh())
        return self.c(torch.tanh(self.b(F.relu(self.a(x)))))


@pytest.mark.parametrize(
    ("how", "relu", "tanh"),
    [("modules", "relu", "tanh"), ("functions", "model", "model"), ("methods", "model", "model")],
)
def test_planted_dead_and_saturated_units(inspect, how, relu, tanh):
    model = Functional(how)
    with torch.no_grad():
        model.a.bias[:3] = -1e3
        model.b.bias[:2] = 100.0
    found = last(inspect(model, lambda: (torch.randn(64, 6),)))
    assert found[f"unit/{relu}/dead"] == pytest.approx(0.3)
    assert found["unit/b/input_dead"] == pytest.approx(0.3)
    assert found[f"unit/{tanh}/saturated"] == pytest.approx(0.25)
    assert "unit/a/input_dead" not in found, "data is not a layer's output"


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.again, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm(self.conv(x)))
        return self.head(self.relu(self.again(h)).mean((2, 3)))


def test_channels_of_a_relu_used_twice(inspect):
    model = Images()
    with torch.no_grad():
        model.norm.bias[:2] = -100.0
        model.again.bias[:4] = -100.0
    found = last(inspect(model, lambda: (torch.randn(4, 1, 8, 8),)))
    assert found["unit/relu/dead"] == pytest.approx(6 / 16)
    assert found["unit/again/input_dead"] == pytest.approx(2 / 8)
    assert found["unit/conv/rank_max"] == 8


def test_a_unit_that_comes_back_is_not_dead(inspect):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias[0] = -1e3

    def revive(step: int, model: nn.Module, loss: Tensor) -> None:
        if step == 1:
            with torch.no_grad():
                model[0].bias[0] = 1e-3

    found = columns(inspect(model, lambda: (torch.randn(64, 4),), steps=4, after=revive))
    assert [value for _, value in found["unit/1/dead"]] == [0.25, 0.25, 0.0, 0.0]


def test_gelu_written_by_hand_is_not_a_tanh(inspect):
    class Gelu(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + torch.tanh(x))

    class Tanh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    found = last(inspect(nn.Sequential(nn.Linear(3, 3), Gelu(), Tanh()), lambda: (torch.randn(4, 3),)))
    assert "unit/2/saturated" in found
    assert "unit/1/saturated" not in found


def test_symmetric_units_constant_outputs_and_ranks(inspect):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    nn.init.constant_(model[0].weight, 0.1)
    nn.init.zeros_(model[0].bias)
    nn.init.zeros_(model[2].weight)
    found = last(inspect(model, lambda: (torch.randn(32, 4),), optimizer=torch.optim.SGD(model.parameters(), lr=0.0)))
    assert found["unit/0.weight/row_spread"] == pytest.approx(0, abs=1e-6)
    assert found["unit/1/rank"] == pytest.approx(1, abs=1e-3)
    assert found["unit/1/rank_max"] == 6
    assert found["unit/model/batch_std"] == pytest.approx(0, abs=1e-6)
    assert found["unit/2.weight/row_spread"] == 0


def test_adapters_are_found_by_their_shape(inspect):
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 6).requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(6, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down.T @ self.up.T

    found = last(inspect(nn.Sequential(Adapted()), lambda: (torch.randn(4, 8),), steps=1))
    assert 1 <= found["unit/0.up/row_rank"] <= 2.001
    assert found["unit/0.up/adapter_ratio"] > 0
    assert "unit/0.down/row_rank" not in found


# --------------------------------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    def __init__(self, how: str, is_causal: bool) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.softmax = nn.Softmax(-1)
        self.how, self.is_causal = how, is_causal

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.is_causal else None
        if self.how.startswith("mha"):
            return self.mha(x, x, x, attn_mask=mask, need_weights=self.how == "mha-weights")[0]
        qkv = F.linear(x, self.mha.in_proj_weight, self.mha.in_proj_bias).unflatten(-1, (3, 2, 4))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        else:
            logits = q @ k.transpose(-1, -2) / 2
            logits = logits if mask is None else logits.masked_fill(mask, -torch.inf)
            y = (self.softmax(logits) if self.how == "module" else logits.softmax(-1)) @ v
        return self.mha.out_proj(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, how: str, is_causal: bool) -> None:
        super().__init__()
        self.embed, self.attn, self.head = nn.Linear(3, 8), Attention(how, is_causal), nn.Linear(8, 5)
        self.router = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attn(self.embed(x))
        h = h * self.router(h).softmax(-1).sum(-1, keepdim=True)
        return self.head(h).softmax(-1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_the_same_however_it_is_computed(begin, reopen, is_causal):
    results = {}
    for how in ("module", "function", "sdpa", "mha", "mha-weights"):
        torch.manual_seed(0)
        model = Transformer(how, is_causal)
        with torch.no_grad():
            model.attn.mha.in_proj_weight.mul_(4)
        session = begin(name=how).watch(model, inspect=sonde.every(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 9, 3)).square().sum().backward()
            optimizer.step()
        assert session.recording.breaker.num_errors == 0
        found = {name: value for name, value in last(reopen()).items() if name.startswith("attn/")}
        assert {name.split("/")[1] for name in found} == {"attn.mha" if how.startswith("mha") else "attn"}, how
        results[how] = {name.split("/")[2]: value for name, value in found.items()}
    expected = results.pop("function")
    heads = [name for name in expected if name.startswith("entropy_") and name != "entropy_min"]
    assert set(expected) - set(heads) == {"entropy", "entropy_min", "logit_max", "future", "queries", "keys"}
    assert min(expected[name] for name in heads) == pytest.approx(expected["entropy_min"])
    assert (expected["future"] == 0) == is_causal
    assert 0 < expected["entropy_min"] <= expected["entropy"] <= 1
    for how, found in results.items():
        assert found == pytest.approx(expected, abs=1e-5), how


def test_an_output_that_is_a_distribution_is_not_attention(inspect):
    class Pointer(nn.Module):
        """Returns a softmax of a product of queries and keys: its answer."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), dim=-1)

    found = last(inspect(Pointer(), lambda: (torch.randn(2, 5, 3),)))
    assert not any(name.startswith("attn/") for name in found)


# -------------------------------------------------------------------------------------------------------- recurrence


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.cell, nn.RNNBase):
            return self.head(self.cell(x)[0][:, -1])
        state: Any = None
        h = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                state = self.cell(x[:, t], state)
                h = state[0]
            elif isinstance(self.cell, nn.Linear):
                h = torch.tanh(self.cell(h) + x[:, t].sum(1, keepdim=True))
            else:
                h = self.cell(x[:, t], h)
        return self.head(h)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_reach_of_layers(inspect, kind):
    torch.manual_seed(0)
    found = columns(inspect(Recurrent(kind(3, 5, batch_first=True)), lambda: (torch.randn(4, 20, 3),), steps=7))
    assert [step for step, _ in found["rnn/cell/reach"]] == [0, 5]
    assert 0 < found["rnn/cell/reach"][0][1] < 1
    assert found["rnn/cell/length"][0][1] == 20


@pytest.mark.parametrize("cell", [nn.RNNCell(3, 5), nn.GRUCell(3, 5), nn.LSTMCell(3, 5), nn.Linear(5, 5)], ids=str)
def test_reach_of_cells_is_the_ratio_of_gradients(inspect, cell):
    """Against the gradients of the states themselves, in a forward pass of our own."""
    torch.manual_seed(0)
    model = Recurrent(cell)
    states: list[tuple[Tensor, ...]] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            tensor.retain_grad()
        states.append(output if isinstance(output, tuple) else (output,))

    handle = cell.register_forward_hook(keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = inspect(model, lambda: (torch.ones(2, 12, 3),), optimizer=optimizer)
    handle.remove()
    found = columns(run)
    assert [step for step, _ in found["rnn/cell/reach"]] == [1, 2]
    norms = [sum(float(t.grad.square().sum()) for t in states[k] if t.grad is not None) ** 0.5 for k in (-12, -1)]
    assert found["rnn/cell/reach"][-1][1] == pytest.approx(norms[0] / norms[1], rel=1e-4)
    assert found["rnn/cell/length"][-1][1] == 12


# ------------------------------------------------------------------------------------------------------- whole model


def test_mode_memory_and_gradients(inspect):
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[1].eval()
    found = columns(inspect(model, lambda: (torch.randn(8, 3),), steps=6, inspect=sonde.every(5)))
    assert [value for _, value in found["model/model/eval_share"]] == [0.5, 0.5]
    assert found["model/model/rss_mb"][0][1] > 10
    assert [step for step, _ in found["model/model/grad_cosine"]] == [1, 2, 3, 4, 5], "every step"
    assert {value for _, value in found["model/model/grad_kept"]} == {0}


def test_graphs_kept_by_the_loop_are_counted(inspect):
    kept: list[Tensor] = []
    model = nn.Linear(3, 1)
    found = columns(
        inspect(model, lambda: (torch.randn(8, 3),), steps=8, after=lambda step, model, loss: kept.append(loss))
    )
    assert found["model/model/alive"][-1][1] == found["model/model/alive_of"][-1][1] == 5


def test_graphs_of_a_clean_loop_are_gone(inspect):
    found = columns(inspect(nn.Linear(3, 1), lambda: (torch.randn(8, 3),), steps=8))
    assert found["model/model/alive"][-1][1] == 0
    assert found["model/model/alive_of"][-1][1] == 5


def test_gradients_that_are_never_cleared(begin, reopen):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    begin().watch(model, optimizer)
    for _ in range(20):
        model(torch.randn(64, 3)).square().mean().backward()
        optimizer.step()
    found = columns(reopen())
    assert {value for _, value in found["model/model/grad_kept"]} == {1}
    assert found["model/model/grad_cosine"][-1][1] > 0.99


# ----------------------------------------------------------------------------------------------------- the structure


def test_structure_is_written_after_the_first_step_and_when_it_changes(begin, tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    session = begin().watch(model, optimizer)
    run = sonde.open(session.path)
    assert run.structure() == {}

    def step() -> dict[str, Any]:
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        assert session.flush()
        return dict(run.structure())

    document = step()
    assert [m["order"] for m in document["modules"] if m["is_leaf"]] == [0, 1, 2]
    assert {m["calls"] for m in document["modules"]} == {1}
    assert [p["in_optimizer"] for p in document["parameters"]] == [True, True, False, False]
    written = (session.path / "model.json").stat().st_mtime_ns
    step()
    assert (session.path / "model.json").stat().st_mtime_ns == written, "nothing has changed"
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
    document = step()
    assert all(p["in_optimizer"] for p in document["parameters"])
    assert [group["lr"] for group in document["optimizers"][0]["groups"]] == [0.1, 0.5]
    model[0].weight.requires_grad_(False)
    assert step()["trainable_parameters"] == document["trainable_parameters"] - 12
    assert run.warnings == []


def test_damaged_structure_is_a_warning(begin, reopen):
    model = nn.Linear(2, 1)
    session = begin().watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 2)).sum().backward()
    optimizer.step()
    run = reopen()
    file = session.path / "model.json"
    good = file.read_text()
    assert json.loads(good)["crc32"]
    for damaged in (good.replace("Linear", "Linaer", 1), good[:-20], "[]", '{"modules": 3}', '{"parameters": [3]}', ""):
        file.write_text(damaged)
        assert run.structure() == {}
        assert any("model.json" in warning for warning in run.warnings)
    file.write_text(good)
    assert run.structure()["modules"]
    assert run.warnings == []


@pytest.mark.parametrize("kept", ["nothing", "model"])
def test_structure_outlives_the_function_that_trained(begin, reopen, kept):
    def train() -> Any:
        model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        begin().watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 3)).sum().backward()
            optimizer.step()
        return model if kept == "model" else None

    survivor = train()
    gc.collect()
    document = reopen().structure()
    assert [module["type"] for module in document["modules"] if module["is_leaf"]] == ["Linear", "ReLU", "Linear"]
    assert [parameter["in_optimizer"] for parameter in document["parameters"]] == [True] * 4
    assert [optimizer["type"] for optimizer in document["optimizers"]] == ["SGD"]
    del survivor


def test_two_models_are_one_document(begin, reopen):
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    session = begin()
    session.watch(first, prefix="a.")
    session.watch(second, prefix="b.")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for _ in range(3):
        second(first(torch.randn(3, 2))).sum().backward()
        optimizer.step()
    document = reopen().structure()
    assert {p["name"] for p in document["parameters"]} >= {"a.weight", "b.weight"}
    assert document["total_parameters"] == 9


# ---------------------------------------------------------------------------------------------------- leaving no trace


def test_awkward_outputs_survive_and_nothing_is_left_behind(begin, reopen):
    before = [vars(holder).get(name) for holder, name, _ in TARGETS]
    model = Awkward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = begin().watch(model, optimizer, inspect=sonde.every(1))
    for _ in range(4):
        model(torch.randint(0, 11, (4, 6)))["logits"].square().mean().backward()
        optimizer.step()
        assert [vars(holder).get(name) for holder, name, _ in TARGETS] == before, "between passes torch is untouched"
    assert session.recording.breaker.num_errors == 0
    run = reopen()
    assert {"unit/first.relu/dead", "unit/second.relu/dead"} <= set(columns(run))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    ref = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert ref() is None


def test_a_forward_pass_that_fails_leaves_torch_as_it_was(begin):
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor, fail: bool) -> Tensor:
            x = F.relu(self.linear(x))
            if fail:
                raise ValueError("theirs")
            return x

    before = [vars(holder).get(name) for holder, name, _ in TARGETS]
    model = Fails()
    session = begin().watch(model, inspect=sonde.every(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="theirs"):
        model(torch.randn(2, 2), fail=True)
    model(torch.randn(2, 2), fail=False).sum().backward()
    optimizer.step()
    assert [vars(holder).get(name) for holder, name, _ in TARGETS] == before
    with pytest.raises(ValueError, match="theirs"):
        model(torch.randn(2, 2), fail=True)
    session.finish()
    assert [vars(holder).get(name) for holder, name, _ in TARGETS] == before


def test_nothing_is_inspected_when_not_asked_for(inspect):
    found = last(inspect(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), lambda: (torch.randn(4, 2),), inspect=False))
    assert not any(name.startswith(("unit/", "attn/", "rnn/", "model/")) for name in found)


def test_values_are_finite_for_odd_shapes(inspect):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.relu, self.tanh = nn.ReLU(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            self.relu(h[:0])
            self.relu(h[0])
            self.tanh(h.sum())
            self.relu(h.double())
            return h

    found = last(inspect(Odd(), lambda: (torch.randn(4, 3),)))
    assert all(math.isfinite(value) for name, value in found.items() if name.startswith("unit/"))


def test_layers_of_a_deep_model_take_turns(inspect):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(80)])
    found = columns(inspect(model, lambda: (torch.randn(4, 2),), steps=7))
    ranks = [step for name, points in found.items() if name.endswith("/rank") for step, _ in points]
    per_step = [ranks.count(step) for step in range(7)]
    assert per_step[0] == 81
    assert max(per_step[1:]) <= 32
    assert all(len(points) >= 3 for name, points in found.items() if name.endswith(("/rank", "/row_spread")))


class CountsFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


class CountsOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [CountsFunctions, CountsOperations])
def test_a_mode_of_the_user_sees_none_of_our_operations(begin, mode):
    x = torch.randn(4, 9, 3)
    seen = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = Transformer("function", is_causal=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = begin().watch(model, optimizer, inspect=sonde.every(1), activations=False) if is_watched else None
        for _ in range(2):
            with mode() as counts:
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        seen.append(counts.seen)
        assert session is None or session.recording.breaker.num_errors == 0
    assert seen[0] == seen[1]
