"""Files ``config.json`` of published models, written down from memory, with all keys beside sizes.

Sizes are small: nothing of a model but its file is of interest here.
"""

from typing import Any

_OLD = {"torch_dtype": "bfloat16", "transformers_version": "4.44.2", "use_cache": True}
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "initializer_range": 0.02,
}
_BASE = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
_GPT2_HEADS = {
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}


def llama(**keys: Any) -> dict[str, Any]:
    """A Llama; ``keys``: what differs."""
    plain = {"hidden_act": "silu", "max_position_embeddings": 4096, "rope_scaling": None}
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "pretraining_tp": 1}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return {**_OLD, **_SIZES, **_BASE, **named, **plain, **ends, "attention_bias": False, **keys}


def _mistral(**keys: Any) -> dict[str, Any]:
    told = llama(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=4096)
    return told | {"max_position_embeddings": 32768, "attention_dropout": 0.0} | keys


def _qwen2(**keys: Any) -> dict[str, Any]:
    slides = {"sliding_window": 32768, "max_window_layers": 21, "use_sliding_window": False}
    ends = {"bos_token_id": 90, "eos_token_id": 90, "rope_theta": 1000000.0}
    told = llama(architectures=["Qwen2ForCausalLM"], model_type="qwen2", **slides, **ends)
    del told["attention_bias"]
    return told | {"attention_dropout": 0.0, "rms_norm_eps": 1e-6} | keys


def _qwen3(**keys: Any) -> dict[str, Any]:
    told = _qwen2(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=16)
    return told | {"attention_bias": False, "sliding_window": None} | keys


def _gpt2(**keys: Any) -> dict[str, Any]:
    sizes = {"n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64}
    drops = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    named = {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"]}
    ends = {"bos_token_id": 90, "eos_token_id": 90, "vocab_size": 96, "model_type": "gpt2"}
    told = {**sizes, **drops, **named, **ends, "initializer_range": 0.02}
    return told | {"layer_norm_epsilon": 1e-5} | keys


def _neox(**keys: Any) -> dict[str, Any]:
    named = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
    }
    rotary = {"rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True}
    told = {**_OLD, **_SIZES, **named, **rotary, "layer_norm_eps": 1e-5, "bos_token_id": 0}
    del told["num_key_value_heads"]
    rest = {"eos_token_id": 0, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    return told | rest | keys


def _phi3(**keys: Any) -> dict[str, Any]:
    named = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    code = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    drops = {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    ends = {"bos_token_id": 1, "eos_token_id": 95, "pad_token_id": 95, "sliding_window": 2047}
    told = llama(**named, **drops, **ends, auto_map=code, original_max_position_embeddings=4096)
    del told["pretraining_tp"]
    return told | keys


def _gemma3(**keys: Any) -> dict[str, Any]:
    named = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    soft = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    rope = {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None}
    window = {"sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256}
    ends = {"bos_token_id": 2, "eos_token_id": [1, 90], "pad_token_id": 0}
    told = {**_OLD, **_SIZES, **named, **soft, **rope, **window, **ends, "head_dim": 16}
    told |= {"num_hidden_layers": 7, "num_key_value_heads": 1, "rms_norm_eps": 1e-6}
    told |= {"attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid"}
    return (
        told | {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768} | keys
    )


def _olmo(**keys: Any) -> dict[str, Any]:
    named = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    told = llama(**named, rope_theta=500000, pad_token_id=1, eos_token_id=90, rms_norm_eps=1e-6)
    del told["pretraining_tp"], told["bos_token_id"]
    return told | {"attention_dropout": 0.0} | keys


def _granite(**keys: Any) -> dict[str, Any]:
    scales = {
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
    }
    named = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "mlp_bias": False}
    told = llama(**named, **scales, attention_dropout=0.1, tie_word_embeddings=True)
    return told | {"rope_theta": 10000000.0, "pad_token_id": 0} | keys


def _smollm3(**keys: Any) -> dict[str, Any]:
    named = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "mlp_bias": False}
    layers = {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 1, 1, 0]}
    window = {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}
    told = llama(**named, **layers, **window, no_rope_layer_interval=4, pretraining_tp=2)
    told |= {"rope_theta": 5000000.0, "tie_word_embeddings": True, "pad_token_id": 95}
    return told | keys


def _starcoder2(**keys: Any) -> dict[str, Any]:
    named = {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
    drops = {"attention_dropout": 0.1, "embedding_dropout": 0.1, "residual_dropout": 0.1}
    kinds = {"hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "norm_type": "layer_norm"}
    told = {**_OLD, **_SIZES, **named, **drops, **kinds, "norm_epsilon": 1e-5, "use_bias": True}
    rest = {"max_position_embeddings": 16384, "rope_theta": 999999.4420358813}
    return told | rest | {"sliding_window": 4096, "bos_token_id": 0, "eos_token_id": 0} | keys


TUNED = {
    "_attn_implementation_autoset": True,
    "_name_or_path": "/data/checkpoints/last",
    "attn_implementation": "flash_attention_2",
    "gradient_checkpointing": True,
    "max_length": 4096,
    "neftune_noise_alpha": 5,
    "pad_token": "</s>",
    "temperature": 0.9,
    "tokenizer_model_max_length": 4096,
    "tokenizer_padding_side": "right",
    "top_p": 0.6,
    "unsloth_fixed": True,
    "unsloth_version": "2025.3.19",
}
"""Keys of fine-tuning programs."""

READ: dict[str, dict[str, Any]] = {
    "Llama-2-7b": llama(),
    "Llama-2-7b-chat": llama(pad_token_id=0, _name_or_path="meta-llama/Llama-2-7b-chat-hf"),
    "Meta-Llama-3-8B": llama(rope_theta=500000.0, max_position_embeddings=8192),
    "Llama-3.1-8B-Instruct": llama(
        rope_scaling=LLAMA3, eos_token_id=[91, 92, 93], max_position_embeddings=131072
    ),
    "Llama-3.2-1B": llama(
        rope_scaling={**LLAMA3, "factor": 32.0},
        head_dim=8,
        mlp_bias=False,
        tie_word_embeddings=True,
    ),
    "Llama-3.3-70B": llama(rope_scaling=LLAMA3, head_dim=8, mlp_bias=False, rope_theta=500000.0),
    "TinyLlama-1.1B": llama(max_position_embeddings=2048),
    "open_llama_3b": llama(pad_token_id=0, num_key_value_heads=4),
    "vicuna-7b-v1.5": llama(max_length=4096, pad_token_id=0, temperature=0.9, top_p=0.6),
    "CodeLlama-7b": llama(rope_theta=1000000, max_position_embeddings=16384),
    "Yi-1.5-6B": llama(rope_theta=5000000.0, pad_token_id=0, num_key_value_heads=4),
    "Falcon3-1B": llama(head_dim=16, mlp_bias=False, rope_theta=1000042, attention_dropout=0.0),
    "SmolLM-135M": llama(is_llama_config=True, rope_interleaved=False, tie_word_embeddings=True),
    "SmolLM2-135M": llama(
        is_llama_config=True,
        rope_interleaved=False,
        tie_word_embeddings=True,
        rope_theta=100000,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "DeepSeek-R1-Distill-Llama-8B": llama(rope_scaling=LLAMA3, rope_theta=500000.0, mlp_bias=False),
    "Hermes-3-Llama-3.1-8B": llama(rope_scaling=LLAMA3, eos_token_id=93),
    "a fine-tuned Llama": llama(**TUNED, attention_dropout=0.05, auto_map={"AutoModel": "x.Y"}),
    "Mistral-7B-v0.1": _mistral(),
    "Mistral-7B-v0.3": _mistral(sliding_window=None, rope_theta=1000000.0),
    "Mistral-Nemo": _mistral(sliding_window=None, head_dim=16, max_position_embeddings=131072),
    "zephyr-7b-beta": _mistral(pad_token_id=2, _name_or_path="HuggingFaceH4/mistral-7b-sft-beta"),
    "Qwen2-0.5B": _qwen2(tie_word_embeddings=True, max_position_embeddings=131072),
    "Qwen2.5-0.5B-Instruct": _qwen2(tie_word_embeddings=True, eos_token_id=92),
    "Qwen2.5-7B": _qwen2(use_mrope=False, max_window_layers=28, sliding_window=131072),
    "Qwen2.5-7B-Instruct-1M": _qwen2(dual_chunk_attention_config={"chunk_size": 262144}),
    "DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(bos_token_id=93, eos_token_id=94, use_mrope=False),
    "a fine-tuned Qwen2.5": _qwen2(**TUNED, pad_token_id=91, quantization_config=None),
    "Qwen3-0.6B": _qwen3(tie_word_embeddings=True, eos_token_id=92, max_window_layers=28),
    "Qwen3-8B-Base": _qwen3(max_position_embeddings=32768),
    "gpt2": _gpt2(**_GPT2_HEADS),
    "gpt2-medium": _gpt2(**_GPT2_HEADS, n_special=0, predict_special_tokens=True),
    "distilgpt2": _gpt2(
        **_GPT2_HEADS, _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}
    ),
    "a fine-tuned GPT-2": _gpt2(n_inner=None, reorder_and_upcast_attn=False, torch_dtype="float32"),
    "pythia-160m": _neox(),
    "RedPajama-INCITE-3B": _neox(rotary_pct=1.0, use_parallel_residual=False),
    "dolly-v2-3b": _neox(
        custom_pipelines={"text-generation": {"impl": "instruct_pipeline.Dolly", "pt": []}},
        hidden_dropout=0.0,
        classifier_dropout=0.1,
    ),
    "Phi-3-mini-4k-instruct": _phi3(),
    "phi-4": _phi3(
        auto_map={}, sliding_window=None, original_max_position_embeddings=16384, rope_theta=250000
    ),
    "gemma-3-1b-it": _gemma3(),
    "gemma-3-270m": _gemma3(
        _sliding_window_pattern=6,
        layer_types=[*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        use_bidirectional_attention=False,
    ),
    "OLMo-2-0425-1B": _olmo(),
    "Olmo-3 without yarn": _olmo(
        architectures=["Olmo3ForCausalLM"],
        model_type="olmo3",
        sliding_window=4096,
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
    ),
    "granite-3.3-2b-instruct": _granite(),
    "SmolLM3-3B": _smollm3(),
    "starcoder2-3b": _starcoder2(),
}
"""Files of models that a run may begin with."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DeepSeek-Coder-1.3B": (llama(rope_scaling={"type": "linear", "factor": 4.0}), "linear"),
    "Yarn-Llama-2": (llama(rope_scaling={"type": "yarn", "factor": 16.0}), "yarn"),
    "Qwen2.5 for long texts": (_qwen2(rope_scaling=_YARN), "yarn"),
    "Olmo-3-7B": (_olmo(model_type="olmo3", rope_scaling=_YARN), "yarn"),
    "Phi-3-mini-128k": (
        _phi3(
            rope_scaling={"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
            max_position_embeddings=131072,
        ),
        "longrope",
    ),
    "gpt-neox-20b": (_neox(hidden_act="gelu_fast"), "hidden_act"),
    "Mixtral-8x7B": (_mistral(model_type="mixtral", num_local_experts=8), "mixtral"),
    "Qwen3-30B-A3B": (_qwen3(model_type="qwen3_moe", num_experts=128), "mixtures of experts"),
    "a Llama with experts": (llama(num_experts=8), "mixtures of experts"),
    "gemma-2-2b": (_gemma3(model_type="gemma2"), "gemma2"),
    "Llama-2-7B-AWQ": (llama(quantization_config={"quant_method": "awq"}), "quantized"),
    "Qwen2.5-VL": (_qwen2(model_type="qwen2_5_vl", vision_config={}), "qwen2_5_vl"),
}
"""Files that are refused, and what the reason names."""
