"""Every kind of issue is found in a model that has the fault, not in one close by, and at any scale of the loss."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sonde.flow import FlowAnalyzer, FlowReport, StandardAnalyzer, analyze
from sonde.flow.judge import ABSOLUTE, RELATIVE
from sonde.show.flow.issue import MEANINGS, IssueType


class Subject(NamedTuple):
    model: nn.Module
    x: Any
    y: Any
    loss_fn: Any


def classes(width: int = 32, size: int = 64) -> tuple[Tensor, Tensor, Any]:
    return torch.randn(size, width), torch.randint(4, (size,)), nn.CrossEntropyLoss()


def stack(activation: Any, gain: float, *, depth: int = 12, normed: bool = False) -> Subject:
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(32, 32)
        nn.init.normal_(linear.weight, std=gain / math.sqrt(32))
        nn.init.zeros_(linear.bias)
        layers += [linear, *([nn.LayerNorm(32)] if normed else []), activation()]
    return Subject(nn.Sequential(*layers, nn.Linear(32, 4)), *classes())


def unlike(factor: float) -> Subject:
    """Blocks alike, one of them with weights of another size."""
    subject = stack(nn.ReLU, math.sqrt(2), depth=6)
    with torch.no_grad():
        subject.model[4].weight *= factor  # type: ignore[index, operator, union-attr]
        subject.model[6].weight /= factor  # type: ignore[index, operator, union-attr]
    return subject


class Compressing(nn.Module):
    def __init__(self, gain: float, narrow: int) -> None:
        super().__init__()
        self.enter, self.down, self.head = nn.Linear(256, 256), nn.Linear(256, narrow), nn.Linear(narrow, 4)
        with torch.no_grad():
            self.down.weight *= gain

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.relu(self.enter(x)))))


class Detached(nn.Module):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(32, 32), nn.Linear(32, 4), cut

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden.detach() if self.cut else hidden)


class Functional(nn.Module):
    """A rectifier and a sigmoid as function calls."""

    def __init__(self, bias: float, gain: float) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        nn.init.constant_(self.first.bias, bias)
        with torch.no_grad():
            self.second.weight *= gain

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.second(x)) + F.relu(self.first(x)))


def dead_module(bias: float) -> Subject:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.constant_(model[0].bias, bias)  # type: ignore[arg-type]
    return Subject(model, *classes())


def saturated_module(gain: float, activation: type[nn.Module]) -> Subject:
    model = nn.Sequential(nn.Linear(32, 32), activation(), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].weight *= gain  # type: ignore[operator]
    return Subject(model, *classes())


class Logarithm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.linear, self.eps = nn.Linear(32, 4), eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(self.linear(x)) + self.eps)


class Recurrent(nn.Module):
    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(rnn.hidden_size, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def recurrent(gain: float, *, nonlinearity: str = "tanh", length: int = 30) -> Subject:
    """A plain RNN whose recurrent weight is a rotation times `gain`."""
    rnn = nn.RNN(8, 32, batch_first=True, nonlinearity=nonlinearity)
    nn.init.orthogonal_(rnn.weight_hh_l0, gain=gain)
    with torch.no_grad():
        rnn.weight_ih_l0 *= 0.1
        rnn.bias_hh_l0.zero_()
        rnn.bias_ih_l0.zero_()
    return Subject(Recurrent(rnn), torch.randn(16, length, 8), torch.randint(4, (16,)), nn.CrossEntropyLoss())


def gated(forget: float) -> Subject:
    rnn = nn.LSTM(8, 32, batch_first=True)
    with torch.no_grad():
        rnn.bias_ih_l0[32:64] = forget
    return Subject(Recurrent(rnn), torch.randn(16, 30, 8), torch.randint(4, (16,)), nn.CrossEntropyLoss())


class Block(nn.Module):
    def __init__(self, skip: float = 1.0, branch: float = 1.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))
        self.out_proj = nn.Linear(32, 32)
        self.fc1, self.fc2 = nn.Linear(32, 128), nn.Linear(128, 32)
        self.num_heads, self.skip, self.branch = 4, skip, branch

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.skip * x + self.branch * self.out_proj(mixed)
        return self.skip * x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, depth: int = 4, **block: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.blocks = nn.ModuleList(Block(**block) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def transformer(change: Callable[[Any], None] = lambda _: None, **options: Any) -> Subject:
    model = Transformer(**options)
    with torch.no_grad():
        change(model)
    tokens = torch.randint(20, (8, 16))
    return Subject(model, tokens, tokens.roll(-1, 1).flatten(), nn.CrossEntropyLoss())


def larger_keys(factor: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.blocks[1].k_proj.weight.mul_(factor)
        model.blocks[1].q_proj.weight.div_(factor)

    return change


def sharp_attention(factor: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.blocks[1].k_proj.weight.mul_(factor)
        model.blocks[1].q_proj.weight.mul_(factor)

    return change


def small_down(factor: float) -> Callable[[Any], None]:
    return lambda model: model.blocks[1].fc2.weight.mul_(factor)


class Calls(nn.Module):
    """Three rectifiers in one module, as function calls: one of them with a bias."""

    def __init__(self, bias: float, rectify: Callable[[Tensor], Tensor], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.head, self.rectify = nn.Linear(32, 4), rectify
        nn.init.constant_(self.layers[1].bias, bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.rectify(layer(x))
        return self.head(x)


class Alone(nn.Module):
    """A layer that takes no part in the loss: it is not called, or its output is not used."""

    def __init__(self, uses: bool, calls: bool = True) -> None:
        super().__init__()
        self.first, self.pooler, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.uses, self.calls = uses, calls

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        pooled = torch.tanh(self.pooler(x)) if self.calls else x
        return self.head(x + pooled if self.uses else x)


def constant(value: float | None) -> Subject:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    for layer in (model[0], model[2]) if value is not None else ():
        nn.init.constant_(layer.weight, value)  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return Subject(model, *classes())


def zeros(num: int) -> Subject:
    """Layers at zero at the end: one lets a gradient through after the first step, two never do."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32, bias=False), nn.Linear(32, 4, bias=False))
    for layer in list(model)[-num:]:
        nn.init.zeros_(layer.weight)
    return Subject(model, *classes())


# type -> (where, a model with the fault, one close by without)
PAIRS: dict[str, tuple[str, Callable[[], Subject], Callable[[], Subject]]] = {
    "VANISHING": ("0", lambda: stack(nn.Sigmoid, 1.0), lambda: stack(nn.Sigmoid, 1.0, depth=2)),
    "VANISHING, small init": ("0", lambda: stack(nn.Tanh, 0.3), lambda: stack(nn.Tanh, 1.0)),
    "EXPLODING": ("0", lambda: stack(nn.Identity, 4.0), lambda: stack(nn.Identity, 1.0)),
    "DECAY": ("", lambda: stack(nn.Tanh, 0.4), lambda: stack(nn.Tanh, 1.0)),
    "DECAY, sigmoid": ("", lambda: stack(nn.Sigmoid, 1.0), lambda: stack(nn.ReLU, 1.0, normed=True)),
    "BOTTLENECK": (
        "down",
        lambda: Subject(Compressing(20.0, 16), *classes(256)),
        lambda: Subject(Compressing(1.0, 16), *classes(256)),
    ),
    "BOTTLENECK, wide": (
        "down",
        lambda: Subject(Compressing(20.0, 16), *classes(256)),
        lambda: Subject(Compressing(20.0, 256), *classes(256)),
    ),
    "LAYER_VARIANCE": ("6", lambda: unlike(10.0), lambda: unlike(1.0)),
    "DEAD": ("1", lambda: dead_module(-20.0), lambda: dead_module(0.0)),
    "DEAD, cut off": (
        "first",
        lambda: Subject(Detached(True), *classes()),
        lambda: Subject(Detached(False), *classes()),
    ),
    "DEAD, function": (
        "model",
        lambda: Subject(Functional(-20.0, 1.0), *classes()),
        lambda: Subject(Functional(0.0, 1.0), *classes()),
    ),
    "SATURATED": ("1", lambda: saturated_module(50.0, nn.Sigmoid), lambda: saturated_module(1.0, nn.Sigmoid)),
    "SATURATED, tanh": ("1", lambda: saturated_module(50.0, nn.Tanh), lambda: saturated_module(3.0, nn.Tanh)),
    "SATURATED, clip": ("1", lambda: saturated_module(50.0, nn.Hardtanh), lambda: saturated_module(1.0, nn.Hardtanh)),
    "SATURATED, function": (
        "model",
        lambda: Subject(Functional(0.0, 50.0), *classes()),
        lambda: Subject(Functional(0.0, 1.0), *classes()),
    ),
    "NUMERICAL": (
        "model",
        lambda: Subject(Logarithm(0.0), torch.randn(64, 32), None, lambda out: out.mean()),
        lambda: Subject(Logarithm(1e-3), torch.randn(64, 32), None, lambda out: out.mean()),
    ),
    "VANISHING_TEMPORAL": ("rnn", lambda: recurrent(0.5), lambda: recurrent(1.0)),
    "EXPLODING_TEMPORAL": (
        "rnn",
        lambda: recurrent(2.0, nonlinearity="relu"),
        lambda: recurrent(math.sqrt(2) * 0.98, nonlinearity="relu"),
    ),
    "SHORT_MEMORY": ("rnn", lambda: recurrent(0.2), lambda: recurrent(0.9)),
    "SHORT_MEMORY, gates": ("rnn", lambda: gated(-5.0), lambda: gated(3.0)),
    "QKV_IMBALANCE": (
        "blocks.1",
        lambda: transformer(larger_keys(10.0)),
        transformer,
    ),
    "ATTN_BOTTLENECK": ("blocks.1", lambda: transformer(sharp_attention(30.0)), transformer),
    "ATTN_BOTTLENECK, scaled away": ("blocks.0", lambda: transformer(branch=1e-5), lambda: transformer(branch=0.5)),
    "FFN_BOTTLENECK": ("blocks.1", lambda: transformer(small_down(0.005)), transformer),
    "RESIDUAL_DECAY": ("", lambda: transformer(skip=0.5), transformer),
    "DEAD, one call of three": (
        "model",
        lambda: Subject(Calls(-20.0, F.relu), *classes()),
        lambda: Subject(Calls(0.0, F.relu), *classes()),
    ),
    "DEAD, clamp": (
        "model",
        lambda: Subject(Calls(-20.0, lambda x: x.clamp(min=0)), *classes()),
        lambda: Subject(Calls(0.0, lambda x: x.clamp(min=0)), *classes()),
    ),
    "DEAD, the whole network": ("", lambda: zeros(2), lambda: zeros(1)),
    "UNUSED": (
        "",
        lambda: Subject(Alone(False), *classes()),
        lambda: Subject(Alone(True), *classes()),
    ),
    "UNUSED, not called": (
        "",
        lambda: Subject(Alone(False, False), *classes()),
        lambda: Subject(Alone(True), *classes()),
    ),
    "SYMMETRIC": ("0", lambda: constant(0.1), lambda: constant(None)),
    "RANK_COLLAPSE": ("", lambda: stack(nn.Sigmoid, 1.0), lambda: stack(nn.ReLU, math.sqrt(2))),
}  # fmt: skip


def kind_of(name: str) -> str:
    return name.partition(",")[0]


def report_of(make: Callable[[], Subject], factor: float = 1.0, **options: Any) -> FlowReport:
    torch.manual_seed(0)
    subject = make()
    loss_fn = subject.loss_fn
    return analyze(subject.model, subject.x, subject.y, lambda *given: factor * loss_fn(*given), **options)


def verdicts(report: FlowReport) -> Any:
    return (
        report.status,
        [(layer.name, layer.health.status, round(layer.health.score)) for layer in report.layers],
        sorted((issue.type, issue.severity, issue.layer) for issue in report.issues),
    )


def test_every_kind_has_a_pair_and_a_meaning() -> None:
    assert {kind_of(name) for name in PAIRS} == set(get_args(IssueType)) == set(MEANINGS)


@pytest.mark.parametrize("name", PAIRS)
def test_the_fault_is_found_where_it_is(name: str) -> None:
    where, faulty, _ = PAIRS[name]
    found = [issue.layer for issue in report_of(faulty).issues if issue.type == kind_of(name)]
    assert where in found


@pytest.mark.parametrize("name", PAIRS)
def test_a_model_close_by_does_not_have_it(name: str) -> None:
    _, _, healthy = PAIRS[name]
    assert [issue for issue in report_of(healthy).issues if issue.type == kind_of(name)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("factor", [1000.0, 1e-3])
def test_the_scale_of_the_loss_changes_no_verdict(name: str, factor: float) -> None:
    for make in PAIRS[name][1:]:
        assert verdicts(report_of(make)) == verdicts(report_of(make, factor))


def test_the_scale_of_the_loss_changes_no_verdict_in_the_zoo(case: Any) -> None:
    if case.loss_fn is None:
        flat = lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())
        case = case._replace(loss_fn=flat, x={**case.x, "labels": case.y})
    found = []
    for factor in (1.0, 1000.0):
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            report = analyze(case.model, case.x, case.y, lambda *given, f=factor: f * case.loss_fn(*given))
        found.append(verdicts(report))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", PAIRS)
def test_the_advice_is_code_for_this_layer(name: str) -> None:
    where, faulty, _ = PAIRS[name]
    issues = [i for i in report_of(faulty).issues if i.type == kind_of(name) and i.layer == where]
    for issue in issues:
        assert issue.healthy
        assert issue.value is not None
        ast.parse(issue.recommendation.replace("…", "..."))
        assert any(line.partition("#")[0].strip() for line in issue.recommendation.splitlines())
        last = where.split(".")[-1]
        assert not where or f"[{last}]" in issue.recommendation or last in issue.recommendation


def test_frozen_layers_are_not_dead() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    report = FlowAnalyzer(model).analyze(*classes())
    assert [issue for issue in report.issues if issue.type == "DEAD"] == []


def test_healthy_models_have_no_issues() -> None:
    for make in (lambda: stack(nn.ReLU, math.sqrt(2)), lambda: stack(nn.Tanh, 1.0), transformer):
        report = report_of(make)
        assert report.issues == []
        assert report.status == "HEALTHY"


def test_nothing_is_wrong_in_the_zoo_but_memory(case: Any) -> None:
    """Recurrent networks as torch initialises them do forget, when the loss is of the last step."""
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        report = analyze(case.model, case.x, case.y, case.loss_fn)
    assert [issue for issue in report.issues if "TEMPORAL" not in issue.type] == []
    if "temporal" not in report.details:
        assert report.status == "HEALTHY"


class TestAbsoluteThresholds:
    """The documented table: pressure 0.1 to 10 good, to 100 warns, beyond or below 0.01 critical; turbulence 1, 5."""

    def report(self, factor: float) -> Any:
        model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
        x = torch.randn(8, 4)
        loss = lambda out: factor * out.sum()  # the gradient of every output is `factor`
        (layer,) = [
            la for la in FlowAnalyzer(model, thresholds=ABSOLUTE).analyze(x, None, loss).layers if la.name == "1"
        ]
        return layer

    @pytest.mark.parametrize(
        ("pressure", "status", "issues"),
        [
            (0.001, "CRITICAL", ["VANISHING"]),
            (0.02, "WARNING", []),
            (0.5, "HEALTHY", []),
            (9.0, "HEALTHY", []),
            (50.0, "WARNING", []),
            (150.0, "CRITICAL", ["EXPLODING"]),
        ],
    )
    def test_pressure(self, pressure: float, status: str, issues: list[str]) -> None:
        layer = self.report(pressure)
        assert (layer.health.status, [issue.type for issue in layer.health.issues]) == (status, issues)

    @pytest.mark.parametrize(("spread", "status"), [(1, "HEALTHY"), (8, "WARNING"), (64, "CRITICAL")])
    def test_turbulence(self, spread: int, status: str) -> None:
        model, x = nn.Sequential(nn.Linear(4, 64)), torch.randn(8, 4)
        weight = torch.zeros(64)
        weight[::spread] = float(spread)  # one output in `spread` gets all of the gradient
        report = FlowAnalyzer(model, thresholds=ABSOLUTE).analyze(x, None, lambda out: (out * weight).sum())
        assert report.layer("0").metrics.turbulence == pytest.approx(math.sqrt(spread - 1), rel=1e-3)
        assert report.layer("0").health.status == status

    def test_they_do_see_the_scale_of_the_loss(self) -> None:
        make = lambda: stack(nn.ReLU, math.sqrt(2))
        assert verdicts(report_of(make, thresholds=ABSOLUTE)) != verdicts(report_of(make, 1e6, thresholds=ABSOLUTE))

    def test_own_thresholds(self) -> None:
        strict = replace(RELATIVE, saturated=0.001)
        report = report_of(lambda: saturated_module(5.0, nn.Tanh), thresholds=strict)
        assert "SATURATED" in {issue.type for issue in report.issues}


def test_decay_is_measured_as_it_is() -> None:
    torch.manual_seed(0)
    subject = stack(nn.Identity, 0.5)
    analyzer = StandardAnalyzer()
    analyzer.analyze(*subject)
    profile = analyzer.get_depth_profile()
    assert [point.layer for point in profile] == [str(2 * i) for i in range(12)] + ["24"]
    assert analyzer.get_layer_type_stats()["Linear"]["count"] == 13


@pytest.mark.parametrize(
    ("layer", "x", "wanted"),
    [
        (nn.Linear(8, 8), torch.randn(4, 8), "x = x + model[0](nn.LayerNorm(8)(x))"),
        (nn.Linear(8, 6), torch.randn(4, 8), "x = nn.LayerNorm(6)(model[0](x))"),
        (nn.Conv2d(8, 8, 3, padding=1), torch.randn(2, 8, 5, 5), "x = x + model[0](nn.GroupNorm(1, 8)(x))"),
        (nn.Conv2d(8, 6, 3), torch.randn(2, 8, 5, 5), "x = nn.BatchNorm2d(6)(model[0](x))"),
    ],
)
def test_the_way_around_a_layer_fits_its_shape(layer: nn.Module, x: Tensor, wanted: str) -> None:
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2))
    model(x)
    report = FlowAnalyzer(model, thresholds=ABSOLUTE).analyze(x, None, lambda out: 1e-6 * out.sum())
    advice = report.layer("0").health.recommendations[0]
    assert advice.startswith(wanted)
    code = advice.splitlines()[0].partition("#")[0]
    exec(code, {"model": model, "x": x, "nn": nn})
    exec(advice.splitlines()[1], {"model": model, "nn": nn})
