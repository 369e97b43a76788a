"""What a ds_config must fulfil: DeepSpeed 0.19.8 ignores, misreads or gets wrong in silence what is refused here.

Unknown keys at its top level are ignored, "false" counts as true, an absent gradient_clipping means 1.0; other mistakes
show once the ranks are up. Needs no torch.
"""

from __future__ import annotations

import ctypes.util
import difflib
import importlib.util
from collections.abc import Callable

from data_prep.errors import InputError
from recipes.training.ds_config import (
    OWN_ENGINES,
    is_enabled,
    parallel_sizes,
    precision,
    selects_own_engine,
    zero_stage,
)
from recipes.training.ds_config_keys import (
    BUILT,
    ELSEWHERE,
    KNOWN_KEYS,
    NOT_OF_CHECKPOINT,
    NOT_OFFERED,
    OLD_NAMES,
    OPTIMIZER_PARAMS,
    OPTIMIZERS,
    PARAM_KINDS,
    REMOVED,
    ROUTING,
    TORCH_OPTIMIZERS,
    ZERO_OPTIMIZERS,
)
from recipes.training.ds_config_kinds import is_kind, is_number, wanted
from recipes.training.sizes import MICRO


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
    _check_section(config, "", "", refuse)
    for key, right in (("gradient_allreduce_op", "mean"), ("managed_gradient_accumulation", True)):
        if config.get(key, right) != right:
            refuse(key, f"{config[key]!r} changes the scale of the gradient, which the step sets; take it out")
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict) or "type" not in optimizer:
        refuse("optimizer", 'state one, such as {"type": "AdamW", "params": {"lr": 3e-4}}')
    if not isinstance(optimizer["type"], str):
        refuse("optimizer.type", f"{optimizer['type']!r} is no optimizer's name")
    params = optimizer.get("params", {})
    _check_value("optimizer.params", params, "section", refuse)
    if not is_number(params.get("lr")) or params["lr"] <= 0:
        refuse("optimizer.params.lr", f"state the peak learning rate as a positive number, not {params.get('lr')!r}")
    betas = params.get("betas", [0.9, 0.999])
    if not (isinstance(betas, list) and len(betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in betas)):
        refuse("optimizer.params.betas", f"{betas!r} must be two numbers from 0 to below 1")
    kind = optimizer["type"].lower()
    if kind not in [name.lower() for name in OPTIMIZERS] and optimizer["type"] not in TORCH_OPTIMIZERS:
        close = difflib.get_close_matches(optimizer["type"], [*OPTIMIZERS, *TORCH_OPTIMIZERS], n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join([*OPTIMIZERS, *TORCH_OPTIMIZERS])}"
        refuse("optimizer.type", f"{optimizer['type']!r} is no optimizer of DeepSpeed 0.19 or torch; {hint}")
    built = _built(config)
    _check_params(built, params, refuse)
    if accelerator == "cpu" and built in ("FusedLamb", "FusedLion"):
        refuse("optimizer.type", f"{optimizer['type']} runs on the CPU only as Lion under offload_optimizer; use AdamW")
    if not is_number(config.get("gradient_clipping")) or config["gradient_clipping"] < 0:
        refuse(
            "gradient_clipping",
            "state it (0 turns clipping off): an absent one means 1.0 in DeepSpeed 0.19 and meant off before",
        )

    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        refuse("zero_optimization.stage", f"{stage!r} must be 0, 1, 2 or 3")
    fp16, bf16 = (is_enabled(config, key) for key in ("fp16", "bf16"))
    if fp16 and (bf16 or is_enabled(config, "bfloat16")):
        refuse("fp16.enabled", "fp16 and bf16 are both enabled; keep one")
    if fp16 and accelerator == "cpu":
        refuse("fp16.enabled", "a CPU can't train in fp16: use bf16 or fp32")
    if stage > 0 and kind not in ZERO_OPTIMIZERS and not config.get("zero_allow_untested_optimizer"):
        refuse("optimizer.type", f"{optimizer['type']} at ZeRO stage {stage} needs zero_allow_untested_optimizer: true")
    accumulation = config.get("data_types", {}).get("grad_accum_dtype")
    if stage == 0 and accumulation not in (None, precision(config)):
        refuse(
            "data_types.grad_accum_dtype",
            f"{accumulation} does not go with weights in {precision(config)} at ZeRO stage 0; use stage 1, 2 or 3",
        )
    if zero.get("compute_grad_norm") is False and stage not in (1, 2):
        refuse("zero_optimization.compute_grad_norm", f"false needs ZeRO stage 1 or 2, not {stage}; leave it out")
    if zero.get("compute_grad_norm") is False and config["gradient_clipping"] > 0:
        refuse(
            "zero_optimization.compute_grad_norm", "false does not go with gradient_clipping; use 0, or leave it out"
        )
    if zero.get("compute_grad_norm") is False and stage == 1 and bf16 and accumulation == "fp32":
        refuse("zero_optimization.compute_grad_norm", "false does not go with stage 1 in bf16 accumulating in fp32")
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = zero.get(key, {}).get("device", "none")
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


def check_layout(recipe, config: dict, where: str, accelerator: str | None = None) -> None:
    """Raises InputError for a combination of parallel sizes, ZeRO stage and model that DeepSpeed refuses or gets wrong.

    Arguments as `check_ds_config`.
    """

    def refuse(key: str, message: str):
        raise InputError(f"{where}: {key}: {message}")

    attention, micro_batch = recipe.compute.attention, config.get(MICRO)
    if accelerator == "cpu" and attention.startswith(("flash", "flex")):
        raise InputError(f"compute.attention {attention} needs a GPU; use sdpa")
    if attention.startswith("flash") and recipe.data.document_mask != "none" and micro_batch != 1:
        refuse(
            MICRO,
            f"{micro_batch} does not go with compute.attention {attention} and data.document_mask: transformers drops the "
            "mask of several rows; use 1, or sdpa or flex_attention",
        )
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
                stated = "pipeline.tensor_parallel_size" if pipeline.stages else "tensor_parallel.autotp_size"
                refuse(stated, f"{tensor} does not divide model.{key} {value}")
        if config.get("tensor_parallel", {}).get("vocab_parallel_lm_head"):
            refuse("tensor_parallel.vocab_parallel_lm_head", "the head stays whole on each rank here; take it out")
    if sequence > 1:
        if stage == 0:
            refuse("sequence_parallel_size", f"{sequence} needs zero_optimization.stage 1, 2 or 3, not 0")
        if model.family == "deepseek_v3":
            refuse("sequence_parallel_size", f"{sequence} does not go with model.family deepseek_v3, of two head sizes")
        if getattr(model, "router_aux_loss_coef", 0):
            refuse(
                "sequence_parallel_size",
                f"{sequence} does not go with model.router_aux_loss_coef {model.router_aux_loss_coef}, whose balance loss "
                "wants whole sequences; set it to 0",
            )
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
        for key in ROUTING:
            if key in section:
                refuse(f"expert_parallel.{key}", "the recipe's model section says how tokens are routed; take it out")
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


def _check_section(values: dict, section: str, place: str, refuse: Callable) -> None:
    """Refuse unknown keys and values of another kind; `place` is the section's name in messages."""
    known = KNOWN_KEYS[section]
    for key, value in values.items():
        path, name = f"{section}.{key}".lstrip("."), f"{place}.{key}".lstrip(".")
        if key.startswith("_"):
            if section:
                refuse(
                    name,
                    "a note stands at the top level alone: in a section DeepSpeed takes it for a key; move it there",
                )
            continue
        if key not in known:
            refuse(name, _nearest(key, known))
        if section == "zero_optimization" and key in OLD_NAMES:
            refuse(name, f"is an old name; write {OLD_NAMES[key]}")
        _check_value(name, value, known[key], refuse)
        if path in KNOWN_KEYS and isinstance(value, list):
            for number, part in enumerate(value):
                _check_section(part, path, f"{name}[{number}]", refuse)
        elif path in KNOWN_KEYS and value is not None:
            _check_section(value, path, name, refuse)


def _check_value(name: str, value, kind: str, refuse: Callable) -> None:
    if is_kind(value, kind):
        return
    if isinstance(value, str) and value.lower() == "auto":
        refuse(name, f'"{value}" means something only inside the Hugging Face trainer; state the value')
    refuse(name, f"{value!r} must be {wanted(kind)}")


def _built(config: dict) -> str:
    """The class that DeepSpeed builds the optimizer from, a key of OPTIMIZER_PARAMS."""
    kind, params = config["optimizer"]["type"].lower(), config["optimizer"].get("params", {})
    if kind in ("adam", "adamw") and params.get("torch_adam"):
        return "torch.optim.AdamW" if kind == "adamw" or params.get("adam_w_mode", True) else "torch.optim.Adam"
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    return BUILT[kind][offload != "none"] if kind in BUILT else f"torch.optim.{config['optimizer']['type']}"


def _check_params(built: str, params: dict, refuse: Callable) -> None:
    known = OPTIMIZER_PARAMS[built]
    for key, value in params.items():
        name = f"optimizer.params.{key}"
        torch_s = key in OPTIMIZER_PARAMS["torch.optim.AdamW"] and not params.get("torch_adam")
        if key not in known and torch_s and "torch_adam" in known:
            refuse(name, "is torch's; state torch_adam true with it, or leave it out")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
            refuse(name, f"{built} does not take it; {hint}")
        pair = (built, key) == ("torch.optim.Adafactor", "eps")
        _check_value(name, value, "any" if pair else PARAM_KINDS.get(key, "any"), refuse)
    if params.get("amsgrad") and not built.startswith(("torch.", "mup.")):
        refuse("optimizer.params.amsgrad", f"{built} has no AMSGrad; take it out")


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return "unknown key, which DeepSpeed would ignore or refuse" + (f"; did you mean {close[0]}?" if close else "")
