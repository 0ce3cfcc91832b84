"""The analyzers of recurrent networks, of transformers, and of two models side by side."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow import AttentionAnalyzer, ComparativeAnalyzer, TemporalAnalyzer, analyze


class Looped(nn.Module):
    """A cell, called once per time step."""

    def __init__(self, cell: nn.GRUCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> tuple[Tensor]:
        hidden, found = x.new_zeros(x.shape[1], self.cell.hidden_size), []
        for part in x:
            hidden = self.cell(part, hidden)
            found.append(hidden)
        return (torch.stack(found),)


class TestTemporal:
    def test_the_profile_is_the_gradient_of_each_time_step(self) -> None:
        """A linear recurrence h = a h + x passes a**k of the gradient k steps back."""
        rnn = nn.RNN(3, 3, nonlinearity="relu", bias=False)
        with torch.no_grad():
            rnn.weight_hh_l0.copy_(0.5 * torch.eye(3))
            rnn.weight_ih_l0.copy_(torch.eye(3))

        class Last(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = rnn

            def forward(self, x: Tensor) -> Tensor:
                return self.rnn(x)[0][-1]

        analyzer = TemporalAnalyzer(sequence_length=10)
        analyzer.analyze(Last(), torch.rand(10, 4, 3) + 0.1, None, lambda out: out.sum())
        profile = analyzer.get_timestep_profile("rnn")
        assert profile == pytest.approx([0.5 ** (9 - t) * math.sqrt(12) for t in range(10)], rel=1e-4)
        metrics = analyzer.get_temporal_metrics()["rnn"]
        assert metrics.decay_rate == pytest.approx(math.log(0.5), rel=1e-4)
        assert metrics.effective_memory == 7  # 0.5**6 is the last above 1 %
        assert analyzer.get_effective_memory() == {"rnn": 7}
        assert analyzer.get_effective_memory("rnn") == 7
        assert set(metrics.gates) == {"hidden"}

    @pytest.mark.parametrize(
        ("kind", "gates"),
        [(nn.LSTM, ["input", "forget", "cell", "output"]), (nn.GRU, ["reset", "update", "new"])],
    )
    @pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
    def test_gates_are_told_apart(self, kind: Any, gates: list[str], options: Any) -> None:
        model = kind(3, 5, **options)
        analyzer = TemporalAnalyzer()
        analyzer.analyze(model, torch.randn(9, 4, 3), None, lambda out: out[0][-1].sum())
        (metrics,) = analyzer.get_temporal_metrics().values()
        assert list(metrics.gates) == gates
        weights = [p for name, p in model.named_parameters() if name.startswith("weight")]
        whole = math.sqrt(sum(gate["weight"] ** 2 for gate in metrics.gates.values()))
        assert whole == pytest.approx(torch.cat([w.flatten() for w in weights]).norm().item(), rel=1e-5)
        assert all(gate["gradient"] > 0 for gate in metrics.gates.values())

    def test_a_loop_of_ones_own_is_seen(self, zoo: Any) -> None:
        case = zoo("own_cell")
        analyzer = TemporalAnalyzer()
        report = analyzer.analyze(case.model, case.x, case.y, case.loss_fn)
        assert list(analyzer.get_temporal_metrics()) == ["cell"]
        assert "temporal" in report.details

    @pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4), lambda: Looped(nn.GRUCell(3, 4))], ids=["layer", "cell"])
    def test_in_double_precision(self, make: Any) -> None:
        torch.manual_seed(0)
        model, x = make(), torch.randn(12, 2, 3)
        profiles = []
        for dtype in (torch.float32, torch.float64):
            analyzer = TemporalAnalyzer()
            analyzer.analyze(model.to(dtype), x.to(dtype), x, lambda out, _: out[0][-1].square().sum())
            (layer,) = analyzer.get_temporal_metrics()
            profiles.append(analyzer.get_timestep_profile(layer))
        assert profiles[1] == pytest.approx(profiles[0], rel=1e-3)

    @pytest.mark.parametrize("cell", [nn.RNNCell(3, 3), nn.GRUCell(3, 3), nn.LSTMCell(3, 3)])
    def test_unrolled(self, cell: Any) -> None:
        before = [p.grad for p in cell.parameters()]
        analyzer = TemporalAnalyzer()
        metrics = analyzer.analyze_unrolled(cell, torch.randn(12, 4, 3), torch.randn(4, 3), nn.MSELoss())
        assert len(metrics.profile) == 12
        assert metrics.profile[-1] > metrics.profile[0] > 0
        assert metrics.decay_rate < 0
        assert [p.grad for p in cell.parameters()] == before
        assert analyzer.get_timestep_profile("cell") == list(metrics.profile)

    def test_a_cell_that_gives_output_and_hidden(self) -> None:
        weight = torch.eye(3) * 0.9

        def cell(x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden = x if hidden is None else hidden @ weight + x
            return 2 * hidden, hidden

        metrics = TemporalAnalyzer().analyze_unrolled(
            cell, torch.randn(10, 4, 3), torch.zeros(4, 3), lambda o, _: o.sum()
        )
        assert metrics.decay_rate == pytest.approx(math.log(0.9), rel=1e-3)

    def test_it_must_have_run(self) -> None:
        with pytest.raises(UsageError, match="nothing to report yet"):
            TemporalAnalyzer().get_timestep_profile()

    def test_packed_sequences_do_not_hurt(self) -> None:
        class Packed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = nn.GRU(3, 4)

            def forward(self, x: Tensor) -> Tensor:
                packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
                return self.rnn(packed)[1]

        report = analyze(Packed(), torch.randn(5, 2, 3), None, lambda out: out.sum())
        assert report.issues == []


class TestAttention:
    @pytest.mark.parametrize(
        ("name", "num", "heads"),
        [
            ("tied_gpt", 3, 4),
            ("encoder", 2, 4),
            ("vit", 2, 2),
            ("bert", 2, 2),
            ("llama", 2, 2),
            ("gpt2", 2, 2),
            ("t5", 6, 2),
        ],
    )
    def test_attention_is_found_without_naming_it(self, name: str, num: int, heads: int, zoo: Any) -> None:
        case = zoo(name)
        analyzer = AttentionAnalyzer()
        report = analyzer.analyze(case.model, case.x, case.y, case.loss_fn)
        metrics = analyzer.get_transformer_metrics()
        assert len(metrics.attention) == num
        for attention in metrics.attention:
            assert min(attention.query, attention.key, attention.value) > 0
            assert 0 < attention.head_balance <= 1
            assert len(attention.entropy_by_head) == heads
            assert 0 < attention.entropy <= 1.001
            assert attention.logit_max > 0
        assert len(metrics.residual) >= 2
        assert metrics.feed_forward
        assert report.details["transformer"]["residual_ratio"] == metrics.residual_ratio
        assert set(analyzer.get_attention_profile()) == {"query", "key", "value", "entropy"}
        assert analyzer.get_layer_metrics(0) == analyzer.get_layer_metrics(metrics.attention[0].layer)
        with pytest.raises(UsageError, match="no attention layer 'nowhere'"):
            analyzer.get_layer_metrics("nowhere")

    def test_ratios_are_those_of_the_rows(self) -> None:
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True)
        x = torch.randn(2, 5, 8)

        def loss(out: Any) -> Tensor:
            return out[0].square().sum()

        analyzer = AttentionAnalyzer()
        analyzer.analyze(model, (x, x, x), None, loss)
        loss(model(x, x, x)).backward()
        grad, weight = model.in_proj_weight.grad, model.in_proj_weight
        assert grad is not None
        metrics = analyzer.get_layer_metrics(0)
        for i, key in enumerate(("query", "key", "value")):
            rows = slice(8 * i, 8 * i + 8)
            assert getattr(metrics, key) == pytest.approx((grad[rows].norm() / weight[rows].norm()).item(), rel=1e-4)

    def test_it_must_have_run(self) -> None:
        with pytest.raises(UsageError, match="nothing to report yet"):
            AttentionAnalyzer().get_transformer_metrics()


class TestComparative:
    def batch(self) -> tuple[Tensor, Tensor, Any]:
        torch.manual_seed(1)
        return torch.randn(32, 32), torch.randint(4, (32,)), nn.CrossEntropyLoss()

    def test_two_models(self, deep: Any) -> None:
        sick, well = deep(activation=nn.Sigmoid, gain=1.0), deep()
        comparison = ComparativeAnalyzer().compare_models(sick, well, *self.batch())
        assert comparison.health_change > 50
        assert comparison.improved[0].layer == "0"
        assert comparison.degraded == []
        assert "better" in str(comparison)
        back = ComparativeAnalyzer().compare_models(well, sick, *self.batch())
        assert back.degraded[0].layer == "0"
        assert back.degraded[0].health_change == -comparison.improved[0].health_change

    def test_layers_of_one_alone(self, deep: Any) -> None:
        comparison = ComparativeAnalyzer().compare_models(deep(depth=2), deep(depth=3), *self.batch())
        assert (comparison.only_before, comparison.only_after) == ((), ("5", "6"))
        told = str(comparison).splitlines()
        assert told[1].startswith("  no layer improved or got worse; pressure changed most in ")
        assert told[2:] == ["  only after: 5, 6"]

    @pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"model_state_dict": state, "epoch": 3}])
    @pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
    def test_two_checkpoints(self, deep: Any, tmp_path: Path, wrap: Any, suffix: str) -> None:
        sick, well = deep(depth=12, gain=0.2, activation=nn.Tanh), deep(depth=12, gain=1.0, activation=nn.Tanh)
        if suffix == ".pt":
            torch.save(wrap(sick.state_dict()), tmp_path / "a.pt")
            torch.save(wrap(well.state_dict()), tmp_path / "b.pt")
        else:
            from safetensors.torch import save_file

            save_file(sick.state_dict(), tmp_path / "a.safetensors")
            save_file(well.state_dict(), tmp_path / "b.safetensors")
        model = deep(depth=12, activation=nn.Tanh)
        before = copy.deepcopy(model.state_dict())
        comparison = ComparativeAnalyzer().compare_checkpoints(
            model, tmp_path / f"a{suffix}", tmp_path / f"b{suffix}", *self.batch()
        )
        assert comparison.health_change > 30
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

    def test_a_checkpoint_that_does_not_fit(self, deep: Any, tmp_path: Path) -> None:
        torch.save(deep(depth=2).state_dict(), tmp_path / "a.pt")
        with pytest.raises(UsageError, match="does not fit"):
            ComparativeAnalyzer().compare_checkpoints(
                deep(depth=3), tmp_path / "a.pt", tmp_path / "a.pt", *self.batch()
            )
        with pytest.raises(UsageError, match="no checkpoint"):
            ComparativeAnalyzer().compare_checkpoints(deep(), tmp_path / "x.pt", tmp_path / "a.pt", *self.batch())

    def test_training_is_tracked(self, deep: Any) -> None:
        model, (x, y, loss_fn) = deep(depth=2), self.batch()
        analyzer = ComparativeAnalyzer()
        for step, factor in ((500, 1e-3), (100, 1.0)):
            with torch.no_grad():
                model[4].weight *= factor
            analyzer.track_training(model, x, y, loss_fn, step=step)
        assert list(analyzer.get_health_evolution("0")) == [100, 500]
        assert list(analyzer.get_health_evolution()) == [100, 500]
        assert all(pressure > 0 for pressure in analyzer.get_pressure_evolution("0").values())

    def test_reports_are_kept_by_name(self, deep: Any) -> None:
        analyzer = ComparativeAnalyzer()
        analyzer.analyze_model(deep(depth=2), *self.batch(), name="small")
        assert analyzer.compare("small", "small").health_change == 0
        with pytest.raises(UsageError, match=r"no report named 'large'. Available: small"):
            analyzer.compare("small", "large")


def test_the_fitting_analyzers_are_chosen(zoo: Any) -> None:
    wanted = {"mlp": set(), "lstm": {"temporal"}, "own_cell": {"temporal"}, "llama": {"transformer"}}
    for name, details in wanted.items():
        case = zoo(name)
        found = analyze(case.model, case.x, case.y, case.loss_fn).details
        assert set(found) - {"depth_profile", "decay"} == details
