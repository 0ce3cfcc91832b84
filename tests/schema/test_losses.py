"""Which scalar is the training loss, and which the validation loss, by name; the names that trainers really log."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.schema.losses import (
    SEEN,
    is_loss,
    retained_losses,
    shown_scalars,
    training_loss,
    validation_accuracy,
    validation_loss,
)

TRAINERS = {
    "torch": (["loss"], "loss", None),
    "TensorBoard": (["Loss/train", "Loss/test", "Accuracy/test"], "Loss/train", "Loss/test"),
    "transformers": (
        ["loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_runtime", "train_runtime", "train_loss"],
        *("loss", "eval_loss"),
    ),
    "transformers that logged no step": (["train_runtime", "train_loss", "data/loss/train"], "data/loss/train", None),
    "transformers, two sets": (["loss", "eval_b_loss", "eval_a_loss"], "loss", "eval_a_loss"),
    "sonde train": (["loss", "eval_loss", "eval_retained_loss", "train_runtime", "train_loss"], "loss", "eval_loss"),
    "TRL ORPO": (["loss", "nll_loss", "rewards/chosen", "eval_loss", "eval_nll_loss"], "loss", "eval_loss"),
    "TRL PPO": (["loss/policy_avg", "loss/value_avg", "objective/kl", "data/loss/train"], "data/loss/train", None),
    "Lightning": (
        ["train_loss", "train_loss_step", "train_loss_epoch", "val_loss", "val_acc"],
        *("train_loss", "val_loss"),
    ),
    "Lightning, forked": (["train_loss_epoch", "train_loss_step"], "train_loss_step", None),
    "Lightning, dataloaders": (
        ["train_loss", "val_loss/dataloader_idx_1", "val_loss/dataloader_idx_0"],
        *("train_loss", "val_loss/dataloader_idx_0"),
    ),
    "Keras": (["loss", "accuracy", "val_accuracy", "val_loss"], "loss", "val_loss"),
    "Keras, two outputs": (["a_loss", "b_loss", "loss", "val_a_loss", "val_loss"], "loss", "val_loss"),
    "fastai": (["train_loss", "valid_loss"], "train_loss", "valid_loss"),
    "fairseq": (["train/loss", "train/nll_loss", "valid/loss"], "train/loss", "valid/loss"),
    "Megatron": (["lm loss", "lm loss validation", "loss-scale"], "lm loss", "lm loss validation"),
    "torchtitan": (["metrics/global_avg_loss", "metrics/global_max_loss"], "metrics/global_avg_loss", None),
    "composer": (["loss/train/total", "loss/train/ce"], "loss/train/total", None),
    "DeepSpeed": (["Train/Samples/train_loss", "Train/Samples/loss_scale"], "Train/Samples/train_loss", None),
    "detectron2": (["total_loss", "loss_cls", "loss_box_reg"], "total_loss", None),
    "YOLO": (["train/box_loss", "train/cls_loss", "val/box_loss", "val/cls_loss"], None, None),
    "YOLO, seen": (["train/box_loss", "train/cls_loss", "val/box_loss", "data/loss/train"], "data/loss/train", None),
    "GAN": (["loss_D", "loss_G"], None, None),
    "camel case": (["trainLoss", "valLoss"], "trainLoss", "valLoss"),
    "objective": (["objective/loss", "loss"], "loss", None),
    "sonde run": (
        ["data/loss/value", "data/loss/baseline", "data/loss/train", "data/loss/validation", "optim/lr"],
        *("data/loss/train", "data/loss/validation"),
    ),
    "an older run": (["data/loss/value", "data/loss/numel", "optim/loss_scale"], "data/loss/value", None),
    "one of its own name": (["contrastive_loss", "val/contrastive_loss"], "contrastive_loss", "val/contrastive_loss"),
    "no loss": (["accuracy", "lr", "loss_scale", "best_loss", "data/input/std"], None, None),
}  # fmt: skip


@pytest.mark.parametrize("names", list(itertools.permutations(["objective/loss", "loss", "total_loss"])))
def test_order_of_logging_does_not_matter(names: tuple[str, ...]) -> None:
    assert training_loss(names) == "loss"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_names_of_trainers(trainer: str) -> None:
    names, training, validation = TRAINERS[trainer]
    assert (training_loss(names), validation_loss(names)) == (training, validation)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("logged", ["loss", "train/loss", "Loss.Train", "total-loss", "mse_loss"])
def test_a_logged_loss_wins_over_what_sonde_saw(logged: str, seen: str) -> None:
    assert training_loss([seen, logged]) == logged


@pytest.mark.parametrize("separator", ["/", "_", ".", "-", " "])
@pytest.mark.parametrize("case", [str.lower, str.upper, str.title])
def test_case_and_separators_do_not_matter(separator: str, case: object) -> None:
    train, val = (case(separator.join(words)) for words in (("train", "loss"), ("val", "loss")))  # type: ignore[operator]
    assert (training_loss([train, val]), validation_loss([train, val])) == (train, val)


WORDS = ["loss", "train", "val", "eval", "total", "box", "step", "epoch", "mse", "scale", "acc", "retained", "lr"]
NAMES = st.lists(
    st.one_of(
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).flatmap(
            lambda words: st.sampled_from("/_.-").map(lambda separator: separator.join(words))
        ),
        st.sampled_from(SEEN),
        st.text(max_size=5),
    ),
    unique=True,
    max_size=12,
)


@given(NAMES, st.randoms(use_true_random=False))
def test_any_names_in_any_order_give_one_of_them(names: list[str], random) -> None:  # type: ignore[no-untyped-def]
    found = training_loss(names), validation_loss(names), validation_accuracy(names)
    shuffled = random.sample(names, len(names))
    assert found == (training_loss(shuffled), validation_loss(shuffled), validation_accuracy(shuffled))
    assert all(name is None or name in names for name in found)
    assert found[0] is None or found[0] != found[1]
    assert {name for name in found[:2] if name is not None} <= {name for name in shown_scalars(names) if is_loss(name)}
    assert set(retained_losses(names)).isdisjoint(found)
