"""Put on PYTHONPATH by tests: makes one rank of a real run fail, or slow down, at a step.

FAULT_RANK, FAULT_STEP (from 1, of this start) and FAULT_KIND (a key of FAULTS) say where and how; with FAULT_IN=validate
FAULT_STEP counts validations. SLOW_STEP_S delays every step, SLOW_WRITE_S every file of a checkpoint.
"""

import errno
import importlib.abc
import importlib.util
import os
import signal
import sys
import time

TARGETS = ("recipes.training.step", "recipes.training.pipeline")


class Patcher(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in TARGETS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch
        return spec


def patch(module) -> None:
    module.train_step = patched(module.train_step, slow=True)
    module.validate = patched(module.validate)


def patched(function, slow: bool = False):
    calls = 0

    def call(*arguments, **options):
        nonlocal calls
        calls += 1
        if slow:
            if calls == 1 and "SLOW_WRITE_S" in os.environ:
                patch_writer(lambda: time.sleep(float(os.environ["SLOW_WRITE_S"])))
            time.sleep(float(os.environ.get("SLOW_STEP_S", 0)))
        here = function.__name__ == os.environ.get("FAULT_IN", "train_step")
        here = here and os.environ["RANK"] == os.environ.get("FAULT_RANK")
        if here and calls == int(os.environ["FAULT_STEP"]):
            FAULTS[os.environ["FAULT_KIND"]](arguments[0])
        return function(*arguments, **options)

    return call


def patch_writer(first) -> None:
    """Call `first` before a file of a checkpoint is written."""
    from recipes.training import async_checkpoint

    write_state = async_checkpoint.write_state

    def patched(path, state):
        first()
        return write_state(path, state)

    async_checkpoint.write_state = patched


def fail(_engine) -> None:
    raise RuntimeError("injected fault")


def kill(_engine=None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_engine) -> None:
    """Asked twice, as schedulers do."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


def hang(_engine) -> None:
    time.sleep(1000)


def nan(engine) -> None:
    next(engine.module.parameters()).data.flatten()[-1] = float("nan")


def flip(engine) -> None:
    """One bit of one weight; stays on this rank at ZeRO stage 0."""
    import torch

    next(engine.module.parameters()).data.view(torch.int32)[0, 0] ^= 1 << 20  # lower ones can be rounded away


def spike(_engine) -> None:
    """A loss 50 times as large, once."""
    from recipes.training import step

    forward = step.forward

    def large(*arguments):
        step.forward = forward
        return {name: value * 50 for name, value in forward(*arguments).items()}

    step.forward = large


def nan_loss(_engine) -> None:
    """From here on."""
    from recipes.training import losses

    token_loss_sum = losses.token_loss_sum
    losses.token_loss_sum = lambda *arguments: token_loss_sum(*arguments) * float("nan")


def disk_full(_engine) -> None:
    def refuse():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch_writer(refuse)


def kill_writing(_engine) -> None:
    patch_writer(kill)


FAULTS = {f.__name__: f for f in (kill, stop, hang, nan, flip, spike, nan_loss, disk_full, kill_writing)} | {
    "raise": fail
}


if "RANK" in os.environ:
    sys.meta_path.insert(0, Patcher())
