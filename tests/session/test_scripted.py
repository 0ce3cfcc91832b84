"""Models that torch.jit, torch.fx, torch.export and others have made: watched like any other, and trained the same."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.errors import UsageError
from sonde.session import run_script

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit",
    "ignore:.*TorchScript",
    "ignore:.*deprecated",
    "ignore:Lazy modules",
    "ignore::torch.jit.TracerWarning",
)
BATCH = 16


class Mixed(nn.Module):
    """A plain model with a scripted one inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


def example() -> torch.Tensor:
    return torch.ones(BATCH, 4)


def scripted() -> nn.Module:
    return torch.jit.script(plain())


def traced() -> nn.Module:
    return torch.jit.trace(plain(), example())


def frozen() -> nn.Module:
    return torch.jit.freeze(torch.jit.script(plain().eval()))


def loaded() -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(scripted(), file)
    file.seek(0)
    return torch.jit.load(file)


def subclassed() -> nn.Module:
    class Own(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 2))
            self.layer = nn.Linear(2, 2)

        @torch.jit.script_method
        def forward(self, x):
            return self.layer(x @ self.weight)

    return Own()


def several() -> nn.Module:
    return nn.Sequential(traced(), nn.ReLU(), torch.jit.script(nn.Linear(2, 2)))


def exported() -> nn.Module:
    return torch.export.export(plain(), (example(),)).module()


def packaged() -> nn.Module:
    from torch.package import PackageExporter, PackageImporter

    file = io.BytesIO()
    with PackageExporter(file) as exporter:
        exporter.extern(["torch", "torch.**"])
        exporter.save_pickle("model", "model.pkl", plain())
    file.seek(0)
    return PackageImporter(file).load_pickle("model", "model.pkl")


def quantized() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    return nn.Sequential(torch.ao.quantization.quantize_dynamic(inner, {nn.Linear}), nn.Linear(8, 2))


def quantization_aware() -> nn.Module:
    model: Any = plain().train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    return torch.ao.quantization.prepare_qat(model)


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "scripted": scripted,
    "traced": traced,
    "loaded": loaded,
    "subclassed": subclassed,
    "scripted inside": lambda: Mixed(scripted()),
    "traced inside": lambda: Mixed(traced()),
    "frozen inside": lambda: Mixed(frozen()),
    "several": several,
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "fx": lambda: torch.fx.symbolic_trace(plain()),
    "exported": exported,
    "packaged": packaged,
    "quantized": quantized,
    "quantization-aware": quantization_aware,
}
SLOW = ("exported", "packaged", "quantized", "quantization-aware", "frozen inside")
MADE = {**SCRIPTED, **OTHERS}
MODELS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MADE]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num: int = 4) -> Iterator[tuple[float, list[float]]]:
    """Train: loss and the norms of all gradients, in float64, of each step."""
    torch.manual_seed(1)
    for _ in range(num):
        optimizer.zero_grad()
        loss = model(torch.randn(BATCH, 4)).square().mean()
        loss.backward()
        norms = [p.grad.double().norm().item() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        yield loss.item(), norms


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("is_found", [False, True], ids=["named", "found"])
def test_everything_is_recorded_and_training_is_bit_identical(
    kind: str, is_found: bool, begin: Any, reopen: Any, capfd: Any
) -> None:
    torch.manual_seed(2)
    ours, theirs = MADE[kind](), MADE[kind]()
    theirs.load_state_dict(ours.state_dict())
    alone = torch.optim.Adam(theirs.parameters(), lr=0.01)
    expected = list(steps(theirs, alone))
    session = begin(live_rules=False)
    if is_found:
        session.watch(ours, activation_grads=True)
    optimizer = torch.optim.Adam(ours.parameters(), lr=0.01)
    if not is_found:
        session.watch(ours, optimizer, snapshots=2)
    assert list(steps(ours, optimizer)) == expected
    pairs = zip((*ours.parameters(), *ours.buffers()), (*theirs.parameters(), *theirs.buffers()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert session.recording.breaker.num_errors == 0
    run = reopen()
    names = [name for name, p in ours.named_parameters() if p.grad is not None]
    assert run.last_step == 3
    for what in ("grad", "param", "update"):
        assert run.stats(f"{what}/*/norm").num_rows == 4 * len(names), what
    found = {(row["step"], row["site"]): row["value"] for row in run.stats("grad/*/norm").to_pylist()}
    for step, (_, norms) in enumerate(expected):
        np.testing.assert_allclose([found[step, name] for name in names], norms, rtol=1e-6)
    acts = set(run.stats("act/*/norm").column("site").to_pylist())
    assert "model" in acts
    assert run.tensors.snapshots().column("step").to_pylist() == ([] if is_found else [0, 2])
    if kind in SCRIPTED and kind != "frozen inside":
        (warning,) = run.warnings
        assert "torch.jit runs" in warning
        assert "Parameters, gradients, updates and the output of each scripted module are" in warning
    else:
        assert run.warnings == []
    assert capfd.readouterr().err.count("warning") == len(run.warnings)


def test_a_scripted_layer_is_known_by_the_class_it_was_made_from(begin: Any, reopen: Any) -> None:
    model = Mixed(scripted())
    begin().watch(model, sites=nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    list(steps(model, optimizer, 2))
    run = reopen()
    sites = set(run.stats("grad/*/norm").column("site").to_pylist())
    assert sites == {"inner.0.weight", "inner.0.bias", "inner.3.weight", "inner.3.bias", "head.weight", "head.bias"}
    kinds = {module["name"]: (module["type"], module["kind"]) for module in run.structure()["modules"]}
    assert kinds["inner.0"] == ("Linear", "linear")
    assert kinds["inner.2"] == ("BatchNorm1d", "norm")


def test_a_scripted_model_that_is_not_watched_is_left_alone(begin: Any, reopen: Any) -> None:
    """A teacher, say, or a model that prepares the data."""
    model, teacher = plain(), scripted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin().watch(model, optimizer)
    for _ in range(3):
        (model(example()) - teacher(example())).square().mean().backward()
        optimizer.step()
    assert session.recording.breaker.num_errors == 0
    run = reopen()
    assert run.warnings == []
    assert run.last_step == 2


def test_no_warning_where_activations_are_not_asked_for(begin: Any, reopen: Any) -> None:
    begin().watch(scripted(), activations=False)
    assert reopen().warnings == []


def test_a_model_can_be_scripted_and_traced_while_it_is_watched(begin: Any, reopen: Any) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin().watch(model, optimizer)
    for _ in range(2):
        list(steps(model, optimizer, 1))
        torch.jit.trace(model, example())
        torch.jit.script(model)(example())
    assert session.recording.breaker.num_errors == 0
    assert reopen().stats("grad/0.weight/norm").num_rows == 2


def test_lazy_parameters_are_recorded_once_they_are_there(begin: Any, reopen: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    session = begin().watch(model)
    model(example())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = list(steps(model, optimizer))
    assert session.recording.breaker.num_errors == 0
    run = reopen()
    found = run.stats("grad/0.weight/norm").column("value").to_pylist()
    np.testing.assert_allclose(found, [norms[0] for _, norms in expected], rtol=1e-6)
    assert run.warnings == []


def test_in_graph_taps_leave_a_scripted_model_alone(begin: Any, reopen: Any) -> None:
    model = Mixed(scripted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin().watch(model, optimizer, activations="in-graph")
    list(steps(model, optimizer))
    assert session.recording.breaker.num_errors == 0
    assert reopen().stats("grad/*/norm").num_rows == 4 * 8


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_any_kind_is_analysed_or_refused_and_left_as_it_was(kind: str) -> None:
    from sonde.flow import FlowAnalyzer

    model = MADE[kind]()
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    hides_gradients = kind in SCRIPTED and kind != "frozen inside"  # a frozen one has no gradients to hide
    with pytest.raises(UsageError, match="TorchScript, which hides") if hides_gradients else nullcontext():
        report = FlowAnalyzer(model).analyze(torch.randn(BATCH, 4), loss_fn=lambda out, *_: out.square().mean())
        assert report.layers
    pairs = zip(before, (*model.parameters(), *model.buffers()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def test_a_script_that_trains_a_scripted_model_is_recorded(own_folder: Path, capfd: Any) -> None:
    Path("train.py").write_text(SCRIPT)
    before = sys.argv
    assert run_script("train.py", [], verbose=False) == 0
    assert sys.argv is before
    run = sonde.open("runs/latest")
    assert run.last_step == 4
    assert run.stats("grad/*/norm").num_rows == 5 * 4
    assert len(run.warnings) == 1
