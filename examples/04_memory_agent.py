"""Tutorial 4: an agent with a memory whose compressing layer makes gradients explode, fixed with `gradient_scale`.

The agent compresses its observations into a few numbers that it keeps. The compression was initialised too large, so
the gradient that flows back through it drowns out everything else its encoder should learn from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sonde.flow import ComparativeAnalyzer, analyze, gradient_scale

SEEN, WIDTH, KEPT, ACTIONS = 24, 256, 16, 4


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(SEEN, WIDTH)
        self.compress = nn.Linear(WIDTH, KEPT)
        nn.init.normal_(self.compress.weight, std=2.0)
        self.memory = nn.GRUCell(KEPT, KEPT)
        self.policy = nn.Linear(KEPT, ACTIONS)

    def squeeze(self, seen: Tensor) -> Tensor:
        return self.compress(seen)

    def forward(self, observations: Tensor) -> Tensor:
        kept = observations.new_zeros(len(observations), KEPT)
        for observation in observations.unbind(1):
            kept = self.memory(self.squeeze(nn.functional.gelu(self.encoder(observation))), kept)
        return self.policy(kept)


class FixedAgent(Agent):
    """The agent with a norm before the compression, two smaller layers instead of one, and a scaled-down gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.compress = nn.Linear(WIDTH, 64)
        self.project = nn.Linear(64, KEPT)

    def squeeze(self, seen: Tensor) -> Tensor:
        seen = gradient_scale(self.norm(seen), 0.5)  # unchanged forward, half the gradient backward
        return self.project(nn.functional.gelu(self.compress(seen)))


def make_batch(seed: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Observations, and the right actions, which depend on the first observation."""
    observations = torch.randn(size, 6, SEEN, generator=torch.Generator().manual_seed(seed))
    return observations, observations[:, 0, :ACTIONS].argmax(-1)


def reward(agent: nn.Module, steps: int = 150) -> float:
    """The fraction of right actions after a short training."""
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    for step in range(steps):
        x, y = make_batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(agent(x), y).backward()
        optimizer.step()
    x, y = make_batch(seed=10_000, size=1000)
    with torch.no_grad():
        return (agent(x).argmax(-1) == y).float().mean().item()


def main() -> None:
    x, y = make_batch(0)
    broken, fixed = Agent(), FixedAgent()
    for title, agent in (("Before", broken), ("After: norm, two layers, gradient_scale", fixed)):
        print(f"\n=== {title}")
        analyze(agent, x, y, nn.CrossEntropyLoss()).print_summary()

    comparison = ComparativeAnalyzer().compare_models(broken, fixed, x, y, nn.CrossEntropyLoss())
    print("\n=== Layer by layer")
    comparison.print_summary()

    tracker = ComparativeAnalyzer()
    print("\n=== Before and after")
    print(f"gradient at the encoder   {comparison.before.layer('encoder').metrics.relative_pressure:8.2g}", end=" ")
    print(f"{comparison.after.layer('encoder').metrics.relative_pressure:8.2g}   of the pressure near the output")
    tracker.track_training(fixed, x, y, nn.CrossEntropyLoss(), step=0)
    print(f"right actions             {reward(broken):8.0%} {reward(fixed):8.0%}")
    tracker.track_training(fixed, x, y, nn.CrossEntropyLoss(), step=150)
    print(f"health of the fixed agent's encoder while it learns: {tracker.get_health_evolution('encoder')}")


if __name__ == "__main__":
    main()
