"""Pretrain a language model under ZeRO 0-3, with tensor, sequence or expert parallelism where the ds_config asks for it.

    deepspeed recipes/pretrain.py --recipe recipes/demo.yaml [--deepspeed_config C.json] [KEY=VALUE ...]

Under `deepspeed`, torchrun, srun, mpirun or plain python alike; `python -m launch.run` checks everything first. The loop is
in recipes/training/loop.py; what is particular here is the engine (recipes/training/engine.py) and the step (step.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # started by its path: import from the repository, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.training import loop


def method() -> loop.Method:
    from recipes.training.engine import build_engine
    from recipes.training.step import train_step, validate

    return loop.Method(build_engine, train_step, validate)


def main(argv: list[str] | None = None) -> int:
    return loop.run("recipes/pretrain.py", __doc__.splitlines()[0], method, argv)


if __name__ == "__main__":
    sys.exit(main())
