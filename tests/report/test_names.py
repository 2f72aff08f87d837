"""Roles, kinds and layers of names that real models and optimizers have; numbers of series."""

from cases import each

from packhorse.reports.names import is_input_embedding, kind_of, layer_of, role_of, steps_of

# name, kind, layer
NAMES = [
    # Llama, Qwen, Gemma, Mixtral, DeepSeek
    ("model.embed_tokens.weight", "embedding", None),
    ("model.layers.0.self_attn.q_proj.weight", "attention", 0),
    ("model.layers.27.self_attn.k_proj.bias", "bias", 27),
    ("model.layers.3.self_attn.q_norm.weight", "norm", 3),
    ("model.layers.11.mlp.down_proj.weight", "feed-forward", 11),
    ("model.layers.0.input_layernorm.weight", "norm", 0),
    ("model.layers.0.pre_feedforward_layernorm.weight", "norm", 0),
    ("model.norm.weight", "norm", None),
    ("lm_head.weight", "output", None),
    ("model.layers.5.block_sparse_moe.gate.weight", "feed-forward", 5),
    ("model.layers.5.block_sparse_moe.experts.7.w1.weight", "feed-forward", 5),
    ("model.layers.5.self_attn.kv_a_proj_with_mqa.weight", "attention", 5),
    # the first Llama
    ("tok_embeddings.weight", "embedding", None),
    ("layers.31.attention.wq.weight", "attention", 31),
    ("layers.31.feed_forward.w3.weight", "feed-forward", 31),
    ("output.weight", "output", None),
    # GPT-2, GPT-NeoX
    ("transformer.wte.weight", "embedding", None),
    ("wpe.weight", "embedding", None),
    ("h.11.ln_1.weight", "norm", 11),
    ("transformer.ln_f.bias", "norm", None),
    ("h.0.attn.c_attn.weight", "attention", 0),
    ("h.0.mlp.c_proj.weight", "feed-forward", 0),
    ("gpt_neox.embed_in.weight", "embedding", None),
    ("gpt_neox.layers.3.attention.query_key_value.weight", "attention", 3),
    ("embed_out.weight", "output", None),
    # BERT, T5
    ("embeddings.word_embeddings.weight", "embedding", None),
    ("bert.embeddings.LayerNorm.weight", "norm", None),
    ("encoder.layer.5.attention.output.dense.weight", "attention", 5),
    ("encoder.layer.5.intermediate.dense.weight", "feed-forward", 5),
    ("encoder.layer.5.output.dense.weight", "feed-forward", 5),
    ("cls.predictions.decoder.weight", "output", None),
    ("shared.weight", "embedding", None),
    ("decoder.block.2.layer.1.EncDecAttention.k.weight", "attention", 2),
    ("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", "feed-forward", 0),
    # Whisper, ViT, ResNet
    ("model.encoder.conv1.weight", "convolution", None),
    ("model.encoder.embed_positions.weight", "embedding", None),
    ("model.decoder.layers.1.encoder_attn_layer_norm.weight", "norm", 1),
    ("model.decoder.layers.1.fc2.weight", "feed-forward", 1),
    ("vit.encoder.layer.9.attention.attention.value.weight", "attention", 9),
    ("blocks.4.attn.qkv.weight", "attention", 4),
    ("visual.transformer.resblocks.5.ln_2.weight", "norm", 5),
    ("head.weight", "output", None),
    ("vit.embeddings.cls_token", "embedding", None),
    ("encoder.multi_head_attention.out.weight", "attention", None),
    ("layer1.0.bn2.running_var", "norm", None),
    ("features.denseblock1.denselayer1.conv1.weight", "convolution", None),
    # Stable Diffusion
    ("down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight", "attention", 1),
    ("down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2.weight", "feed-forward", 1),
    ("up_blocks.2.resnets.1.conv2.weight", "convolution", 2),
    ("mid_block.resnets.0.norm1.weight", "norm", None),
    ("time_embedding.linear_1.weight", "feed-forward", None),
    # Flax, GGUF
    ("params/layers_7/attention/query/kernel", "attention", 7),
    ("blk.12.attn_v.weight", "attention", 12),
    ("rope_freqs.weight", "other", None),
    ("backbone.layers.0.mixer.A_log", "other", 0),
]  # fmt: skip
ROLES = {
    "weights": [
        "model.layers.0.self_attn.v_proj.weight", "pos_conv_embed.conv.weight_v", "step",
        "encoder.fc_mu.weight", "blocks.0.att.time_maa_v", "layers.0.m.weight",
    ],
    "masters": [
        "optimizer.master.layers.0.weight", "optimizer_state_dict.fp32_flat_groups.0",
        "single_partition_of_fp32_groups.0", "fp32_from_fp16.0.1", "optimizer.fp32_param.3",
        "zero/layers.0.weight/fp32",
    ],
    "first moments": [
        "optimizer.state[3].exp_avg", "model.layers.0.mlp.up_proj.weight.exp_avg",
        "base_optimizer_state.state.0.exp_avg", "optimizer.state.0.momentum_buffer",
        "opt_state/0/mu/params/layers_0/kernel", "layers.0.weight.m",
    ],
    "second moments": [
        "optimizer.state[3].exp_avg_sq", "state.model.embed_tokens.weight.exp_avg_sq",
        "optimizer.state.0.max_exp_avg_sq", "optimizer.state.0.exp_avg_sq_row",
        "opt_state/0/nu/params/layers_0/kernel", "layers.0.weight.v",
    ],
}  # fmt: skip


@each("name, kind, layer", NAMES)
def test_kinds_and_layers(name: str, kind: str, layer: int | None) -> None:
    assert (kind_of(name), layer_of(name), role_of(name)) == (kind, layer, "weights")


@each("role", ROLES)
def test_roles(role: str) -> None:
    assert {name: role_of(name) for name in ROLES[role]} == dict.fromkeys(ROLES[role], role)


def test_input_embeddings() -> None:
    inputs = [name for name, kind, _ in NAMES if kind == "embedding" and is_input_embedding(name)]
    assert inputs == [
        "model.embed_tokens.weight", "tok_embeddings.weight", "transformer.wte.weight",
        "gpt_neox.embed_in.weight", "embeddings.word_embeddings.weight", "shared.weight",
    ]  # fmt: skip
    others = ["token_type_embeddings", "position_embeddings", "patch_embed", "label_embedding"]
    assert not any(is_input_embedding(f"embeddings.{name}.weight") for name in others)


@each("paths, steps", [
    (["run/checkpoint-500", "run/checkpoint-1000"], [500, 1000]),
    (["epoch=0-step=90.safetensors", "epoch=1-step=180.safetensors"], [90, 180]),
    (["step=90-loss=0.52.safetensors", "step=180-loss=0.41.safetensors"], [90, 180]),
    (["global_step7/model-3.safetensors", "global_step8/model-3.safetensors"], [7, 8]),
    (["v1/7.safetensors", "v2/8.safetensors"], [7, 8]),
    (["step-00010", "step-00009"], [10, 9]),
    (["checkpoint-10", "checkpoint-final"], None),
    (["a/model", "a/model"], None),
    (["only-1"], None),
    (["step-1", "step-01"], None),
    (["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"], None),
    (["ckpt-5/m-00001-of-00002.safetensors", "ckpt-9/m-00001-of-00002.safetensors"], [5, 9]),
])  # fmt: skip
def test_steps_of_a_series(paths: list[str], steps: list[int] | None) -> None:
    assert steps_of(paths) == steps
