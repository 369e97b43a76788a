"""Runs that begin where another one was: `checkpoint.start_from` its weights alone, `checkpoint.branch_from` all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import xxhash

from data_prep.errors import InputError
from recipes.training import checkpoint_files, distributed
from recipes.training.prepare import Prepared
from recipes.training.recipe_file import load_recipe


def with_parent_weights(prepared: Prepared, rank: int) -> Prepared:
    """The run with the parent's weights as model.init_from: exported once, so that any layout can take them."""
    recipe = prepared.recipe
    path = verified(recipe.checkpoint.start_from)
    directory = weights_directory(recipe.run_directory, path)
    if rank == 0 and not directory.is_dir():
        from recipes.export_hf import export

        parent, _ = load_recipe(path.parents[1] / "recipe.yaml")
        export(parent, path, directory, "fp32")
    distributed.barrier()
    model = replace(recipe.model, init_from=str(directory))
    return replace(prepared, recipe=replace(recipe, model=model))


def weights_directory(run_directory: Path, parent: Path) -> Path:
    """Of the parent's exported weights: other weights, known by the checksums in the manifest, are in another directory."""
    manifest = (parent / checkpoint_files.MANIFEST).read_bytes()
    return run_directory / f"start_from_{xxhash.xxh3_64_hexdigest(manifest)}"


def verified(reference: str) -> Path:
    """The checkpoint that RUN@STEP names, its checksums verified on all ranks together. Raises InputError."""
    from recipes.training.checkpoint import damage

    path = checkpoint_files.parent_checkpoint(reference)
    if (fault := damage(path)) is not None:
        raise InputError(f"{path}: {fault}; take another step")
    return path
