"""Language models of transformers from small configurations: decoders, encoders, both, experts and recurrences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import tasks
from specimen import Specimen, own_loss
from tasks import Batch, Batches

GROUP = "transformers, text"
SPECIAL = {
    "vocab_size": tasks.VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # The default, 0.02, is made for widths near a thousand. At 32 the same outputs need weights five times as large.
    "initializer_range": 0.1, "init_std": 0.1,
}  # fmt: skip
LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "type_vocab_size": 2,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def from_config(model_type: str, model_class: str, **values: Any) -> Callable[[], nn.Module]:
    """A model with random weights, as its own code initialises them."""

    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(model_type, **values)
        return getattr(transformers, model_class)(config)

    return build


def specimen(
    group: str,
    batches: Callable[[], Batches],
    model_type: str,
    model_class: str,
    *,
    more: dict[str, Any] | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] = own_loss,
    lr: float = 3e-3,
    is_quick: bool = False,
    known: tuple[str, ...] = (),
    **values: Any,
) -> Specimen:
    """Of transformers, by the name of its class. `more` are values that several models share."""
    build = from_config(model_type, model_class, **(more or {}) | values)
    return Specimen(model_class, group, build, batches, loss, lr=lr, is_quick=is_quick, known_findings=known)


def _text(
    batches: Callable[[], Batches],
    model_type: str,
    model_class: str,
    *,
    more: dict[str, Any] | None = None,
    **rest: Any,
) -> Specimen:
    return specimen(GROUP, batches, model_type, model_class, more=SPECIAL | (more or {}), **rest)


def _causal(model_type: str, model_class: str, **values: Any) -> Specimen:
    return _text(tasks.causal, model_type, model_class, **values)


def _masked(model_type: str, model_class: str, **values: Any) -> Specimen:
    return _text(tasks.masked, model_type, model_class, **values)


def _translation(model_type: str, model_class: str, **values: Any) -> Specimen:
    return _text(tasks.translation, model_type, model_class, **values)


DECODERS = [
    _causal("gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    _causal("openai-gpt", "OpenAIGPTLMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    _causal(
        "gpt_neo",
        "GPTNeoForCausalLM",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    _causal("gpt_neox", "GPTNeoXForCausalLM", more=LLAMA),
    _causal("gptj", "GPTJForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    _causal("codegen", "CodeGenForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    _causal("gpt_bigcode", "GPTBigCodeForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    _causal(
        "opt",
        "OPTForCausalLM",
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    _causal("bloom", "BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4),
    _causal("falcon", "FalconForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    _causal("mpt", "MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    _causal(
        "xglm", "XGLMForCausalLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=64, max_position_embeddings=64
    ),
    _causal("llama", "LlamaForCausalLM", more=LLAMA, is_quick=True),
    _causal("mistral", "MistralForCausalLM", more=LLAMA, sliding_window=8),
    _causal("qwen2", "Qwen2ForCausalLM", more=LLAMA),
    _causal("qwen3", "Qwen3ForCausalLM", more=LLAMA, head_dim=8),
    _causal("gemma", "GemmaForCausalLM", more=LLAMA, head_dim=8),
    _causal("gemma2", "Gemma2ForCausalLM", more=LLAMA, head_dim=8, sliding_window=8),
    _causal("gemma3_text", "Gemma3ForCausalLM", more=LLAMA, head_dim=8, sliding_window=8),
    _causal("phi", "PhiForCausalLM", more=LLAMA),
    _causal("phi3", "Phi3ForCausalLM", more=LLAMA),
    _causal("stablelm", "StableLmForCausalLM", more=LLAMA),
    _causal("olmo2", "Olmo2ForCausalLM", more=LLAMA),
    _causal("cohere", "CohereForCausalLM", more=LLAMA),
    _causal("starcoder2", "Starcoder2ForCausalLM", more=LLAMA),
    _causal("granite", "GraniteForCausalLM", more=LLAMA),
]
"""Decoder-only transformers."""

EXPERT_MODELS = [
    _causal("mixtral", "MixtralForCausalLM", more=LLAMA | EXPERTS, output_router_logits=True, is_quick=True),
    _causal(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        more=LLAMA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        output_router_logits=True,
    ),
    _causal("gpt_oss", "GptOssForCausalLM", more=LLAMA | EXPERTS, head_dim=8, sliding_window=8),
    _causal(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        more=LLAMA,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    _translation(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        more=T5,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=64,
    ),
]
RECURRENT = [
    _causal("mamba", "MambaForCausalLM", hidden_size=32, state_size=8, num_hidden_layers=2, is_quick=True),
    _causal(
        "mamba2",
        "Mamba2ForCausalLM",
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=8,
    ),
    _causal(
        "rwkv",
        "RwkvForCausalLM",
        hidden_size=32,
        attention_hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        context_length=64,
    ),
    _causal(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        more=LLAMA,
        num_key_value_heads=1,
        head_dim=8,
        lru_width=32,
        attention_window_size=8,
        num_hidden_layers=3,
    ),
    _causal(
        "jamba",
        "JambaForCausalLM",
        more=LLAMA,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
    ),
]
ENCODERS = [
    _masked("bert", "BertForMaskedLM", more=BERT, is_quick=True),
    _masked("roberta", "RobertaForMaskedLM", more=BERT),
    _masked("xlm-roberta", "XLMRobertaForMaskedLM", more=BERT),
    _masked(
        "distilbert", "DistilBertForMaskedLM", dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=64
    ),
    _masked("albert", "AlbertForMaskedLM", more=BERT, embedding_size=16),
    _masked("electra", "ElectraForMaskedLM", more=BERT, embedding_size=16),
    _masked("deberta", "DebertaForMaskedLM", more=BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _masked("deberta-v2", "DebertaV2ForMaskedLM", more=BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _masked("mpnet", "MPNetForMaskedLM", more=BERT),
    _masked("convbert", "ConvBertForMaskedLM", more=BERT, embedding_size=16),
    _masked(
        "funnel",
        "FunnelForMaskedLM",
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        initializer_std=0.1,
    ),
    _masked("fnet", "FNetForMaskedLM", more=BERT),
    _masked(
        "modernbert", "ModernBertForMaskedLM", more=BERT, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    ),
    _masked(
        "mobilebert",
        "MobileBertForMaskedLM",
        more=BERT,
        embedding_size=32,
        intra_bottleneck_size=32,
        num_feedforward_networks=2,
    ),
    _masked("longformer", "LongformerForMaskedLM", more=BERT, attention_window=[8, 8]),
    _masked("big_bird", "BigBirdForMaskedLM", more=BERT, attention_type="original_full"),
    _masked("roformer", "RoFormerForMaskedLM", more=BERT, embedding_size=32),
    _masked("squeezebert", "SqueezeBertForMaskedLM", more=BERT, embedding_size=32),
    _masked("nystromformer", "NystromformerForMaskedLM", more=BERT, num_landmarks=4, segment_means_seq_len=16),
    _masked("esm", "EsmForMaskedLM", more=BERT, mask_token_id=tasks.MASK, position_embedding_type="rotary"),
]
SEQ2SEQ = [
    _translation("t5", "T5ForConditionalGeneration", more=T5, is_quick=True),
    _translation("umt5", "UMT5ForConditionalGeneration", more=T5),
    _translation("longt5", "LongT5ForConditionalGeneration", more=T5, local_radius=4, encoder_attention_type="local"),
    _translation("bart", "BartForConditionalGeneration", more=BART),
    _translation("mbart", "MBartForConditionalGeneration", more=BART),
    _translation("pegasus", "PegasusForConditionalGeneration", more=BART),
    _translation("marian", "MarianMTModel", more=BART),
    _translation("blenderbot", "BlenderbotForConditionalGeneration", more=BART),
    _translation("m2m_100", "M2M100ForConditionalGeneration", more=BART),
    _translation(
        "led",
        "LEDForConditionalGeneration",
        more=BART,
        attention_window=8,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    _translation(
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        hidden_size=32,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        decoder_start_token_id=1,
    ),
]
ALL = [*DECODERS, *EXPERT_MODELS, *RECURRENT, *ENCODERS, *SEQ2SEQ]
