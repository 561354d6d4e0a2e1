"""Tiny shapes of families with more than attention, by transformers' `model_type`.

Layers with a running or a convolution's state, and attention over chosen or compressed keys.
As in `tiny_families`, each shape keeps what is particular about its family.
"""

from __future__ import annotations

from tiny_families import MANY_EXPERTS, MLA, SLIDING_WINDOW

MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2}

DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

INDEXED = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 16}
"""Attention to fewer tokens than the tests' texts have. So many heads that no two tokens score
alike: with few, all of them can be 0, and which token is chosen is then anybody's guess."""

QWEN3_5 = {
    **MANY_EXPERTS,
    **DELTA_NET,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}

HYBRID_FAMILIES: dict[str, dict[str, object]] = {
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "qwen3_next": {
        **MANY_EXPERTS,
        **DELTA_NET,
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention", "full_attention", "linear_attention", "full_attention",
        ],
        "shared_expert_intermediate_size": 64,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "granitemoehybrid": {
        **MAMBA2,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_chunk_size": 8,
        "position_embedding_type": "rope",
    },
    "bailing_hybrid": {
        **MLA,
        "num_local_experts": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "head_dim": 16,
        "q_lora_rank": None,
        "n_group": 2,
        "topk_group": 1,
        "num_mtp_layers": 0,
    },
    "kimi_linear": {
        **MLA,
        "num_local_experts": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "q_lora_rank": None,
    },
    "lara_mini": {
        **MANY_EXPERTS,
        **DELTA_NET,
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention", "sliding_attention", "linear_attention", "full_attention",
        ],
        "shared_expert_intermediate_size": 64,
        "sliding_window": SLIDING_WINDOW,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": QWEN3_5,
    "zaya": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 1,
        "router_hidden_size": 32,
    },
    "inkling_text": {
        **MANY_EXPERTS,
        "num_hidden_layers": 4,
        "local_layer_ids": [0, 2],
        "dense_mlp_idx": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": SLIDING_WINDOW,
        "d_rel": 4,
        "rel_extent": 32,
        "logits_mup_width_multiplier": 1.0,
    },
    "deepseek_v32": {**MLA, **INDEXED, "n_group": 2, "topk_group": 1},
    "glm_moe_dsa": {**MLA, **INDEXED, "index_topk_freq": 2},
    "axk2": {**MLA, **INDEXED, "gated_norm_rank": 8},
    "hy_v4": {
        **MLA,
        **INDEXED,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "hc_mult": 2,
    },
    "dots3_note_text": {
        **MLA,
        **INDEXED,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "head_dim": 24,
        "shared_experts_intermediate_size": 32,
        "sliding_window": SLIDING_WINDOW,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 4,
        "hc_mult": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": SLIDING_WINDOW,
    },
    "inkling2_text": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": SLIDING_WINDOW,
        "d_rel": 4,
        "rel_extent": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_layers_per_attn_res_block": 2,
        "unpadded_vocab_size": 264,
    },
    "qwen4_exp_text": {
        **QWEN3_5,
        "layer_types": [
            "linear_attention", "indexed_attention", "linear_attention", "indexed_attention",
        ],
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "head_dim": 16,
        "rotary_dim": 8,
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
}  # fmt: skip
"""Fields beside those that all tiny models share."""

RECURRENT_FAMILIES = (
    "jamba",
    "qwen3_next",
    "nemotron_h",
    "granitemoehybrid",
    "bailing_hybrid",
    "kimi_linear",
    "lara_mini",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "qwen4_exp_text",
    "glm5_next",
)
"""Families with a running state, which transformers cannot take back by some tokens."""

UNCROPPED_FAMILIES = ("deepseek_v4", "zaya")
"""Families with other state that it cannot take back."""
