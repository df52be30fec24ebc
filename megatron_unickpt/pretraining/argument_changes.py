"""Compares the model arguments of Megatron's scripts in a checkpoint with those of the job that loads it.

There are three kinds. With another argument of ``MODEL`` the model has other tensors, or tensors of another shape, or their
rows or numbers mean something else: the load is refused, unless the user accepts the change (``--unickpt-accept-changed``). An
argument of ``FUNCTION``, or a field of ``TransformerConfig`` that is not in ``EXEMPT``, can change what the same tensors
compute, and a difference logs a warning. Any other argument may differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from unickpt.base.errors import MismatchError

MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups",
    "kv_channels", "rotary_interleaved", "add_position_embedding", "position_embedding_type", "max_position_embeddings",
    "untie_embeddings_and_output_weights", "normalization", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "apply_layernorm_1p",
    "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "mtp_num_layers", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim",
    "is_hybrid_model", "hybrid_override_pattern",
)  # fmt: skip

# Of ``MODEL``, but only a table of positions depends on them: without one they are of ``FUNCTION``.
POSITIONS = ("position_embedding_type", "max_position_embeddings")
_WITH_TABLE = ("learned_absolute", "relative")

PARALLEL = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "data_parallel_size",
    "use_distributed_optimizer", "sequence_parallel", "params_dtype",
)  # fmt: skip

# Arguments that TransformerConfig lacks or has under another name.
FUNCTION = (
    "rotary_percent", "rotary_base", "norm_epsilon", "squared_relu", "apply_residual_connection_post_layernorm",
    "moe_router_topk", "layernorm_epsilon", "layernorm_zero_centered_gamma", "quick_geglu", "openai_gelu",
    "use_rotary_position_embeddings", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor",
    "rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "mrope_section", "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings",
    "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int",
    "relative_attention_num_buckets", "relative_attention_max_distance", "enable_gpt_oss", "spec", "hybrid_attention_ratio",
    "hybrid_mlp_ratio", "heterogeneous_layers_config_encoded_json",
)  # fmt: skip

# Fields of TransformerConfig that say how fast, in which precision or on which ranks the same function is computed, how a new
# model begins, or what training adds to the loss.
EXEMPT = frozenset({
    # pipeline and parallel layout
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "cp_comm_type",
    # kernels, fusion, recomputation, memory
    "attention_backend", "bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm", "memory_efficient_layer_norm",
    "bias_dropout_fusion", "apply_rope_fusion", "use_fused_weighted_squared_relu", "fused_single_qkv_rope",
    "fused_residual_rmsnorm", "distribute_saved_activations", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "recompute_modules", "clone_scatter_output_in_embedding", "disable_parameter_transpose_cache",
    "use_te_activation_func", "use_te_rng_tracker", "symmetric_ar_type", "use_mamba_mem_eff_path", "mlp_chunks_for_prefill",
    "transformer_impl", "fine_grained_activation_offloading", "offload_modules", "min_offloaded_tensor_size", "flash_decode",
    "batch_invariant_mode", "moe_grouped_gemm", "moe_use_legacy_grouped_gemm", "moe_permute_fusion", "moe_router_fusion",
    "moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_per_layer_logging",
    "moe_layer_recompute", "moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_shared_expert_overlap",
    "moe_router_padding_for_quantization", "moe_router_padding_for_fp8", "moe_pad_experts_for_cuda_graph_inference",
    "moe_enable_routing_replay", "cache_mla_latents", "use_kitchen", "use_kitchen_attention", "kitchen_attention_backend",
    "hetereogenous_dist_checkpoint", "config_logger_dir", "test_mode", "log_max_attention_logit",
    # precision
    "fp32_residual_connection", "attention_softmax_in_fp32", "disable_bf16_reduced_precision_matmul", "moe_router_dtype",
    "activation_func_fp8_input_store", "fp8", "fp8_recipe", "fp8_param", "fp8_quantizer_factory", "fp8_margin", "fp8_interval",
    "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention",
    "tp_only_amax_red", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp4",
    "fp4_recipe", "fp4_param", "fp4_quantizer_factory", "quant_recipe",
    # CUDA graphs and inference
    "enable_cuda_graph", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps",
    "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope", "inference_rng_tracker", "inference_sampling_seed",
    "use_inference_optimized_layers", "inference_fuse_tp_communication",
    # initialisation, regularisation and further terms of the loss
    "init_method", "output_layer_init_method", "init_method_std", "embedding_init_method", "embedding_init_method_std",
    "init_model_with_meta_device", "hidden_dropout", "attention_dropout", "calculate_per_token_loss",
    "mtp_loss_scaling_factor", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_router_bias_update_rate",
    "moe_router_load_balancing_type", "moe_router_force_load_balancing", "dsa_indexer_loss_coeff",
    "dsa_indexer_use_sparse_loss", "qk_clip", "qk_clip_alpha", "qk_clip_threshold",
    # named otherwise among the arguments
    "num_moe_experts", "activation_func", "gated_linear_unit", "heterogeneous_block_specs",
})  # fmt: skip


def compare(stored: Mapping[str, Any], current: Mapping[str, Any], *, where: str, accepted: Collection[str] = ()) -> list[str]:
    """Compare the checkpoint's arguments with the job's.

    Args:
        stored: arguments of the checkpoint.
        current: arguments of this job.
        where: the checkpoint, for the error.
        accepted: names of arguments that may differ.

    Returns:
        One line per argument of the parallel shape that differs. Such differences are allowed.

    Raises:
        MismatchError: the checkpoint has another model. Lists every argument that differs.
    """
    names = [name for name in refused_arguments(stored, current) if name not in accepted]
    wrong = _differing(names, stored, current)
    if wrong:
        changed = " ".join(line.partition(":")[0] for line in wrong)
        raise MismatchError(
            f"{where} was written by another model ({len(wrong)} arguments differ): {'; '.join(wrong)}. "
            "Nothing is loaded. --use-checkpoint-args takes them from the checkpoint. If the change is intended, "
            f"--unickpt-accept-changed {changed} loads the tensors, if they have the same names and shapes."
        )
    return _differing(PARALLEL, stored, current)


def refused_arguments(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the names of the arguments that must be equal."""
    kinds = {arguments.get("position_embedding_type", _WITH_TABLE[0]) for arguments in (stored, current)}
    return [name for name in MODEL if name not in POSITIONS or kinds.intersection(_WITH_TABLE)]


def function_changes(
    stored: Mapping[str, Any], current: Mapping[str, Any], config_fields: Iterable[str], *, accepted: Collection[str] = ()
) -> list[str]:
    """Return one line per argument that differs and can change what the same tensors compute.

    Args:
        stored: arguments of the checkpoint.
        current: arguments of this job.
        config_fields: names of the fields of ``TransformerConfig`` that are the model's own, not those of its base class.
        accepted: names of arguments that may differ.
    """
    others = [name for name in config_fields if name not in EXEMPT]
    refused = refused_arguments(stored, current)
    names = [name for name in dict.fromkeys((*POSITIONS, *FUNCTION, *others)) if name not in {*refused, *accepted}]
    return _differing(names, stored, current)


def setting_changes(settings: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return one line per setting of a transformers model that this job's arguments contradict.

    Args:
        settings: settings of the checkpoint's model (``unickpt.transform.dialects.model_facts.Model.settings``).
        current: arguments of this job.
    """
    rotary = current.get("position_embedding_type") in ("rope", "yarn", "mrope")
    scaled = "scaled" if current.get("use_rope_scaling") or current.get("position_embedding_type") == "yarn" else "default"
    own = {"norm_epsilon": current.get("norm_epsilon", current.get("layernorm_epsilon"))}
    if rotary:
        own |= {name: current.get(name) for name in ("rotary_base", "rotary_percent")}
        own["rope_scaling"] = scaled
    found = []
    for name, value in settings.items():
        mine = own.get(name)
        if name == "rope_scaling" and (value == "default") == (mine == "default"):
            continue
        if mine is not None and mine != value:
            found.append(_line(name, value, mine))
    return found


def _differing(names: Iterable[str], stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    return [
        _line(name, stored[name], current[name])
        for name in names
        if name in stored
        and name in current
        and not _alike(stored[name], current[name])
        # without grouped queries Megatron sets their number when it builds the model, after this
        and not (name == "num_query_groups" and not current.get("group_query_attention"))
    ]


def _line(name: str, stored: Any, current: Any) -> str:
    return f"{name}: {stored} in the checkpoint, {current} in this job"


def _alike(stored: Any, current: Any) -> bool:
    if isinstance(stored, (list, tuple)) and isinstance(current, (list, tuple)):
        return list(stored) == list(current)
    return bool(stored == current) or (isinstance(stored, str) and stored == str(current))
