"""Tutorial 3: how far back in time a recurrent network learns, and how a gate changes that.

The task is to name the first symbol of a sequence after seeing all the others. A plain RNN's gradient vanishes long
before it gets there; the analysis shows this before a single training step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sonde.flow import TemporalAnalyzer

SYMBOLS, LENGTH, WIDTH = 4, 30, 32


class Recaller(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, keeps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = kind(SYMBOLS, WIDTH, batch_first=True), nn.Linear(WIDTH, SYMBOLS)
        if keeps:
            with torch.no_grad():  # what the analysis recommends: a forget gate that starts open
                self.rnn.bias_ih_l0[WIDTH : 2 * WIDTH] = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def make_batch(seed: int, size: int = 64) -> tuple[Tensor, Tensor]:
    symbols = torch.randint(SYMBOLS, (size, LENGTH), generator=torch.Generator().manual_seed(seed))
    return nn.functional.one_hot(symbols, SYMBOLS).float(), symbols[:, 0]


def accuracy(model: nn.Module, steps: int = 150) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = make_batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    x, y = make_batch(seed=10_000, size=1000)
    with torch.no_grad():
        return (model(x).argmax(-1) == y).float().mean().item()


def bars(profile: list[float]) -> str:
    """The gradient at each time step, first to last, one decade per bar height."""
    largest = max(profile)
    heights = [max(0, min(8, round(8 + torch.tensor(p / largest).clamp_min(1e-9).log10().item()))) for p in profile]
    return "".join(" ▁▂▃▄▅▆▇█"[height] for height in heights)


def main() -> None:
    models = {
        "RNN": Recaller(nn.RNN),
        "GRU": Recaller(nn.GRU),
        "LSTM": Recaller(nn.LSTM),
        "LSTM, fixed": Recaller(nn.LSTM, keeps=True),
    }
    x, y = make_batch(0)
    rows = []
    for name, model in models.items():
        analyzer = TemporalAnalyzer(sequence_length=LENGTH)
        report = analyzer.analyze(model, x, y, nn.CrossEntropyLoss())
        print(f"\n=== {name}")
        report.print_issues()
        metrics = analyzer.get_temporal_metrics()["rnn"]
        print(f"first step {bars(analyzer.get_timestep_profile('rnn'))} last step")
        for gate, numbers in metrics.gates.items():
            print(f"  {gate:<8} gate: gradient/weight {numbers['ratio']:.1e}")
        rows.append((name, metrics.decay_rate, metrics.effective_memory, accuracy(model)))

    print("\n=== Before and after")
    print("                 decay per step   memory (steps)   accuracy on the first symbol")
    for name, decay, memory, right in rows:
        print(f"{name:<16} {decay:14.2f} {memory:16} {right:30.0%}")


if __name__ == "__main__":
    main()
