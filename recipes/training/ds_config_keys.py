"""Names of the ds_config: the keys that DeepSpeed 0.19.8 reads, and those of them that mean nothing, or harm, here."""

from __future__ import annotations

# Keys that DeepSpeed 0.19.8 reads, by section; tests/recipes/test_ds_config.py compares the sections that it defines as
# models with the installed package. Keys beginning with "_" are notes.
KNOWN_KEYS: dict[str, list[str]] = {
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        managed_gradient_accumulation steps_per_print dump_state disable_python_gc disable_allgather
        communication_data_type seq_parallel_communication_data_type prescale_gradients
        gradient_predivide_factor gradient_allreduce_op zero_optimization zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer activation_checkpointing comms_logger tensorboard wandb csv_monitor
        comet gradient_clipping fp16 bf16 bfloat16 torch_autocast optimizer scheduler flops_profiler
        wall_clock_breakdown memory_breakdown autotuning use_data_before_expert_parallelism hybrid_engine
        pipeline data_efficiency checkpoint data_types aio dataloader_drop_last log_level datastates_ckpt
        weight_quantization compile timers tensor_parallel expert_parallel vocabulary_size
        sequence_parallel_size data_parallel_size
        """.split(),
    "optimizer": "type params legacy_fusion".split(),
    "zero_optimization": """
        allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm
        contiguous_gradients cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint
        enable_sanity_checks gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module
        legacy_stage1 load_from_fp32_weights log_trace_cache_warnings max_live_parameters max_reuse_distance
        memory_efficient_linear model_persistence_threshold module_granularity_threshold offload_optimizer
        offload_param overlap_comm override_module_apply param_persistence_threshold parameter_alignment
        pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size reduce_scatter
        round_robin_gradients save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
        stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
        stage3_use_all_reduce_for_fetch_params sub_group_size use_all_reduce_for_fetch_params
        use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
        zero_quantized_nontrainable_weights zero_quantized_weights
        """.split(),
    "zero_optimization.offload_optimizer": """
        buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write
        ratio super_offload
        """.split(),
    "zero_optimization.offload_param": """
        buffer_count buffer_size device max_in_cpu nvme_path pin_memory
        """.split(),
    "bf16": """
        bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled
        immediate_grad_update
        """.split(),
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules".split(),
    "torch_autocast": "enabled dtype lower_precision_safe_modules".split(),
    "comms_logger": "enabled prof_all prof_ops verbose debug".split(),
    "csv_monitor": "enabled output_path job_name".split(),
    "wandb": "enabled group team project".split(),
    "comet": """
        enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode
        """.split(),
    "compile": """
        deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation
        offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters
        sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors
        keep_all_input_tensors passes
        """.split(),
    "timers": "throughput".split(),
    "timers.throughput": "enabled synchronized".split(),
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds".split(),
    "flops_profiler": """
        enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file
        """.split(),
    "fp16": """
        auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis
        initial_scale_power loss_scale loss_scale_window min_loss_scale
        """.split(),
    "tensor_parallel": """
        autotp_size dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config preset_model
        replace_with_kernel_inject tensor_parallel tp tp_overlap_comm vocab_parallel_ce_backend
        vocab_parallel_lm_head
        """.split(),
    "expert_parallel": """
        async_split_plan autoep_size combine_impl comm_backend comm_max_tokens_per_rank comm_num_sm
        comm_qp_margin disable_triton_grouped_mm enabled expert_activation expert_pattern
        expert_tensor_parallel_size expert_w1 expert_w2 expert_w3 gate_up_impl has_shared_experts
        load_balance_coeff moe_layer_pattern num_expert_groups num_experts_attr num_limited_groups
        preset_model route_norm route_scale routed_scaling_factor router_pattern row_weighting_impl
        score_apply score_func shared_experts_gate_pattern shared_experts_pattern top_k top_k_attr
        use_grouped_mm validate_folding_routing
        """.split(),
    "activation_checkpointing": """
        partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints profile
        synchronize_checkpoint_boundary
        """.split(),
    "checkpoint": """
        writer tag_validation checkpoint_serialization load_universal use_node_local_storage parallel_write
        """.split(),
    "checkpoint.writer": """
        type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier
        """.split(),
    "datastates_ckpt": "enabled host_cache_size parser_threads".split(),  # what DataStates documents
}
KNOWN_KEYS["bfloat16"] = KNOWN_KEYS["bf16"]
ADAM_PARAMS = """
    lr betas eps weight_decay bias_correction amsgrad torch_adam adam_w_mode fp32_optimizer_states fused
    """.split()

OPTIMIZERS = "Adam AdamW Adagrad Lamb Lion MuAdam MuAdamW MuSGD Muon".split()  # DeepSpeed's, in any case
TORCH_OPTIMIZERS = (
    "Adadelta Adafactor Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)  # of torch.optim, in this case
ZERO_OPTIMIZERS = "adam adamw adagrad lion muon".split()  # that ZeRO takes without zero_allow_untested_optimizer

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
)
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
