"""Tiny shapes of families whose text model stands inside of one that sees or hears.

By transformers' `model_type`. Text alone is read by the tests, as by the engine; the other
parts are as small as their families allow.
"""

from __future__ import annotations

from tiny_families import ATTENTION_FAMILIES, MANY_EXPERTS, MLA, SLIDING_WINDOW
from tiny_hybrids import INDEXED, QWEN3_5

QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
}

GLM_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "out_hidden_size": 64,
}

WRAPPED_FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_5_moe": {"text_config": QWEN3_5, "vision_config": QWEN_VISION},
    "aria": {
        "text_config": {
            "num_hidden_layers": 2,
            "intermediate_size": 32,
            "moe_num_experts": 8,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
        "vision_config": VISION | {"model_type": "idefics3_vision", "image_size": 16},
        "projector_patch_to_query_dict": {16: 4},
    },
    "gemma4": {
        "text_config": ATTENTION_FAMILIES["gemma4_text"],
        "vision_config": VISION
        | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
        "audio_config": None,
        "tie_word_embeddings": True,
    },
    "glm4v_moe": {
        "text_config": {
            "num_hidden_layers": 3,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
        "vision_config": GLM_VISION,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **MANY_EXPERTS,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
            },
        },
        "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
    },
    "muse_spark": {
        "text_config": {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "intermediate_size": 96,
            "moe_hidden_size": 32,
            "moe_intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": SLIDING_WINDOW,
        },
        "vision_config": VISION | {"pos_emb_height": 4, "pos_emb_width": 4},
        "audio_config": {
            "patch_sizes": [4],
            "hidden_sizes": [16],
            "depths": [1],
            "num_hidden_layers": 1,
            "out_hidden_size": 64,
        },
        "out_hidden_size": 64,
        "projector_hidden_size": 64,
    },
    "hy_v4_vl": {
        "text_config": {
            **MLA,
            **INDEXED,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "hc_mult": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
            },
        },
        "vision_config": VISION | {"out_hidden_size": 64},
    },
    "glm5_next": {
        "text_config": {
            **MLA,
            **INDEXED,
            "num_hidden_layers": 4,
            "layer_types": [
                "linear_attention", "indexed_attention", "linear_attention", "indexed_attention",
            ],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "qk_rope_head_dim": 0,
            "index_kpool": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "hc_mult": 2,
        },
        "vision_config": GLM_VISION | {"projection_intermediate_size": 32},
    },
    "mistral_large4": {
        "text_config": {**MLA, **INDEXED, "num_hidden_layers": 4, "index_topk_freq": 2},
        "vision_config": VISION | {"model_type": "pixtral", "image_size": 16},
    },
}  # fmt: skip
"""Fields beside those that all tiny models share; those of the text model stand inside."""
