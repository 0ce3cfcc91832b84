"""Inside scaled_dot_product_attention: queries, keys, values, entropy and largest logit of each head.

Values that the fused kernel computes internally are recomputed for a sample: at most 2 rows of the batch and 32 evenly
spaced queries (`reduce/inspect/attention.py`). No random numbers are drawn, so dropout is left out, and the computed
attention is only read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sonde.flow.monitor.monitor import ModuleMonitor
from sonde.probe.guards import quiet
from sonde.reduce.inspect.attention import MASKED_BELOW, Sample, sample_fused


def monitor_scaled_dot_product_attention(
    monitor: ModuleMonitor,
    *,
    module: nn.Module | str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    activation: Tensor | None = None,
) -> None:
    """Log the heads of one attention; tensors are (batch, heads, positions, width), as the attention takes them.

    Activation metrics of `{module}.head_{i}.query` and .key, .value, .activation, and, from the sample,
    `attention_entropy/{module}.head_{i}` in nats and `attention_max_logit/{module}.head_{i}`.
    """
    if not monitor.is_monitoring:
        return
    try:
        name = monitor.name_of(module)
        with quiet():
            parts = {"query": query, "key": key, "value": value, "activation": activation}
            for title, tensor in parts.items():
                if tensor is None:
                    continue
                for head in range(tensor.shape[-3]):
                    monitor.monitor_activation(f"{name}.head_{head}.{title}", tensor.select(-3, head))
            sample = sample_fused(query, key, mask=attn_mask, is_causal=is_causal, scale=scale)
            _log(monitor, name, sample, query.shape[-3])
    except Exception as error:  # noqa: BLE001 - logging must not end the training
        monitor.report("monitor_scaled_dot_product_attention", error)


def _log(monitor: ModuleMonitor, name: str, sample: Sample, num_heads: int) -> None:
    logits, p = sample.logits, sample.probabilities
    visible = (logits > MASKED_BELOW) & logits.isfinite()
    entropy = -torch.xlogy(p, p).sum(-1)
    largest = torch.where(visible, logits.abs(), 0.0).amax(-1)
    stride = -(-num_heads // logits.shape[1])  # with very many heads only some are sampled
    for index in range(logits.shape[1]):
        head = f"{name}.head_{index * stride}"
        monitor.log_tensor(f"attention_entropy/{head}", entropy[:, index])
        monitor.log_tensor(f"attention_max_logit/{head}", largest[:, index], torch.max)
