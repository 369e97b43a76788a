"""Put on PYTHONPATH by tests: makes one rank of a real run fail, or slow down, at a step.

FAULT_RANK, FAULT_STEP and FAULT_KIND ("raise" or "kill") say where and how; SLOW_STEP_S delays every step.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import time

TARGET = "recipes.training.step"


class Patcher(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch
        return spec


def patch(module) -> None:
    train_step, steps = module.train_step, 0

    def patched(*arguments, **options):
        nonlocal steps
        steps += 1
        time.sleep(float(os.environ.get("SLOW_STEP_S", 0)))
        if os.environ["RANK"] == os.environ.get("FAULT_RANK") and steps == int(os.environ["FAULT_STEP"]):
            if os.environ["FAULT_KIND"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("injected fault")
        return train_step(*arguments, **options)

    module.train_step = patched


if "RANK" in os.environ:
    sys.meta_path.insert(0, Patcher())
