"""Tutorial 5: queries, keys, values, heads and residual stream of a transformer, post-norm and pre-norm.

A residual stream should pass on its input. With the norm inside the branch (pre-norm) a block passes on all of it; with
the norm after the sum (post-norm) about 70 %; and here the skip connection was cut to 0.3 "for stability". One block is
broken as well: its query and key weights are far too large, so its softmax attends to a single position.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor, nn

from sonde.flow import AttentionAnalyzer

WORDS, LENGTH, WIDTH, HEADS, BLOCKS = 32, 16, 32, 4, 8


class Block(nn.Module):
    def __init__(self, *, is_pre_norm: bool, skip: float) -> None:
        super().__init__()
        self.num_heads, self.is_pre_norm, self.skip = HEADS, is_pre_norm, skip
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out, self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)

    def attend(self, x: Tensor) -> Tensor:
        heads = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_pre_norm:
            x = x + self.attend(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(self.skip * x + self.attend(x))
        return self.norm2(self.skip * x + self.feed_forward(x))


class Transformer(nn.Module):
    def __init__(self, *, is_pre_norm: bool, skip: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(is_pre_norm=is_pre_norm, skip=skip) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_batch(seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Sequences in which each word is the one two places before it, plus one."""
    tokens = torch.randint(WORDS, (size, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    for place in range(2, LENGTH + 1):
        tokens[:, place] = (tokens[:, place - 2] + 1) % WORDS
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def final_loss(model: nn.Module, steps: int = 60) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        x, y = make_batch(step)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def show(title: str, model: nn.Module) -> AttentionAnalyzer:
    print(f"\n=== {title}")
    analyzer = AttentionAnalyzer(num_heads=HEADS)
    report = analyzer.analyze(model, *make_batch(0), loss_fn)
    report.print_issues()
    metrics = analyzer.get_transformer_metrics()
    print("\nblock       gradient   query     key   value   heads   entropy")
    profile = analyzer.get_attention_profile()
    for i, (name, norm) in enumerate(metrics.residual):
        q, k, v = (profile[key][i] for key in ("query", "key", "value"))
        balance = analyzer.get_layer_metrics(i).head_balance
        print(f"{name:<10} {norm:9.4f} {q:7.4f} {k:7.4f} {v:7.4f} {balance:7.2f} {profile['entropy'][i]:9.2f}")
    return analyzer


def main() -> None:
    broken = Transformer(is_pre_norm=False, skip=0.3)
    post_norm, pre_norm = Transformer(is_pre_norm=False), Transformer(is_pre_norm=True)
    with torch.no_grad():
        for projection in (broken.blocks[3].q_proj, broken.blocks[3].k_proj):
            projection.weight *= 20
    before = show("Before: a weak skip connection, and a block that attends to a single position", broken)
    middle = show("Fixed: a full skip connection, all blocks initialised alike", post_norm)
    after = show("Also with the norm inside the branch", pre_norm)

    print("\n=== Before and after                    broken  post-norm  pre-norm")
    for title, value in (
        ("passed on by a block", lambda a: median(a.get_transformer_metrics().carry.values())),
        ("gradient, first/last block", lambda a: a.get_transformer_metrics().residual_ratio),
        ("lowest entropy of a head", lambda a: min(min(m.entropy_by_head) for m in a.metrics.attention)),
        ("issues", lambda a: len(a.report.issues)),
    ):
        print(f"{title:<36} {value(before):9.2f} {value(middle):10.2f} {value(after):9.2f}")
    losses = [final_loss(model) for model in (broken, post_norm, pre_norm)]
    print(f"{'loss after 60 steps':<36} {losses[0]:9.2f} {losses[1]:10.2f} {losses[2]:9.2f}")


if __name__ == "__main__":
    main()
