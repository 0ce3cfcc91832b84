"""The refined coordinate check: the parts of a layer's change add up, and trends over widths tell parametrisations."""

from __future__ import annotations

import copy
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sonde.errors import NotAModelError, UsageError
from sonde.flow import ModuleMonitor, RefinedCoordinateCheck, coordinate_check, refined_coordinate_check
from sonde.flow.coordinate.check import split


class Mixed(nn.Module):
    """An embedding, a convolution, attention with its projections, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(10, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.BatchNorm1d(8)
        self.q_proj, self.head, self.drop = nn.Linear(8, 8), nn.Linear(8, 3), nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.conv(self.embed(tokens).mT)).mT
        x = x + self.attention(x, x, x)[0]
        return self.head(self.drop(torch.relu(self.q_proj(x))).mean(1))


def trained() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Mixed().double()
    reference = copy.deepcopy(model)
    tokens, labels = torch.randint(10, (6, 5)), torch.randint(3, (6,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
    return model, reference, tokens


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def test_every_kind_of_layer_is_split_and_both_models_stay_as_they_were(state: Any, changed: Any) -> None:
    model, reference, tokens = trained()
    before = state(model, reference)
    found = {c.name: c for c in refined_coordinate_check(model, reference, tokens)}
    assert changed(before, state(model, reference)) == []
    assert set(found) == {"embed", "conv", "attention.in_proj", "q_proj", "head"}
    for name, c in found.items():
        assert c.effective > 0
        assert (c.propagating > 0) == (name != "embed")  # tokens do not change
        assert (c.bias > 0) == (name != "embed")
        parts = (c.effective, c.propagating, c.bias)
        assert 2 * max(parts) - sum(parts) <= c.total * (1 + 1e-9) <= sum(parts) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Linear(4, 6), torch.randn(5, 4)),
        (lambda: nn.Conv2d(2, 4, 3), torch.randn(2, 2, 6, 6)),
        (lambda: nn.ConvTranspose1d(2, 4, 3), torch.randn(2, 2, 6)),
        (lambda: nn.Embedding(7, 4), torch.randint(7, (3, 5))),
        (lambda: nn.Linear(4, 6).bfloat16(), torch.randn(5, 4).bfloat16()),
    ],
)
def test_the_parts_are_the_formula_and_add_up(make: Any, x: Tensor) -> None:
    torch.manual_seed(0)
    now, then = make(), make()
    x_then = x + 0.1 * torch.randn_like(x) if x.is_floating_point() else x
    with torch.no_grad():
        parts = split(then, now, ((x,), now(x)), ((x_then,), then(x_then)))
        difference, shift = copy.deepcopy(now), 0.0
        for (name, p), a, b in zip(difference.named_parameters(), now.parameters(), then.parameters(), strict=True):
            p.copy_(a - b if name == "weight" else torch.zeros(()))
            shift = a - b if name == "bias" else shift
        tolerance = {"rtol": 2e-2, "atol": 5e-2} if x.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(parts["effective"], difference(x), **tolerance)
        assert torch.equal(parts["bias"].flatten(), torch.as_tensor(shift, dtype=parts["bias"].dtype).flatten())
        together = parts["effective"] + parts["propagating"] + parts["bias"]
        torch.testing.assert_close(together, parts["total"], **tolerance)
        torch.testing.assert_close(parts["propagating"], then(x) - then(x_then), **tolerance)


@pytest.mark.parametrize("layer", [nn.Linear(4, 6), nn.Conv2d(2, 4, 3), nn.MultiheadAttention(4, 2)])
def test_a_layer_whose_bias_alone_changed_has_no_effective_change(layer: nn.Module) -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else self.layer(x)

    model, reference = Only(), Only()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("in_proj_bias" if isinstance(layer, nn.MultiheadAttention) else ".bias"):
                parameter += 1.0
    x = torch.randn(2, 2, 6, 6) if isinstance(layer, nn.Conv2d) else torch.randn(3, 5, 4)
    (changed, *_) = refined_coordinate_check(model, reference, x)
    assert changed.bias == pytest.approx(1.0)
    assert changed.effective < 1e-6
    assert changed.total == pytest.approx(1.0)


def test_an_encoder_is_looked_into_though_torch_would_fuse_it() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    reference = copy.deepcopy(layer)
    with torch.no_grad():
        layer.linear1.weight += 0.1
    found = {c.name: c for c in refined_coordinate_check(layer, reference, torch.randn(2, 3, 8))}
    assert {"linear1", "linear2", "self_attn.in_proj"} <= set(found)
    assert found["linear1"].effective > 0 == found["linear1"].propagating
    assert found["linear2"].effective == 0 < found["linear2"].propagating
    assert torch.backends.mha.get_fastpath_enabled()


def test_hugging_face_projections_are_found() -> None:
    import transformers as tr

    config = tr.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    model = tr.GPT2LMHeadModel(config)
    names = {
        c.name for c in refined_coordinate_check(model, copy.deepcopy(model), {"input_ids": torch.ones(1, 4).long()})
    }
    assert {"transformer.wte", "transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc", "lm_head"} <= names


def test_inside_a_training_loop_with_a_monitor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    reference = copy.deepcopy(model)
    monitor = ModuleMonitor()
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    for step in range(2):
        monitor.begin_step(step)
        with torch.no_grad():
            reference(x)
        F.cross_entropy(model(x), y).backward()
        check.refined_coordinate_check()
        optimizer.step()
        optimizer.zero_grad()
        monitor.end_step()
    found = monitor.get_step_metrics()
    hidden = torch.relu(model[0].forward(x))
    assert found["RCC (W_t-W_0)x_t/0/l2norm"] > 0
    assert found["RCC W_0(x_t-x_0)/0/l2norm"] == 0.0
    assert found["RCC W_0(x_t-x_0)/2/l2norm"] > 0
    assert found["RCC b_t-b_0/0/l2norm"] > 0
    assert found["RCC x_t/2/l2norm"] == pytest.approx(hidden.norm(dim=-1).mean().item(), rel=0.2)
    assert monitor.get_step_metrics(0)["RCC (W_t-W_0)x_t/2/l2norm"] == 0.0


def test_inside_a_training_loop_a_bias_alone_has_no_effective_change() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    monitor = ModuleMonitor()
    monitor.set_module(model)
    reference = copy.deepcopy(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    with torch.no_grad():
        model[0].bias += 1.0
    x = torch.randn(16, 4)
    monitor.begin_step(0)
    reference(x), model(x)
    check.refined_coordinate_check()
    monitor.end_step()
    found = monitor.get_step_metrics()
    assert found["RCC (W_t-W_0)x_t/0/l2norm"] < 1e-5
    assert found["RCC b_t-b_0/0/l2norm"] == pytest.approx(8**0.5)


def test_a_check_without_a_reference_is_refused() -> None:
    monitor = ModuleMonitor()
    monitor.set_module(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="needs a reference"):
        RefinedCoordinateCheck(monitor)


class Net(nn.Module):
    def __init__(self, width: int, output_scale: float) -> None:
        super().__init__()
        self.enter, self.hidden, self.head = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 4)
        for layer in (self.enter, self.hidden):
            nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features))
        nn.init.normal_(self.head.weight, std=output_scale)
        for layer in (self.enter, self.hidden, self.head):
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(torch.relu(self.enter(x)))))


def standard(width: int) -> nn.Module:
    return Net(width, 1 / math.sqrt(width))


def mup(width: int) -> nn.Module:
    return Net(width, 4 / width)


def one_rate(model: nn.Module, width: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def rates_by_width(model: Any, width: int) -> torch.optim.Optimizer:
    wide = [model.hidden.weight, model.head.weight]
    others = [p for p in model.parameters() if all(p is not w for w in wide)]
    return torch.optim.Adam([{"params": wide, "lr": 2e-3 * 32 / width}, {"params": others, "lr": 2e-3}])


def sweep(make: Any, optimizer: Any) -> Any:
    torch.manual_seed(0)
    batch = torch.randn(32, 16), torch.randint(4, (32,))
    return coordinate_check(
        make, [32, 64, 128, 256], batches=batch, loss_fn=nn.CrossEntropyLoss(), make_optimizer=optimizer, seeds=2
    )


def test_standard_parametrisation_grows_and_mup_is_stable(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    torch.manual_seed(1)
    sp, mu = sweep(standard, one_rate), sweep(mup, rates_by_width)
    for layer in ("hidden", "head"):
        assert sp.get(layer).verdict == "grows"
        assert sp.get(layer).slope > 0.4
        assert sp.get(layer).error < 0.4
        assert mu.get(layer).verdict == "stable", str(mu)
    assert not sp.is_stable
    assert mu.is_stable, str(mu)
    assert re.search(r"hidden +effective +\+\d\.\d\d ± \d\.\d\d  grows", str(sp))
    torch.set_rng_state(before)
    path = sp.save_svg(tmp_path / "widths.svg")
    root = ET.fromstring(path.read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"enter", "hidden", "head"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == len(sp.trends)


def test_a_layer_that_gets_less_with_the_width_vanishes() -> None:
    report = sweep(standard, lambda model, width: torch.optim.SGD(model.parameters(), lr=0.1 / width**2))
    assert report.get("hidden").verdict == "vanishes"


def test_wrong_questions() -> None:
    with pytest.raises(UsageError, match="at least two widths"):
        coordinate_check(standard, [32], batches=(None, None), loss_fn=None)
    with pytest.raises(NotAModelError, match=r"make_model\(8\) must return a torch.nn.Module; got int"):
        coordinate_check(lambda width: width, [8, 16], batches=(None, None), loss_fn=None)  # type: ignore[arg-type, return-value]
    one = (torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(UsageError, match=r"batches\(0\) ended after 1 of 4 steps"):
        coordinate_check(lambda _: nn.Linear(8, 8), [8, 16], batches=lambda _: iter([one]), loss_fn=nn.MSELoss())
    report = sweep(standard, one_rate)
    with pytest.raises(KeyError, match=r"no layer 'nowhere'\. Known: enter, head, hidden"):
        report.get("nowhere")
