"""A skip connection that is scaled down in every block is named; intact ones, post-norm and plain stacks are not."""

from __future__ import annotations

from typing import Any

from sonde.diagnose.rules.residual_decay import residual_decay
from sonde.schema.window import Window
from windows import stack, stuck, window


def blocks(*inside: str, num_blocks: int = 6) -> dict[str, Any]:
    """Blocks named b.0, b.1, …, each with leaves of the given kinds."""
    modules: list[dict[str, Any]] = []
    for block in range(num_blocks):
        for place, kind in enumerate(inside):
            name = f"b.{block}.{place}"
            modules.append({"name": name, "type": kind, "kind": kind, "order": len(modules), "is_leaf": True})
        modules.append(
            {"name": f"b.{block}", "type": "Block", "kind": "container", "order": len(modules), "is_leaf": False}
        )
    return {**stack(), "modules": modules}


def seen(document: dict[str, Any], *carries: float) -> Window:
    return window(document, stuck(60), {f"unit/b.{block}/skip_gain": carry for block, carry in enumerate(carries)})


def test_a_skip_scaled_down_in_every_block_is_named() -> None:
    (finding,) = residual_decay(seen(blocks("norm", "linear"), 0.52, 0.5, 0.49, 0.5, 0.51, 0.5))
    assert finding.sites[0] == "b.0"
    assert "passed on only 50 % of its input" in finding.message


def test_intact_skips_are_fine() -> None:
    assert not list(residual_decay(seen(blocks("norm", "linear"), 1.0, 0.95, 1.02, 0.97, 1.1, 0.9)))


def test_attention_blocks_without_a_skip_are_named() -> None:
    (finding,) = residual_decay(seen(blocks("norm", "attention", "linear"), 0.1, -0.05, 0.0, 0.02, 0.01, 0.0))
    assert "no skip" in finding.message


def test_a_plain_stack_has_no_skip_to_lose() -> None:
    assert not list(residual_decay(seen(blocks("linear", "activation"), 0.3, -0.2, 0.02, 0.1, -0.1, 0.2)))


def test_post_norm_is_as_published() -> None:
    assert not list(residual_decay(seen(blocks("attention", "linear", "norm"), 0.6, 0.6, 0.6, 0.6, 0.6, 0.6)))


def test_an_empty_window_says_nothing() -> None:
    assert not list(residual_decay(Window()))
