"""Starting from a Hugging Face checkpoint (`model.init_from`): found, checked against the recipe, read by parameter."""

from __future__ import annotations

import collections
import logging
import re
from pathlib import Path

import torch

from data_prep.errors import InputError
from data_prep.files import read_json
from recipes import models

logger = logging.getLogger("recipes")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # may have more rows in the recipe than in the source
# The stacked experts of transformers, and the parts that a checkpoint holds for each expert.
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Keys of a config.json that a run may choose anew, or that the model does not read as it is built here.
FREE = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "transformers_version",
    "use_cache",
    "vocab_size",
}


class SourceWeights:
    """A checkpoint's tensors under the names that the transformers model gives them, read one at a time."""

    def __init__(self, directory: Path):
        self.directory, self._opened = directory, {}
        if (directory / INDEX).is_file():
            self.file_of = read_json(directory / INDEX)["weight_map"]
        elif (directory / WEIGHTS).is_file():
            self.file_of = dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)
        else:
            raise InputError(f"model.init_from {directory} has neither {WEIGHTS} nor {INDEX}; save it as safetensors")
        first_parts = (re.fullmatch(r"(.+\.experts)\.\d+\.gate_proj\.weight", name) for name in self.file_of)
        self._experts = collections.Counter(match[1] for match in first_parts if match)

    @classmethod
    def open(cls, settings, seq_length: int) -> SourceWeights:
        """The weights that settings.init_from names. Raises InputError when their config.json is of another model."""
        directory = source_directory(settings.init_from)
        check_config(settings, seq_length, directory)
        return cls(directory)

    def check(self, shapes: dict[str, torch.Size], model) -> list[str]:
        """Names of the parameters that have more rows than the source: a padded vocabulary.

        Args:
            shapes: of every tensor of the model.
            model: the transformers model; its class says which tensors of a checkpoint to pass over.

        Raises InputError when a tensor is missing, unexpected, or of another shape.
        """
        pieces = {name: self._pieces(name) for name in shapes}
        missing = [name for name, rows in pieces.items() if any(piece not in self.file_of for r in rows for piece in r)]
        used = {piece for rows in pieces.values() for row in rows for piece in row}
        passed_over = [r"rotary_emb\.inv_freq$", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
        if model.config.tie_word_embeddings:
            passed_over.append(r"^lm_head\.weight$")
        unexpected = [
            name
            for name in self.file_of
            if name not in used and not any(re.search(pattern, name) for pattern in passed_over)
        ]
        padded, wrong = [], []
        for name, shape in shapes.items():
            if name in missing or (stored := self._shape(name)) == tuple(shape):
                continue
            rows = shape[0] - stored[0]
            if name in VOCABULARY and stored[1:] == tuple(shape[1:]) and rows > 0:
                logger.info("%s: the last %d rows are not in model.init_from and stay as drawn", name, rows)
                padded.append(name)
            else:
                wrong.append(f"{name} {stored} instead of {tuple(shape)}")
        kinds = {"missing": missing, "unexpected": unexpected, "of another shape": wrong}
        if faults := [f"{len(names)} {kind}: {', '.join(names[:3])}" for kind, names in kinds.items() if names]:
            raise InputError(
                f"model.init_from {self.directory} does not hold this model's weights: {'; '.join(faults)}"
            )
        return padded

    @torch.no_grad()
    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy the source into `tensors`, by name. Of ZeRO-3 shards rank 0 reads the whole, one parameter at a time."""
        import deepspeed

        for name, tensor in tensors.items():
            partitioned = hasattr(tensor, "ds_id")
            with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0, enabled=partitioned):
                if not partitioned or torch.distributed.get_rank() == 0:
                    values = self._read(name)
                    tensor[: len(values)].copy_(values)

    def _pieces(self, name: str) -> list[list[str]]:
        """Names of the stored tensors that make up one of the model: itself, or those of each expert."""
        prefix, _, part = name.rpartition(".")
        if name in self.file_of or not prefix.endswith(".experts") or part not in EXPERT_PARTS:
            return [[name]]
        return [
            [f"{prefix}.{expert}.{stored}.weight" for stored in EXPERT_PARTS[part]]
            for expert in range(max(self._experts[prefix], 1))
        ]

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self.file_of:
            return self._stored_shape(name)
        rows = [[self._stored_shape(piece) for piece in row] for row in self._pieces(name)]
        odd = next((row for row in rows if row != rows[0]), rows[0])
        return (len(rows), sum(shape[0] for shape in odd), *odd[0][1:])

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self.file_of[name]).get_slice(name).get_shape())

    def _read(self, name: str) -> torch.Tensor:
        if name in self.file_of:
            return self._open(self.file_of[name]).get_tensor(name)
        rows = [[self._open(self.file_of[piece]).get_tensor(piece) for piece in row] for row in self._pieces(name)]
        return torch.stack([torch.cat(row) for row in rows])

    def _open(self, file: str):
        from safetensors import safe_open

        if file not in self._opened:
            if not (self.directory / file).is_file():
                raise InputError(f"model.init_from {self.directory} lacks {file}, which its {INDEX} names")
            self._opened[file] = safe_open(self.directory / file, "pt")
        return self._opened[file]


def source_directory(init_from: str) -> Path:
    """The directory of a checkpoint, downloaded from the Hugging Face hub where it is a name there."""
    if Path(init_from).is_dir():
        return Path(init_from)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", init_from):
        raise InputError(f"model.init_from {init_from} is neither a directory nor a hub name such as Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        wanted, others = ["*.json", "*.safetensors"], ["original/*", "consolidated*"]
        return Path(snapshot_download(init_from, allow_patterns=wanted, ignore_patterns=others))
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"model.init_from {init_from} is no directory here and can't be downloaded: {reason}"
        ) from None


def check_config(settings, seq_length: int, directory: Path) -> None:
    """Raises InputError when the source's config.json describes another model than `settings`."""
    from transformers import AutoConfig

    ours = models.family(settings.family).hf_config(settings, seq_length).to_dict()
    try:
        theirs = AutoConfig.from_pretrained(directory).to_dict()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"model.init_from {directory}: its config.json can't be read: {reason}") from None
    if ours["model_type"] != theirs["model_type"]:
        raise InputError(
            f"model.init_from {directory} is a {theirs['model_type']} model, model.family {settings.family} builds a "
            f"{ours['model_type']} one"
        )
    theirs["rope_parameters"].pop("type", None)  # older configs' name of rope_type; transformers keeps both
    # A mixture of experts without dense layers has no such width, whatever its config.json says.
    unused = {"intermediate_size"} if getattr(settings, "intermediate_size", 0) is None else set()
    differences = [
        f"{key} {theirs.get(key)!r} (recipe: {value!r})"
        for key, value in ours.items()
        if key not in FREE | unused and theirs.get(key) != value
    ]
    if differences:
        raise InputError(f"model.init_from {directory} contradicts the recipe: {', '.join(differences)}")
