"""DoRA: LoRA for the direction of each weight, with a separate magnitude. Liu et al. 2024."""

from __future__ import annotations

from sonde.tune.methods.lora import Method as Lora


class Method(Lora):
    uses_dora = True
