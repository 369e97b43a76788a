"""The recipe: the dataclasses behind the YAML, with every key, its unit and its default.

Read by recipes/training/recipe_file.py, checked by recipe_rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

REPOSITORY = Path(__file__).resolve().parents[2]
SYNTHETIC = "synthetic"
# Lengths that can be given in optimizer steps or in tokens; stating both in one file is an error.
STEPS_OR_TOKENS = [("steps", "tokens"), ("warmup_steps", "warmup_tokens"), ("decay_steps", "decay_tokens")]


@dataclass
class DataSettings:
    files: Any = MISSING  # token file, list of them, list of {path, weight}, or "synthetic"
    validation_files: Any = None  # the same; null: no validation
    tokenizer: str | None = None  # directory or name on the Hugging Face hub; copied into exports, its size checked
    seq_length: int = MISSING  # tokens a sample
    order: str = "epoch"  # epoch | megatron
    document_mask: str = "none"  # none | attention: a token sees its own document only
    max_epochs: float | None = None  # most epochs of any file; null: no bound
    phases: Any = None  # list of {from_tokens, files}: other files or weights from a given token of the run on
    cache_dir: str | None = None  # for large indices and remote files, best node-local; null: output_dir/.cache
    cache_limit_gib: float | None = None  # most that remote files may take there; null: what the disk has
    prefetch_steps: int = 2  # optimizer steps read ahead


@dataclass
class LossSettings:
    z_loss: float = 0.0  # weight of the mean of log(sum(exp(logits)))^2, added to the loss that is trained on
    chunk_tokens: int | None = None  # tokens whose logits are held at once; null: all of a micro batch


@dataclass
class ComputeSettings:
    attention: str = "sdpa"  # sdpa | flash_attention_2 | flash_attention_3 | flex_attention | eager
    activation_checkpoint_interval: int = 0  # activations of every n-th block are recomputed; 1: of all; 0: of none
    compile: bool = False  # torch.compile of each block


@dataclass
class PipelineSettings:
    stages: int | None = None  # recipes/pretrain_pipeline.py trains it; null: recipes/pretrain.py does
    tensor_parallel_size: int = 1  # ranks that share each stage's matrices
    partition: str = "parameters"  # parameters | uniform | type:CLASS_REGEX | cost (measured)


@dataclass
class ValidationSettings:
    every_steps: int | None = None  # optimizer steps; null: only before step 1 and after the last
    samples: int | None = 256  # samples a validation; null: all


@dataclass
class ScheduleSettings:
    steps: int | None = None  # length of the run in optimizer steps, or:
    tokens: int | None = None  # length of the run in tokens
    warmup_steps: int | None = None  # linear warm-up, or:
    warmup_tokens: int | None = None
    decay: str = "cosine"  # constant | cosine | linear | warmup_stable_decay
    decay_steps: int | None = None  # length of the last part of warmup_stable_decay, or:
    decay_tokens: int | None = None
    final_ratio: float = 0.1  # last learning rate / peak learning rate


@dataclass
class CheckpointSettings:
    every_steps: int | None = None  # optimizer steps; null: only at the end and on a signal
    every_minutes: float | None = None  # and when this much time has passed since the last one
    keep_last: int | None = None  # older ones are deleted once the next is published; null: all are kept
    keep_every: int | None = None  # those of every n-th step are kept for ever
    upload: str | None = None  # URL (s3://, gs://, ...) that published ones are copied to; nothing is deleted there
    on_signal: bool = True  # one is saved before a signal (SIGTERM, SIGUSR1, SIGINT) ends the run; false: leave at once
    light_every_steps: int | None = 10  # state.json and random states: how far the run had got; null: never
    resume: str = "latest"  # latest | none | a step number
    start_from: str | None = None  # RUN@STEP: begin with the weights of another run, everything else fresh
    branch_from: str | None = None  # RUN@STEP: go on from another run's checkpoint, under this schedule and data
    asynchronous: bool = True  # training waits for a copy in host memory only, while a thread writes it
    host_memory_gib: float | None = None  # most that a rank's copy may take; null: its part of half of what is free


@dataclass
class MonitorSettings:
    log_every_steps: int = 1  # optimizer steps between lines
    tensorboard: bool = True  # event files in the run directory
    samples: bool = False  # log the sample numbers of every step to logs/samples_rank_N.jsonl
    peak_tflops: float | None = None  # of one device in the dtype used, for mfu; null: no mfu


@dataclass
class GuardSettings:
    max_skipped_in_a_row: int = 10  # optimizer steps without an update (non-finite gradients) before the run gives up
    watchdog_s: float | None = (
        1500  # seconds without the end of a step before the run ends, with all stacks; null: never
    )
    replica_check_every: int | None = None  # optimizer steps between comparisons of data-parallel ranks' parameters
    spike: str | None = None  # warn | skip_step | rollback when loss or gradient norm jumps; null: no detector
    spike_window: int = 100  # optimizer steps that a value is compared with
    spike_threshold: float = 10.0  # robust standard deviations above their median
    max_rollbacks: int = 10  # before the run gives up


@dataclass
class Recipe:
    name: str = MISSING  # the run directory is output_dir/name
    seed: int = 1234  # of initial weights, dropout and data order
    output_dir: str = "runs"
    model: Any = MISSING  # the settings class of model.family
    global_batch_size: int = MISSING  # sequences an optimizer step, whatever the number of devices
    data: DataSettings = field(default_factory=DataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    guards: GuardSettings = field(default_factory=GuardSettings)
    deepspeed_config: str = MISSING  # the ds_config JSON that goes with the recipe

    @property
    def run_directory(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def entry_script(self) -> str:
        return "recipes/pretrain.py" if self.pipeline.stages is None else "recipes/pretrain_pipeline.py"

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.data.seq_length

    def steps_of(self, name: str) -> int:
        """`steps`, `warmup` or `decay` of the schedule in optimizer steps (tokens rounded up to whole steps); 0: not set."""
        steps_key, tokens_key = next(pair for pair in STEPS_OR_TOKENS if pair[0].removesuffix("_steps") == name)
        steps, tokens = getattr(self.schedule, steps_key), getattr(self.schedule, tokens_key)
        return steps if steps is not None else -(-tokens // self.tokens_per_step) if tokens is not None else 0

    @property
    def total_steps(self) -> int:
        return self.steps_of("steps")
