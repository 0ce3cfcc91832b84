"""The configuration that `sonde train --example` prints."""

from __future__ import annotations

from typing import Final

EXAMPLE: Final = """\
model:                      # a small, new model; or  name: a folder or a model on the Hugging Face Hub
  architecture: llama
  hidden_size: 64
  intermediate_size: 128
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  initializer_range: 0.1    # about 1 / sqrt(hidden_size); the usual 0.02 is for wide models
data:                       # generated texts; or  path: a .txt, .jsonl, .csv or .parquet file
  generate: counting
  num_samples: 500
method:
  name: lora                # full, lora, qlora, dora, ia3, prefix, prompt, bitfit, unsloth
  r: 8
  alpha: 16
  merge: true               # also save the whole model with the adapters merged in
training:
  num_epochs: 1
  learning_rate: 0.005
  batch_size: 8
  max_length: 64
checkpoints:
  interval: 20
  keep_last: 3
run:
  project: tune
  name: first
output_dir: checkpoints
"""
