"""Pretrain a language model cut into pipeline stages, with or without tensor parallelism inside them.

    deepspeed recipes/pretrain_pipeline.py --recipe R.yaml [--deepspeed_config C.json] pipeline.stages=4 [KEY=VALUE ...]

The same recipes, data order, metrics, checkpoints and commands as recipes/pretrain.py. The loop is in
recipes/training/loop.py; what is particular here is the engine and the step of recipes/training/pipeline.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # started by its path: import from the repository, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.training import loop


def method() -> loop.Method:
    from recipes.training.pipeline import build_engine, train_step, validate

    return loop.Method(build_engine, train_step, validate)


def main(argv: list[str] | None = None) -> int:
    return loop.run("recipes/pretrain_pipeline.py", __doc__.splitlines()[0], method, argv)


if __name__ == "__main__":
    sys.exit(main())
