"""The ds_config JSON: read as DeepSpeed reads it, overridden, and checked for what DeepSpeed gets wrong in silence.

DeepSpeed 0.19.8 ignores unknown keys at the top level, takes "false" for true, and defaults gradient_clipping to 1.0;
what is refused here never reaches a rank. Needs no torch.
"""

from __future__ import annotations

import copy
import ctypes.util
import difflib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import hjson

from data_prep.errors import InputError
from recipes.training.recipe_file import parse_value
from recipes.training.sizes import ACCUMULATION, BATCH, MICRO, Sizes

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
    "activation_checkpointing": "the recipe's compute.activation_checkpoint_interval does it; this section recomputes nothing",
}
NOT_OFFERED = (
    "pipeline",
    "hybrid_engine",
    "data_efficiency",
    "data_parallel_size",
)
OWN_ENGINES = ("checkpoint", "datastates_ckpt")  # sections that select one of DeepSpeed's checkpoint engines
NOT_OF_CHECKPOINT = {  # keys of `checkpoint` that don't go with how checkpoints are published here
    "tag_validation": "all ranks are given the same tag",
    "checkpoint_serialization": "resuming in another layout maps the files into memory, which takes torch's zip format",
    "load_universal": "resuming in another layout converts by itself (recipes/convert.py)",
    "use_node_local_storage": "a checkpoint is published in one directory that all ranks see",
    "parallel_write": "the first data-parallel rank of a pipeline stage writes its layers",
}


def load_ds_config(path: str | Path, overrides: list[str] = ()) -> dict:
    """Read the JSON (hjson, duplicate keys refused, as in DeepSpeed) and apply KEY.PATH=VALUE overrides."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"ds_config {path} does not exist; see deepspeed_config in the recipe")
    try:
        config = hjson.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or not config:
        raise InputError(f"{path}: the file holds no JSON object")
    for override in overrides:
        key, _, value = override.partition("=")
        *sections, last = key.split(".")
        target = config
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise InputError(f"override ds.{override}: {section} is a value in {path}, not a section")
        target[last] = parse_value(value)
    return config


def check_ds_config(config: dict, where: str, accelerator: str | None = None) -> None:
    """Raises InputError for the first key that DeepSpeed would ignore, misread, or refuse once the ranks are up.

    Args:
        where: the file's name, for messages.
        accelerator: "cpu", "cuda", ... where known.
    """

    def refuse(key: str, message: str):
        raise InputError(f"{where}: {key}: {message}")

    for key in config:
        if key in REMOVED:
            refuse(key, f"DeepSpeed 0.19 has removed it; {REMOVED[key]}")
        if key in ELSEWHERE:
            refuse(key, f"not here: {ELSEWHERE[key]}")
        if key in NOT_OFFERED:
            refuse(key, "recipes/pretrain.py does not offer it; take it out")
    for section, known in KNOWN_KEYS.items():
        values = config
        for part in filter(None, section.split(".")):
            values = values.get(part, {}) if isinstance(values, dict) else {}
        if section == "checkpoint.writer" and values is None:  # DeepSpeed's default engine
            continue
        if section and section.split(".")[0] in config and not isinstance(values, dict):
            refuse(section, f"must be a section, not {values!r}")
        for key in values:
            if key not in known and not key.startswith("_"):
                refuse(f"{section}.{key}".lstrip("."), _nearest(key, known))
    for key, value in _leaves(config):
        if value == "auto":
            refuse(key, '"auto" means something only inside the Hugging Face trainer; state the value')
        if isinstance(value, str) and value.lower() in ("true", "false"):
            refuse(key, f"the string {value!r} counts as true whatever it says; write {value.lower()} without quotes")

    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict) or "type" not in optimizer:
        refuse("optimizer", 'state one, such as {"type": "AdamW", "params": {"lr": 3e-4}}')
    if not isinstance(optimizer["type"], str):
        refuse("optimizer.type", f"{optimizer['type']!r} is no optimizer's name")
    params = optimizer.get("params", {})
    if not isinstance(params, dict):
        refuse("optimizer.params", f"must be a section, not {params!r}")
    if not _is_number(params.get("lr")) or params["lr"] <= 0:
        refuse("optimizer.params.lr", f"state the peak learning rate as a positive number, not {params.get('lr')!r}")
    for key in ("eps", "weight_decay", "momentum"):
        if key in params and not (_is_number(params[key]) and params[key] >= 0):
            refuse(f"optimizer.params.{key}", f"{params[key]!r} must be a number of at least 0")
    betas = params.get("betas", [0.9, 0.999])
    if not (isinstance(betas, list) and len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas)):
        refuse("optimizer.params.betas", f"{betas!r} must be two numbers from 0 to below 1")
    if str(optimizer["type"]).lower() in ("adam", "adamw"):
        for key in params:
            if key not in ADAM_PARAMS and not key.startswith("_"):
                refuse(f"optimizer.params.{key}", _nearest(key, ADAM_PARAMS))
    kind = optimizer["type"].lower()
    if kind not in [name.lower() for name in OPTIMIZERS] and optimizer["type"] not in TORCH_OPTIMIZERS:
        close = difflib.get_close_matches(optimizer["type"], [*OPTIMIZERS, *TORCH_OPTIMIZERS], n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join([*OPTIMIZERS, *TORCH_OPTIMIZERS])}"
        refuse("optimizer.type", f"{optimizer['type']!r} is no optimizer of DeepSpeed 0.19 or torch; {hint}")
    if not _is_number(config.get("gradient_clipping")) or config["gradient_clipping"] < 0:
        refuse(
            "gradient_clipping",
            "state it (0 turns clipping off): an absent one means 1.0 in DeepSpeed 0.19 and meant off before",
        )

    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        refuse("zero_optimization.stage", f"{stage!r} must be 0, 1, 2 or 3")
    fp16, bf16 = (_enabled(config, key) for key in ("fp16", "bf16"))
    if fp16 and (bf16 or _enabled(config, "bfloat16")):
        refuse("fp16.enabled", "fp16 and bf16 are both enabled; keep one")
    if fp16 and accelerator == "cpu":
        refuse("fp16.enabled", "a CPU can't train in fp16: use bf16 or fp32")
    if stage > 0 and kind not in ZERO_OPTIMIZERS and not config.get("zero_allow_untested_optimizer"):
        refuse("optimizer.type", f"{optimizer['type']} at ZeRO stage {stage} needs zero_allow_untested_optimizer: true")
    accumulation = config.get("data_types", {}).get("grad_accum_dtype")
    if accumulation not in (None, "fp32", "fp16", "bf16"):
        refuse("data_types.grad_accum_dtype", f"{accumulation!r} must be fp32, fp16 or bf16")
    if stage == 0 and accumulation not in (None, precision(config)):
        refuse(
            "data_types.grad_accum_dtype",
            f"{accumulation} does not go with weights in {precision(config)} at ZeRO stage 0; use stage 1, 2 or 3",
        )
    if zero.get("compute_grad_norm") is False and config["gradient_clipping"] > 0:
        refuse(
            "zero_optimization.compute_grad_norm", "false does not go with gradient_clipping; use 0, or leave it out"
        )
    if zero.get("compute_grad_norm") is False and stage == 1 and bf16 and accumulation == "fp32":
        refuse("zero_optimization.compute_grad_norm", "false does not go with stage 1 in bf16 accumulating in fp32")
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = zero.get(key, {}).get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            refuse(f"zero_optimization.{key}.device", f"{device!r} must be none, cpu or nvme")
        if device != "none" and stage < least:
            refuse(f"zero_optimization.{key}", f"has no effect at ZeRO stage {stage}; it needs {least} or more")
        if device == "nvme" and (stage != 3 or not zero[key].get("nvme_path")):
            refuse(
                f"zero_optimization.{key}.nvme_path",
                "offload to nvme needs ZeRO stage 3 and a path, which are not both there",
            )
    offload = zero.get("offload_optimizer", {}).get("device", "none")
    if offload != "none" and config.get("zero_force_ds_cpu_optimizer", True):
        if params.get("torch_adam"):
            refuse(
                "optimizer.params.torch_adam",
                "optimizer offload needs DeepSpeed's CPU Adam; take one of the two out, or state zero_force_ds_cpu_optimizer "
                "false to offload torch's slower one",
            )
        if kind not in ("adam", "adamw", "adagrad", "lion"):
            refuse(
                "optimizer.type", f"optimizer offload has no {optimizer['type']} on the CPU; use AdamW, Adagrad or Lion"
            )
    if "nvme" in (offload, zero.get("offload_param", {}).get("device")) and ctypes.util.find_library("aio") is None:
        refuse(
            "zero_optimization", "offload to nvme needs libaio, which is not here (Debian, Ubuntu: libaio-dev); use cpu"
        )


def parallel_sizes(config: dict, pipeline) -> dict[str, int]:
    """Ranks of each kind, as `resolve_sizes` takes them, from the JSON and the recipe's pipeline section."""
    staged, expert = pipeline.stages is not None, config.get("expert_parallel", {})
    tensor = pipeline.tensor_parallel_size if staged else config.get("tensor_parallel", {}).get("autotp_size") or 1
    return {
        "tensor": tensor,
        "pipeline": pipeline.stages if staged else 1,
        "sequence": config.get("sequence_parallel_size", 1),
        "expert": expert.get("autoep_size", 1) if expert.get("enabled") else 1,
    }


def check_layout(recipe, config: dict, where: str, accelerator: str | None = None) -> None:
    """Raises InputError for a combination of parallel sizes, ZeRO stage and model that DeepSpeed refuses or gets wrong.

    Arguments as `check_ds_config`.
    """

    def refuse(key: str, message: str):
        raise InputError(f"{where}: {key}: {message}")

    for key in ("tensor_parallel.autotp_size", "expert_parallel.autoep_size", "sequence_parallel_size"):
        *section, last = key.split(".")
        values = config.get(section[0], {}) if section else config
        value = values.get(last, 1)
        least = 0 if last == "autotp_size" else 1  # DeepSpeed's default, off
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            refuse(key, f"{value!r} must be a positive integer")
    if accelerator == "cpu" and recipe.compute.attention.startswith("flash"):
        raise InputError(f"compute.attention {recipe.compute.attention} needs a GPU; use sdpa")
    pipeline, stage, model = recipe.pipeline, zero_stage(config), recipe.model
    sizes = parallel_sizes(config, pipeline)
    tensor, sequence, expert = sizes["tensor"], sizes["sequence"], sizes["expert"]
    experts = getattr(model, "num_experts", None) or getattr(model, "n_routed_experts", None)
    if pipeline.stages is not None:
        for key in ("tensor_parallel", "expert_parallel", "sequence_parallel_size"):
            if key in config:
                mend = (
                    "the recipe's pipeline.tensor_parallel_size" if key == "tensor_parallel" else "no pipeline.stages"
                )
                refuse(key, f"does not go with pipeline.stages {pipeline.stages}; use {mend}")
        if stage > 1:
            refuse(
                "zero_optimization.stage",
                f"{stage} does not go with pipeline.stages {pipeline.stages}: a pipeline accumulates whole gradients over "
                "its micro batches, which stages 2 and 3 partition; use 0 or 1",
            )
        if recipe.loss.chunk_tokens is not None:
            refuse("pipeline.stages", "a pipeline's last stage holds all logits; take loss.chunk_tokens out")
        if precision(config) == "bf16":
            accumulation = config.get("data_types", {}).get("grad_accum_dtype")
            if stage == 0:
                refuse("zero_optimization.stage", "a pipeline in bf16 needs 1, which keeps fp32 weights and gradients")
            if accumulation != "fp32":
                refuse(
                    "data_types.grad_accum_dtype",
                    f"{accumulation!r} lets a pipeline in bf16 add up gradients in bf16; state fp32",
                )
        if getattr(model, "router_aux_loss_coef", 0):
            refuse("pipeline.stages", "a pipeline carries no balance loss; set model.router_aux_loss_coef=0")
    if tensor > 1:
        if stage == 3:
            refuse("zero_optimization.stage", f"3 does not go with tensor_parallel.autotp_size {tensor}; use 0, 1 or 2")
        if sequence > 1:
            refuse("sequence_parallel_size", f"{sequence} does not go with tensor_parallel.autotp_size {tensor}")
        if expert > 1:
            refuse(
                "expert_parallel.autoep_size",
                f"{expert} with tensor_parallel.autotp_size {tensor} is what DeepSpeed calls folding, an experiment; "
                "keep one of the two",
            )
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            value = getattr(model, key, None)
            if value is not None and value % tensor:
                refuse("tensor parallel size", f"{tensor} does not divide model.{key} {value}")
    if sequence > 1:
        if stage == 0:
            refuse("sequence_parallel_size", f"{sequence} needs ZeRO stage 1, 2 or 3")
        if expert > 1:
            refuse("sequence_parallel_size", f"{sequence} does not go with expert_parallel.autoep_size {expert}")
        if recipe.data.seq_length % sequence:
            refuse("sequence_parallel_size", f"{sequence} does not divide data.seq_length {recipe.data.seq_length}")
        if model.num_attention_heads % sequence:
            refuse(
                "sequence_parallel_size", f"{sequence} does not divide num_attention_heads {model.num_attention_heads}"
            )
        if recipe.data.document_mask != "none":
            refuse("sequence_parallel_size", "does not go with data.document_mask: DeepSpeed's Ulysses drops the mask")
        if recipe.compute.attention == "eager":
            refuse("sequence_parallel_size", "needs compute.attention sdpa, flash_attention_2, _3 or flex_attention")
    section = config.get("expert_parallel")
    if section is not None and section.get("enabled"):
        if experts is None:
            refuse("expert_parallel", f"model.family {model.family} has no experts")
        if experts % expert:
            refuse("expert_parallel.autoep_size", f"{expert} does not divide the model's {experts} experts")
        if section.get("load_balance_coeff") is not None:
            refuse("expert_parallel.load_balance_coeff", "DeepSpeed refuses it; use model.router_aux_loss_coef")
        if section.get("preset_model", model.family) != model.family:
            refuse("expert_parallel.preset_model", f"{section['preset_model']!r} is not model.family {model.family}")
        for key, off in (("zero_hpz_partition_size", 1), ("zero_quantized_gradients", False)):
            if stage == 3 and config["zero_optimization"].get(key, off) != off:
                refuse(f"zero_optimization.{key}", "does not go with expert_parallel at ZeRO stage 3; take it out")
        if accelerator == "cpu" and section.get("use_grouped_mm", True):
            refuse("expert_parallel.use_grouped_mm", "a CPU has no grouped matrix product; state false")
    elif section is not None and section.get("autoep_size", 1) > 1:
        refuse("expert_parallel.enabled", f"is not true: autoep_size {section['autoep_size']} would be ignored")
    if "checkpoint" in config:
        _check_writer(config, pipeline.stages is not None, sizes, accelerator, refuse)
    elif "datastates_ckpt" in config:
        _check_datastates(config["datastates_ckpt"], accelerator, refuse)
    if selects_own_engine(config) and recipe.checkpoint.host_memory_gib is not None:
        section = next(key for key in OWN_ENGINES if key in config)
        refuse(
            section, "its engines know no checkpoint.host_memory_gib, which the recipe states; take one of the two out"
        )


def _check_writer(config: dict, staged: bool, sizes: dict, accelerator: str | None, refuse: Callable) -> None:
    """Refuse what DeepSpeed 0.19.8's engines can't save or load again, as seen in docs/upstream.md."""
    section, stage = config["checkpoint"], zero_stage(config)
    for key, why in NOT_OF_CHECKPOINT.items():
        if key in section:
            refuse(f"checkpoint.{key}", f"not here: {why}; take it out")
    if "writer" not in section:
        refuse("checkpoint.writer", "state null for DeepSpeed's default engine, or {type, data_parallel, decoupled}")
    if "datastates_ckpt" in config:
        refuse("datastates_ckpt", "does not go with checkpoint.writer, which selects another engine; keep one")
    writer = section["writer"]
    if writer is None:
        return
    kind, unit, decoupled = writer.get("type"), writer.get("data_parallel"), writer.get("decoupled", False)
    if str(kind).lower() not in ("python", "fast"):
        refuse("checkpoint.writer.type", f"{kind!r} must be python or fast")
    if str(unit).lower() != "replica":
        refuse(
            "checkpoint.writer.data_parallel",
            f'{unit!r} must be "replica": without one DeepSpeed fails to start, and the others choose the ranks that a file is '
            "split over, which it can't load again",
        )
    for key, ranks in (("tensor_parallel.autotp_size", sizes["tensor"]), ("sequence_parallel_size", sizes["sequence"])):
        if ranks > 1 and not staged:
            refuse(
                "checkpoint.writer",
                f"does not go with {key} {ranks}: DeepSpeed asks that layout's groups for pipeline ranks and fails; state "
                "null, or take the checkpoint section out",
            )
    if not isinstance(decoupled, bool):
        refuse("checkpoint.writer.decoupled", f"{decoupled!r} must be true or false")
    if decoupled and (staged or stage in (1, 2)):
        refuse(
            "checkpoint.writer.decoupled",
            f"true does not go with {'pipeline.stages' if staged else f'zero_optimization.stage {stage}'}: DeepSpeed "
            "can't send tensors that require gradients to its writer; state false, or take the checkpoint section out",
        )
    if kind.lower() == "python":
        for key in ("io_buffer_size", "io_buffer_double", "io_multiplier"):
            if key in writer:
                refuse(f"checkpoint.writer.{key}", "has no effect with type python; take it out")
    elif accelerator == "cpu":
        refuse("checkpoint.writer.type", "fast needs an accelerator, for pinned memory; use python")
    elif stage < 3:
        refuse(
            "checkpoint.writer.type",
            f"fast does not go with zero_optimization.stage {stage}: it names its files so that DeepSpeed can't find "
            "them again; use python, or take the checkpoint section out",
        )


def _check_datastates(section: dict, accelerator: str | None, refuse: Callable) -> None:
    if section.get("enabled", True) is not True:
        refuse("datastates_ckpt.enabled", "DeepSpeed takes any such section for true; take the section out")
    if accelerator not in (None, "cuda"):
        refuse("datastates_ckpt", f"DataStates needs an NVIDIA GPU, and here is {accelerator}; take the section out")
    if importlib.util.find_spec("datastates") is None:
        refuse(
            "datastates_ckpt",
            "DataStates is not installed (https://github.com/DataStates/datastates-llm); take the section out",
        )


def selects_own_engine(config: dict) -> bool:
    """Whether one of DeepSpeed's own engines is to write checkpoints, not recipes/training/async_checkpoint.py."""
    return any(key in config for key in OWN_ENGINES)


def engine_config(config: dict, sizes: Sizes) -> dict:
    """The dict that the engine is given: the user's, with the batch keys alone rewritten.

    train_batch_size is left out: with tensor parallelism DeepSpeed counts the tensor ranks in it.
    """
    config = copy.deepcopy(config)
    config.pop(BATCH, None)
    config.pop("sequence_parallel_size", None)  # the engine learns it from the groups that Ulysses makes
    config[MICRO], config[ACCUMULATION] = sizes.micro_batch, sizes.accumulation
    return config


def zero_stage(config: dict) -> int:
    return config.get("zero_optimization", {}).get("stage", 0)


def optimizer_states(config: dict) -> int:
    """fp32 values that the optimizer keeps for a parameter, a master weight not counted."""
    states = {"lion": 1, "adagrad": 1, "muon": 1, "sgd": 0}
    return states.get(config["optimizer"]["type"].lower(), 2)


def precision(config: dict) -> str:
    """ "bf16", "fp16" or "fp32": what the weights in the forward pass are."""
    if _enabled(config, "fp16"):
        return "fp16"
    return "bf16" if _enabled(config, "bf16") or _enabled(config, "bfloat16") else "fp32"


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _enabled(config: dict, key: str) -> bool:
    return bool(config.get(key, {}).get("enabled", False))


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return "unknown key, which DeepSpeed would ignore or refuse" + (f"; did you mean {close[0]}?" if close else "")


def _no_duplicates(pairs) -> dict:
    values: dict = {}
    for key, value in pairs:
        if key in values:
            raise InputError(f"key {key!r} stands twice in one section; keep one")
        values[key] = value
    return values


def _leaves(values: dict, prefix: str = ""):
    for key, value in values.items():
        if key.startswith("_"):
            continue
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
