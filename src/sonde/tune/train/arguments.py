"""Translates our settings of a training loop into those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sonde.errors import SettingsError, nearest
from sonde.tune.config import KeepConfig, RecordConfig, TrainingConfig


def trainer_arguments(
    folder: Path, training: TrainingConfig, keep: KeepConfig, record: RecordConfig, model: Any = None, *, has_eval: bool
) -> Any:
    """An `SFTConfig`. `training.arguments` override everything."""
    from trl import SFTConfig

    ours = {
        "output_dir": str(folder),
        "num_train_epochs": training.num_epochs,
        "max_steps": training.max_steps,
        "learning_rate": training.learning_rate,
        "per_device_train_batch_size": training.batch_size,
        "per_device_eval_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation,
        "max_length": min(training.max_length, _num_positions(model)),
        "weight_decay": training.weight_decay,
        "warmup_steps": training.warmup_steps,
        "lr_scheduler_type": training.scheduler,
        "max_grad_norm": training.max_grad_norm,
        "logging_steps": training.logging_interval,
        "seed": training.seed,
        "bf16": training.precision == "bfloat16",
        "fp16": training.precision == "float16",
        "gradient_checkpointing": training.gradient_checkpointing,
        "save_strategy": "steps",
        "save_steps": keep.interval,
        "eval_strategy": "steps" if has_eval else "no",
        "eval_steps": (training.eval_interval or keep.interval) if has_eval else None,
        "eval_on_start": has_eval,
        "report_to": "none" if record.wandb_project is None else "wandb",
        "use_cpu": not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    unknown = [name for name in training.arguments if name not in SFTConfig.__dataclass_fields__]
    if unknown:
        hint = nearest(unknown[0], SFTConfig.__dataclass_fields__)
        raise SettingsError(
            f'no key "training.arguments.{unknown[0]}".{hint} Valid keys are the arguments of trl.SFTConfig.'
        )
    try:
        return SFTConfig(**{**ours, **training.arguments})
    except (ValueError, TypeError) as error:  # no such scheduler, no such optimizer
        raise SettingsError(f"the trainer rejected its arguments: {error}") from None


def _num_positions(model: Any) -> int:
    """The number of positions of the model: a longer text would end in an index out of range."""
    known = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    adapters = (getattr(model, "peft_config", None) or {}).values()
    num_virtual = max((getattr(adapter, "num_virtual_tokens", None) or 0 for adapter in adapters), default=0)
    return known - num_virtual if isinstance(known, int) and known > num_virtual else 2**31 - 1
