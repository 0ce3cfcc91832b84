"""Hugging Face: one callback adds sonde to a `Trainer`.

You should see: the run's id, and the gradient norm of every layer of a small GPT-2 that learns to count. Takes seconds.
Needs: pip install 'sonde-ml[transformers]' accelerate
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import sonde
from sonde.adapters.transformers import SondeCallback

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
starts = torch.randint(32, (256, 1))
rows = (starts + torch.arange(16)) % 32  # each row counts up from a random number
data = [{"input_ids": row, "labels": row} for row in rows]

arguments = TrainingArguments(
    "trained", max_steps=40, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=5, save_strategy="no",
    report_to="none", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
Trainer(model, arguments, train_dataset=data, callbacks=[SondeCallback(project="examples", name="hf")]).train()

run = sonde.open("latest")
print(run.stats("grad/*/norm", steps="-1:"))
