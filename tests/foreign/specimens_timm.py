"""Models of timm and diffusers, small, from their own constructors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import packages
import tasks
from specimen import Specimen
from specimens_torchvision import COUNT, classification_loss
from tasks import Batch, Batches


def _timm(name: str, place: str, *, size: int = 32, more: dict[str, Any] | None = None, **options: Any) -> Specimen:
    """`place` is "module.Class" in `timm.models`. An argument that is a function is called when the model is built."""

    def build() -> nn.Module:
        packages.use("timm")
        module, _, kind = place.partition(".")
        given = {name: value() if callable(value) else value for name, value in options.items()}
        return getattr(importlib.import_module(f"timm.models.{module}"), kind)(num_classes=COUNT, **given)

    batches = partial(tasks.image_classification, size=size)
    return Specimen(name, "timm", build, batches, classification_loss, **(more or {}))


def _ghost_settings() -> list[Any]:
    """Kernel, hidden channels, channels, squeeze and excite, stride."""
    return [[[3, 16, 16, 0, 1]], [[3, 32, 24, 0, 2]], [[5, 48, 32, 0.25, 2]]]


def _repvgg_settings() -> Any:
    from timm.models.byobnet import ByoBlockCfg, ByoModelCfg

    blocks = tuple(ByoBlockCfg(type="rep", d=depth, c=channels) for depth, channels in ((1, 16), (2, 32), (1, 32)))
    return ByoModelCfg(blocks=blocks, stem_type="rep", stem_chs=16)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}
TIMM = [
    _timm("VisionTransformer", "vision_transformer.VisionTransformer", **VIT),
    _timm("BEiT", "beit.Beit", **VIT, init_values=0.1, use_abs_pos_emb=False, use_rel_pos_bias=True),
    _timm("EVA", "eva.Eva", **VIT, use_rot_pos_emb=True, swiglu_mlp=True),
    _timm("CaiT", "cait.Cait", **VIT, init_values=0.1),
    _timm("XCiT", "xcit.Xcit", **VIT, eta=0.1),
    _timm("MLP-Mixer", "mlp_mixer.MlpMixer", more={"is_quick": True}, **MIXER),
    _timm("ConvMixer", "convmixer.ConvMixer", dim=32, depth=2, kernel_size=5, patch_size=4),
    _timm("ConvNeXt", "convnext.ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 16, 32, 32), ls_init_value=0.1),
    _timm("GhostNet", "ghostnet.GhostNet", cfgs=_ghost_settings, width=1.0),
    _timm("MetaFormer", "metaformer.MetaFormer", depths=(1, 1, 1, 1), dims=(8, 16, 32, 32)),
    _timm(
        "EdgeNeXt",
        "edgenext.EdgeNeXt",
        size=64,
        depths=(1, 1, 1, 1),
        dims=(8, 16, 32, 32),
        heads=(1, 2, 2, 2),
        ls_init_value=0.1,
    ),
    _timm("DaViT", "davit.DaVit", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), window_size=4),
    _timm("InceptionNeXt", "inception_next.MetaNeXt", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), ls_init_value=0.1),
    _timm(
        "Twins",
        "twins.Twins",
        img_size=64,
        size=64,
        embed_dims=(8, 16, 32, 32),
        num_heads=(1, 2, 4, 4),
        depths=(1, 1, 1, 1),
    ),
    _timm(
        "VOLO",
        "volo.VOLO",
        img_size=32,
        patch_size=4,
        layers=(1, 1),
        embed_dims=(16, 32),
        num_heads=(2, 4),
        mlp_ratio=(2, 2),
        downsamples=(True, False),
        outlook_attention=(True, False),
        stem_hidden_dim=16,
    ),
    _timm(
        "NesT",
        "nest.Nest",
        img_size=32,
        patch_size=4,
        num_levels=2,
        embed_dims=(16, 32),
        num_heads=(2, 4),
        depths=(1, 1),
    ),
    _timm("RepVGG", "byobnet.ByobNet", cfg=_repvgg_settings),
]


def _noisy(rows: int = 8, size: int = 16) -> Batches:
    """Noisy pictures, the time that says how noisy they are, and the noise to be predicted."""
    made = torch.Generator().manual_seed(2000)
    for batch in tasks.boxes(rows, size):
        x = batch["pixel_values"]
        noise, time = torch.randn(x.shape, generator=made), torch.randint(1000, (rows,), generator=made)
        share = (torch.cos(time / 1000 * 1.57) ** 2)[:, None, None, None]
        kinds = torch.stack([target["class_labels"][0] for target in batch["labels"]])
        yield {"x": share.sqrt() * x + (1 - share).sqrt() * noise, "time": time, "noise": noise, "kinds": kinds}


def _denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch["x"], batch["time"]).sample, batch["noise"])


def _conditional_loss(model: nn.Module, batch: Batch) -> Tensor:
    words = functional.one_hot(torch.stack([batch["kinds"], batch["kinds"] + 4, 15 - batch["kinds"]], 1), 16).float()
    return functional.mse_loss(model(batch["x"], batch["time"], encoder_hidden_states=words).sample, batch["noise"])


def _class_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch["x"], timestep=batch["time"], class_labels=batch["kinds"]).sample
    return functional.mse_loss(out[:, :3], batch["noise"])


def _autoencoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    posterior = model.encode(batch["pixel_values"]).latent_dist
    back = model.decode(posterior.sample()).sample
    return functional.mse_loss(back, batch["pixel_values"]) + 1e-4 * posterior.kl().mean()


def _quantised_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch["pixel_values"])
    return functional.mse_loss(out.sample, batch["pixel_values"]) + out.commit_loss


def _plain_autoencoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Not through `forward`, which rounds what is encoded to bytes and so cuts the graph."""
    back = model.decode(model.encode(batch["pixel_values"]).latents).sample
    return functional.mse_loss(back, batch["pixel_values"])


def _diffusers(
    name: str,
    batches: Callable[[], Batches],
    loss: Callable[[nn.Module, Batch], Tensor],
    *,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Specimen:
    def build() -> nn.Module:
        packages.use("diffusers")
        import diffusers

        return getattr(diffusers, name)(**options)

    return Specimen(name, "diffusers", build, batches, loss, **(more or {}))


UNET = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
DIFFUSERS = [
    _diffusers(
        "UNet2DModel",
        _noisy,
        _denoising_loss,
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        more={"is_quick": True},
    ),
    _diffusers(
        "UNet2DConditionModel",
        _noisy,
        _conditional_loss,
        **UNET,
        in_channels=3,
        out_channels=3,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    _diffusers(
        "DiTTransformer2DModel",
        _noisy,
        _class_loss,
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        sample_size=16,
        patch_size=4,
        num_embeds_ada_norm=1000,
        norm_num_groups=8,
    ),
    _diffusers(
        "AutoencoderKL",
        partial(tasks.boxes, 8, 16),
        _autoencoder_loss,
        block_out_channels=(16, 32),
        latent_channels=4,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
    ),
    _diffusers(
        "VQModel",
        partial(tasks.boxes, 8, 16),
        _quantised_loss,
        block_out_channels=(16, 32),
        latent_channels=4,
        norm_num_groups=8,
        num_vq_embeddings=32,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
    ),
    _diffusers(
        "AutoencoderTiny",
        partial(tasks.boxes, 8, 16),
        _plain_autoencoder_loss,
        encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        more={"lr": 1e-3},
    ),
]
ALL = [*TIMM, *DIFFUSERS]
