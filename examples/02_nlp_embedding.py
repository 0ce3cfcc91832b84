"""Tutorial 2: a text classifier whose word vectors do not learn, and how embeddings differ from other layers.

An embedding's gradient is sparse: only the words in the batch get one. That is healthy. No gradient at all is not: here
one `detach()`, left over from an experiment with constant vectors, cuts it off.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sonde.flow import FlowReport, StandardAnalyzer

WORDS, LENGTH, WIDTH = 500, 12, 32


class TextClassifier(nn.Module):
    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.detached = detached
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.dense1, self.dense2, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, 2)
        self.relu = nn.ReLU()
        for layer in (self.dense1, self.dense2):
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = self.embedding(tokens)
        if self.detached:
            vectors = vectors.detach()
        x = vectors.mean(1) * LENGTH**0.5  # the mean of many words is small: bring it back to scale
        return self.head(self.relu(self.dense2(self.relu(self.dense1(x)))))


def make_batch(seed: int, size: int = 128) -> tuple[Tensor, Tensor]:
    """A text is positive if it has more words with an even number than with an odd one."""
    tokens = torch.randint(WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens, ((tokens % 2 == 0).sum(1) > LENGTH // 2).long()


def accuracy(model: nn.Module, steps: int = 150) -> float:
    """The accuracy on unseen texts after a short training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = make_batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    x, y = make_batch(seed=10_000, size=2000)
    with torch.no_grad():
        return (model(x).argmax(-1) == y).float().mean().item()


def show(title: str, model: nn.Module) -> FlowReport:
    print(f"\n=== {title}")
    analyzer = StandardAnalyzer()
    report = analyzer.analyze(model, *make_batch(0), nn.CrossEntropyLoss())
    report.print_summary()

    print("\nby layer type             count   mean pressure   mean health")
    for name, stats in analyzer.get_layer_type_stats().items():
        print(f"  {name:<22} {stats['count']:6.0f} {stats['mean_pressure']:15.2e} {stats['mean_health']:13.0f}")
    print("\nalong the depth (with weights)   pressure   gradient/weight")
    for point in analyzer.get_depth_profile():
        print(f"  {point.depth} {point.layer:<28} {point.pressure:9.2e} {point.weight_ratio:17.2e}")
    return report


def main() -> None:
    broken, fixed = TextClassifier(detached=True), TextClassifier(detached=False)
    before = show("Before: the word vectors are detached", broken)
    after = show("After: they are not", fixed)

    sparse = after.layer("embedding").metrics
    print(
        f"\nOnly some words occur in a batch: the embedding's gradient is uneven (turbulence {sparse.turbulence:.1f}),"
    )
    print("and that alone is not an issue.")
    print("\n=== Before and after")
    print(f"health of the embedding  {before.layer('embedding').health.score:6.0f}", end=" ")
    print(f"{after.layer('embedding').health.score:8.0f}")
    print(f"issues                   {', '.join(i.type for i in before.issues):>6}", end=" ")
    print(f"{', '.join(i.type for i in after.issues) or 'none':>8}")
    print(f"accuracy                 {accuracy(broken):6.0%} {accuracy(fixed):8.0%}")


if __name__ == "__main__":
    main()
