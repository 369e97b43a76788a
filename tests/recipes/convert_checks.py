"""Run by test_convert.py on N ranks, once: many layouts, one after another; reads and writes json files in its folder.

A case without `resume` trains STEPS steps with a checkpoint half way; one with it resumes the checkpoint of that other case,
of another layout, and trains the second half.
"""

import json
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from data_prep.loader import collate, rank_samples
from launch.prove_ranks import fresh_deepspeed, prepared_case
from recipes.training import checkpoint, checkpoint_files, distributed, universal
from recipes.training.prepare import training_stream
from recipes.training.recipe_file import effective_yaml

FOLDER, STEPS = Path(sys.argv[1]), 4
DATA = {"files": "synthetic"}  # its fingerprint


def run_case(case: dict) -> dict:
    overrides = [f"name={case['name'].replace(' ', '_')}", *case["overrides"]]
    prepared = prepared_case(
        {"recipe": str(FOLDER / f"{case['family']}.yaml"), "overrides": overrides}, dist.get_world_size()
    )
    recipe, sizes = prepared.recipe, prepared.sizes
    if recipe.pipeline.stages is None:
        from recipes.training.engine import build_engine
        from recipes.training.step import train_step
    else:
        from recipes.training.pipeline import build_engine, train_step
    stream, progress, results = training_stream(recipe), checkpoint.Progress(), []
    with fresh_deepspeed():
        engine = build_engine(prepared)
        if "resume" in case:
            source = Path(recipe.output_dir) / case["resume"].replace(" ", "_")
            path = source / "checkpoints" / checkpoint_files.tag(STEPS // 2)
            progress = checkpoint.resume(engine, recipe, sizes, path, DATA)
        saver = checkpoint.Saver(engine, recipe, sizes, DATA, 0)
        for step in range(progress.step, STEPS):
            place = (sizes.micro_batch, sizes.accumulation, sizes.data, sizes.data_rank(dist.get_rank()))
            result = train_step(engine, collate(stream, rank_samples(step * sizes.global_batch, *place)), sizes)
            progress.advance(sizes.global_batch, result.tokens, result.applied)
            results.append([result.loss, result.grad_norm, result.lr])
            if "resume" not in case and progress.step == STEPS // 2:
                saver.save(progress)
                saver.finish()
                if dist.get_rank() == 0:
                    (recipe.run_directory / "recipe.yaml").write_text(effective_yaml(recipe))
                    (recipe.run_directory / "ds_config.json").write_text(json.dumps(prepared.ds_config))
        engine.destroy()
    return {"steps": results, "progress": vars(progress)}


def main() -> None:
    cases = json.loads(Path(sys.argv[2]).read_text())
    distributed.choose_accelerator()
    distributed.start_process_group(distributed.find_place())
    results = {}
    # In a thread: a process for each case would pay its imports again.
    universal.ProcessPoolExecutor = lambda workers, context: ThreadPoolExecutor(workers)
    for case in cases:
        try:
            results[case["name"]] = run_case(case)
        except Exception as error:
            traceback.print_exc()
            results[case["name"]] = {"error": f"{type(error).__name__}: {error}"}
        distributed.barrier()
    if dist.get_rank() == 0:
        (FOLDER / f"results_{dist.get_world_size()}.json").write_text(json.dumps(results))
    distributed.stop_process_group()


if __name__ == "__main__":
    main()
