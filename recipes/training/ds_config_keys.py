"""Names of the ds_config: the keys that DeepSpeed 0.19.8 reads, with the kind of value (ds_config_kinds.py), and those of
them that mean nothing, or harm, here."""

from __future__ import annotations

# Keys that DeepSpeed 0.19.8 reads, by section and kind; tests/recipes/test_ds_config.py tries what passes here on the
# models of the installed package. Keys beginning with "_" at the top level are notes.
_KEYS_BY_KIND: dict[str, dict[str, str]] = {
    "": {
        "flag": """
            dump_state disable_python_gc disable_allgather prescale_gradients zero_allow_untested_optimizer
            zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown use_data_before_expert_parallelism
            dataloader_drop_last
            """,
        "section": """
            zero_optimization activation_checkpointing comms_logger tensorboard wandb csv_monitor comet fp16 bf16 bfloat16
            torch_autocast optimizer scheduler flops_profiler autotuning hybrid_engine pipeline data_efficiency checkpoint
            data_types aio datastates_ckpt weight_quantization compile timers tensor_parallel expert_parallel
            """,
        "any": """
            managed_gradient_accumulation gradient_allreduce_op gradient_clipping data_parallel_size
            """,
        "fp32|fp16|bf16?": "communication_data_type seq_parallel_communication_data_type",
        "debug|info|warning|error|critical?": "log_level",
        "positive": """
            train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps sequence_parallel_size
            """,
        "positive?": "vocabulary_size",
        "bucket?": "steps_per_print",
        "factor": "gradient_predivide_factor",
    },
    "optimizer": {"any": "type params", "flag": "legacy_fusion"},
    "zero_optimization": {
        "flag": """
            allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients elastic_checkpoint
            enable_sanity_checks gather_16bit_weights_on_model_save ignore_unused_parameters legacy_stage1
            load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear override_module_apply
            parameter_alignment pipeline_loading_checkpoint reduce_scatter round_robin_gradients
            save_muon_momentum_buffer_in_memory stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
            stage3_gather_fp16_weights_on_model_save stage3_use_all_reduce_for_fetch_params
            use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zero_quantized_gradients
            zero_quantized_nontrainable_weights zero_quantized_weights
            """,
        "flag?": "overlap_comm",
        "any": "stage cpu_offload cpu_offload_param cpu_offload_use_pin_memory",
        "bucket": "reduce_bucket_size",
        "elements": """
            allgather_bucket_size max_live_parameters max_reuse_distance model_persistence_threshold
            module_granularity_threshold param_persistence_threshold prefetch_bucket_size stage3_max_live_parameters
            stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
            stage3_param_persistence_threshold stage3_prefetch_bucket_size sub_group_size zero_hpz_partition_size
            """,
        "section": "offload_optimizer offload_param leaf_module zenflow",
    },
    "zero_optimization.offload_optimizer": {
        "none|cpu|nvme": "device",
        "flag": "fast_init pin_memory pipeline_read pipeline_write super_offload",
        "elements": "buffer_count",
        "share": "cpuadam_cores_perc ratio",
        "text?": "nvme_path",
    },
    "zero_optimization.offload_param": {
        "none|cpu|nvme": "device",
        "flag": "pin_memory",
        "elements": "buffer_count buffer_size max_in_cpu",
        "text?": "nvme_path",
    },
    "zero_optimization.leaf_module": {"some": "classes names name_suffixes"},
    "zero_optimization.zenflow": {
        "part": "topk_ratio",
        "auto|step|epoch": "select_strategy",
        "interval": "select_interval update_interval",
        "flag": "overlap_step offload",
        "share": "auto_ratio pt_reserved_cores_perc",
        "count": "full_warm_up_rounds",
        "never": "steps_per_epoch",
    },
    "bf16": {
        "flag": """
            bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update
            """
    },
    "fp16": {
        "flag": "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads",
        "number": "loss_scale",
        "count": "hysteresis initial_scale_power min_loss_scale",
        "positive": "loss_scale_window",
    },
    "data_types": {"fp32|fp16|bf16?": "grad_accum_dtype param_dtype buffer_dtype", "patterns": "keep_in_fp32_modules"},
    "comms_logger": {"flag": "enabled prof_all verbose debug", "names": "prof_ops"},
    "csv_monitor": {"flag": "enabled", "text": "output_path job_name"},
    "wandb": {"flag": "enabled", "text": "project", "text?": "group team"},
    "comet": {
        "flag": "enabled",
        "flag?": "online",
        "positive": "samples_log_interval",
        "text?": "project workspace api_key experiment_name experiment_key mode",
    },
    "timers": {"section": "throughput"},
    "timers.throughput": {"flag": "enabled synchronized"},
    "aio": {"positive": "block_size queue_depth intra_op_parallelism", "flag": "single_submit overlap_events use_gds"},
    "flops_profiler": {
        "flag": "enabled detailed",
        "number": "recompute_fwd_factor",
        "positive": "profile_step top_modules",
        "integer": "module_depth",
        "text?": "output_file",
    },
    "tensor_parallel": {
        "count": "autotp_size",
        "flag": "keep_module_on_host kernel_inject replace_with_kernel_inject tp_overlap_comm",
        "flag?": "vocab_parallel_lm_head",
        "torch|liger": "vocab_parallel_ce_backend",
        "llama|bloom|chatglm|mixtral|deepseek_v2|qwen2|phi3?": "preset_model",
        "section": "partition_config tensor_parallel tp",
        "never": "dtype injection_policy_tuple",
    },
    "tensor_parallel.tp": {"positive": "tp_size tp_grain_size", "never": "mpu tp_group"},
    "tensor_parallel.partition_config": {
        "positive": "tp_size",
        "count": "embedding_partition_dim",
        "names": "lm_head_patterns",
        "flag": "use_default_specs strict_mode",
        "sections": "layer_specs",
    },
    "tensor_parallel.partition_config.layer_specs": {
        "names": "patterns",
        "column|row|skip": "partition_type",
        "any": "shape",
        "count": "partition_dim",
        "names?": "model_types",
        "flag": "gather_output grad_allreduce",
    },
    "expert_parallel": {
        "flag": "async_split_plan disable_triton_grouped_mm enabled use_grouped_mm validate_folding_routing",
        "flag?": "has_shared_experts route_norm",
        "positive": "autoep_size comm_num_sm expert_tensor_parallel_size",
        "count": "comm_max_tokens_per_rank comm_qp_margin",
        "auto|weighted_sum|fused_weighted_sum|legacy_bmm": "combine_impl",
        "auto|eager|fused": "row_weighting_impl",
        "separate|fused": "gate_up_impl",
        "comm|deepep": "comm_backend",
        "auto|pre|post": "score_apply",
        "auto|softmax|sigmoid": "score_func",
        "text?": """
            expert_activation expert_pattern expert_w1 expert_w2 expert_w3 moe_layer_pattern num_experts_attr preset_model
            router_pattern shared_experts_gate_pattern shared_experts_pattern top_k_attr
            """,
        "any": "load_balance_coeff num_expert_groups num_limited_groups route_scale routed_scaling_factor top_k",
    },
    "checkpoint": {
        "section?": "writer",
        "any": "tag_validation checkpoint_serialization load_universal use_node_local_storage parallel_write",
    },
    "checkpoint.writer": {
        "any": "type data_parallel",
        "flag": "decoupled io_buffer_double show_statistics",
        "bucket": "io_buffer_size",
        "positive": "io_multiplier",
    },
    "datastates_ckpt": {"any": "enabled host_cache_size parser_threads"},  # what DataStates documents
}
KNOWN_KEYS: dict[str, dict[str, str]] = {
    section: {key: kind for kind, keys in kinds.items() for key in keys.split()}
    for section, kinds in _KEYS_BY_KIND.items()
}
KNOWN_KEYS["bfloat16"] = KNOWN_KEYS["bf16"]
KNOWN_KEYS["tensor_parallel.tensor_parallel"] = KNOWN_KEYS["tensor_parallel.tp"]

OPTIMIZERS = "Adam AdamW Adagrad Lamb Lion MuAdam MuAdamW MuSGD Muon".split()  # DeepSpeed's, in any case
TORCH_OPTIMIZERS = (
    "Adadelta Adafactor Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)  # of torch.optim, in this case
ZERO_OPTIMIZERS = "adam adamw adagrad lion muon".split()  # that ZeRO takes without zero_allow_untested_optimizer
# The class that DeepSpeed builds for a type: on the device, and under optimizer offload. Adam's is chosen in the rules.
BUILT = {
    "adam": ("FusedAdam", "DeepSpeedCPUAdam"),
    "adamw": ("FusedAdam", "DeepSpeedCPUAdam"),
    "adagrad": ("torch.optim.Adagrad", "DeepSpeedCPUAdagrad"),
    "lamb": ("FusedLamb", "FusedLamb"),
    "lion": ("FusedLion", "DeepSpeedCPULion"),
    "muon": ("MuonWithAuxAdam", "MuonWithAuxAdam"),
    "muadam": ("mup.MuAdam", "mup.MuAdam"),
    "muadamw": ("mup.MuAdamW", "mup.MuAdamW"),
    "musgd": ("mup.MuSGD", "mup.MuSGD"),
}
_ADAM = "lr betas eps weight_decay"
_TORCH = "foreach maximize capturable differentiable"
_TORCH_ADAM = f"{_ADAM} amsgrad fused {_TORCH}"
_TORCH_SGD = "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused"
# What optimizer.params may state, by the class that is built; the first three and Muon with what DeepSpeed itself reads.
_READ = "torch_adam adam_w_mode fp32_optimizer_states"
OPTIMIZER_PARAMS: dict[str, list[str]] = {
    built: names.split()
    for built, names in {
        "FusedAdam": f"{_ADAM} bias_correction amsgrad set_grad_none {_READ}",
        "DeepSpeedCPUAdam": f"{_ADAM} bias_correction amsgrad {_READ}",
        "torch.optim.AdamW": f"{_TORCH_ADAM} {_READ}",
        "torch.optim.Adam": f"{_TORCH_ADAM} decoupled_weight_decay {_READ}",
        "MuonWithAuxAdam": f"{_ADAM} momentum ns_method muon_lr adam_lr {_READ}",
        "FusedLamb": f"{_ADAM} bias_correction eps_inside_sqrt max_coeff min_coeff amsgrad",
        "FusedLion": "lr betas weight_decay set_grad_none",
        "DeepSpeedCPULion": "lr betas weight_decay fp32_optimizer_states",
        "DeepSpeedCPUAdagrad": "lr eps weight_decay amsgrad fp32_optimizer_states",
        "torch.optim.Adagrad": """
            lr lr_decay weight_decay initial_accumulator_value eps foreach maximize differentiable fused
            """,
        "torch.optim.Adadelta": f"lr rho eps weight_decay {_TORCH}",
        "torch.optim.Adafactor": "lr beta2_decay eps d weight_decay foreach maximize",
        "torch.optim.Adamax": f"{_ADAM} {_TORCH}",
        "torch.optim.ASGD": f"lr lambd alpha t0 weight_decay {_TORCH}",
        "torch.optim.NAdam": f"{_ADAM} momentum_decay decoupled_weight_decay {_TORCH}",
        "torch.optim.RAdam": f"{_ADAM} decoupled_weight_decay {_TORCH}",
        "torch.optim.RMSprop": f"lr alpha eps weight_decay momentum centered {_TORCH}",
        "torch.optim.Rprop": f"lr etas step_sizes {_TORCH}",
        "torch.optim.SGD": _TORCH_SGD,
        "mup.MuAdam": f"{_TORCH_ADAM} decoupled_weight_decay decoupled_wd",
        "mup.MuAdamW": f"{_TORCH_ADAM} decoupled_wd",
        "mup.MuSGD": f"{_TORCH_SGD} decoupled_wd",
    }.items()
}
_PARAMS_BY_KIND = {
    "flag": """
        adam_w_mode amsgrad bias_correction centered decoupled_wd decoupled_weight_decay eps_inside_sqrt
        fp32_optimizer_states nesterov set_grad_none torch_adam maximize capturable differentiable
        """,
    "flag?": "foreach fused",
    "number": """
        alpha d dampening eps initial_accumulator_value lambd lr_decay max_coeff min_coeff momentum momentum_decay rho t0
        weight_decay
        """,
    "factor": "adam_lr muon_lr",
    "gram|standard": "ns_method",
}
PARAM_KINDS = {name: kind for kind, names in _PARAMS_BY_KIND.items() for name in names.split()}

REMOVED = {
    "elasticity": "launch with fewer or more ranks; the recipe keeps global_batch_size",
    "amp": "use bf16 or fp16",
    "nebula": "use `checkpoint` in the recipe",
    "sparse_gradients": "leave it out",
    "compression_training": "leave it out",
    "quantize_training": "leave it out",
    "eigenvalue": "leave it out",
    "sparse_attention": "leave it out",
    "graph_harvesting": "leave it out",
    "curriculum_learning": "leave it out",
    "progressive_layer_drop": "leave it out",
}
ELSEWHERE = {
    "scheduler": "the learning rate schedule is the recipe's `schedule` section",
    "tensorboard": "the recipe's monitor.tensorboard writes the event files",
    "compile": "the recipe's compute.compile does it; this section compiles nothing by itself",
    "activation_checkpointing": "the recipe's compute.activation_checkpoint_interval does it; this section recomputes nothing",
}
NOT_OFFERED = (
    "pipeline",
    "hybrid_engine",
    "data_efficiency",
    "data_parallel_size",
    "torch_autocast",
    "autotuning",
    "weight_quantization",
)
OLD_NAMES = {  # keys of `zero_optimization` that DeepSpeed turns into others, which is what is read here
    "cpu_offload": 'offload_optimizer: {"device": "cpu"}',
    "cpu_offload_param": 'offload_param: {"device": "cpu"}',
    "cpu_offload_use_pin_memory": "pin_memory in offload_optimizer or offload_param",
}
ROUTING = """
    top_k top_k_attr route_norm route_scale routed_scaling_factor score_func score_apply num_expert_groups
    num_limited_groups
    """.split()  # keys of `expert_parallel` that the recipe's model section decides
NOT_OF_CHECKPOINT = {  # keys of `checkpoint` that don't go with how checkpoints are published here
    "tag_validation": "all ranks are given the same tag",
    "checkpoint_serialization": "resuming in another layout maps the files into memory, which takes torch's zip format",
    "load_universal": "resuming in another layout converts by itself (recipes/convert.py)",
    "use_node_local_storage": "a checkpoint is published in one directory that all ranks see",
    "parallel_write": "the first data-parallel rank of a pipeline stage writes its layers",
}
