"""Which of DeepSpeed's checkpoint engines saves, and loads again, under which kind of training: prints a table.

    python docs/upstream/checkpoint_engines.py [--only ENGINE]

Needs DeepSpeed and torch alone. Two ranks on this machine a case, each case a launch of its own, since a failing one can
leave the other rank waiting.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile

ENGINES = {
    "torch (default)": {},
    "python": {"type": "python", "decoupled": False, "data_parallel": "replica"},
    "python decoupled": {"type": "python", "decoupled": True, "data_parallel": "replica"},
    "fast": {"type": "fast", "decoupled": False, "data_parallel": "replica"},
    "fast decoupled": {"type": "fast", "decoupled": True, "data_parallel": "replica"},
}
KINDS = ["stage 0", "stage 1", "stage 2", "stage 3", "stage 1, bf16", "pipeline, stage 1"]
# The last two are set by the deepspeed launcher, not by torchrun; DeepSpeed's writers need them.
VARIABLES = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
LIMIT_S = 90


def case(engine_name: str, kind: str, folder: str) -> None:
    """One rank: two steps, a save, a step, a save, a load; prints how far it came."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # spares a compilation on CPUs
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    pipeline = kind.startswith("pipeline")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": int(kind.split("stage ")[1][0])},
        "bf16": {"enabled": "bf16" in kind},
        "gradient_clipping": 0.0,
    }
    if ENGINES[engine_name]:
        config["checkpoint"] = {"writer": ENGINES[engine_name]}

    def build():
        torch.manual_seed(1)
        layers = [torch.nn.Linear(16, 16) for _ in range(4)]
        model = PipelineModule(layers, num_stages=2, loss_fn=mse) if pipeline else torch.nn.Sequential(*layers)
        return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    def step(engine) -> None:
        inputs = torch.randn(2, 16, dtype=torch.bfloat16 if "bf16" in kind else torch.float32)
        if pipeline:
            engine.train_batch(iter([(inputs, inputs)]))
        else:
            engine.backward(mse(engine(inputs), inputs))
            engine.step()

    told = "start"
    try:
        engine = build()
        step(engine)
        told = "save"
        engine.save_checkpoint(folder, tag="first")
        step(engine)
        engine.save_checkpoint(folder, tag="second")
        step(engine)
        told = "latest"
        torch.distributed.barrier()
        latest = os.path.join(folder, "latest")
        assert os.path.exists(latest) and open(latest).read() == "second", "a step later `latest` does not name it"
        told = "load"
        path, _ = build().load_checkpoint(folder, tag="second")
        assert path is not None, "nothing was loaded"
        told = "ok"
        reason = ""
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    print("RESULT " + json.dumps([told, reason]), flush=True)
    for writer in multiprocessing.active_children():
        writer.kill()  # a decoupled writer outlives its rank
    os._exit(0 if told == "ok" else 1)


def mse(outputs, targets):
    import torch

    return torch.nn.functional.mse_loss(outputs.float(), targets.float())


def run(engine_name: str, kind: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", __file__]
        process = subprocess.Popen(
            [*command, "--case", engine_name, kind, folder],
            env={**VARIABLES, **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            output, _ = process.communicate()
            output += f'\nRESULT ["hang", "still running after {LIMIT_S} s"]'
    # The ranks' lines can run together.
    results = [json.JSONDecoder().raw_decode(part)[0] for part in output.split("RESULT ")[1:]]
    failed = [result for result in results if result[0] != "ok"]
    return tuple(failed[0]) if failed else ("ok", "") if len(results) == 2 else ("crash", output.strip()[-200:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(ENGINES))
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        case(*arguments.case)
    for engine_name in [arguments.only] if arguments.only else ENGINES:
        for kind in KINDS:
            told, reason = run(engine_name, kind)
            print(f"{engine_name:18} {kind:20} {told:8} {reason[:300]}", flush=True)


if __name__ == "__main__":
    main()
