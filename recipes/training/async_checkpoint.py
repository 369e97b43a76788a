"""A CheckpointEngine for DeepSpeed: training stands still for a copy into host memory, a thread does the rest.

    save_checkpoint() -> save(state, path) for each file -> the state copied into buffers kept from save to save
    start()           -> a thread writes the files, hashing what it writes, and makes them durable

Every tensor is copied, wherever it lives, so that later steps can't change what is being written. With
`asynchronous=False` the files are written in save() itself, by the same code. DeepSpeed 0.19.8's own asynchronous
engines fail with ZeRO-1 and with pipelines (docs/upstream.md); own_engines.py lets them be chosen all the same.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
import xxhash
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from data_prep.files import naming
from recipes.training import checkpoint_files

logger = logging.getLogger("recipes")
ALIGNMENT = 64  # bytes
DICTIONARIES, SEQUENCES = (dict, OrderedDict), (list, tuple)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BackgroundEngine(CheckpointEngine):
    """A CheckpointEngine with a thread; at most one checkpoint is in its hands at a time."""

    def __init__(self):
        super().__init__()
        self.name = type(self).__name__
        self._thread = ThreadPoolExecutor(1, "checkpoint-writer", initializer=_give_way)
        self._work: Future | None = None

    def run(self, function: Callable[[], object]) -> None:
        """Do something in the thread."""
        self._work = self._thread.submit(function)

    def busy(self) -> bool:
        """Whether the thread is at work. Raises what it raised."""
        if self._work is None or not self._work.done():
            return self._work is not None
        self._work.result()
        return False

    def result(self):
        """Wait for the thread: {file name: entry of the manifest} after `start`, or what `run` was given returned."""
        return self._work.result()


class SnapshotEngine(BackgroundEngine):
    """One a rank, put into `engine.checkpoint_engine`."""

    def __init__(self, asynchronous: bool, memory_limit: int):
        """`memory_limit`: most bytes of host memory for the copies; a file beyond it is written while training waits."""
        super().__init__()
        self.asynchronous, self.memory_limit = asynchronous, memory_limit
        self._buffers: dict[str, torch.Tensor] = {}  # by file name, uint8

    # DeepSpeed's interface.

    def create(self, info: CheckpointCommitInfo) -> None:
        self._folder = Path(info.save_dir) / info.tag
        self._copies: list[tuple[str, object]] = []
        self._written: dict[str, dict] = {}

    def save(self, state_dict, path: str) -> None:
        name = Path(path).relative_to(self._folder).as_posix()
        buffer = self._buffer(name, bytes_of(state_dict)) if self.asynchronous else None
        if buffer is None:
            self._written[name] = write_state(Path(path), copy_tensors(state_dict, own_storage))
        else:
            self._copies.append((name, copy_tensors(state_dict, _Filler(buffer))))

    def load(self, path: str, map_location=None):
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        get_accelerator().synchronize()  # copies from the device are asynchronous
        return True

    def preserves_storage_sharing(self) -> bool:
        return False  # else DeepSpeed would clone what is copied here again

    # Ours.

    save_plain = save

    def start(self, others: Iterable[str] = ()) -> None:
        """Begin to write what save() has copied. `others`: names of files that are there already, to be hashed too."""
        self._work = self._thread.submit(self._write, self._folder, self._copies, self._written, list(others))
        self._copies = []

    @property
    def host_memory(self) -> int:
        """Bytes of host memory that the copies take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _buffer(self, name: str, size: int) -> torch.Tensor | None:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.nbytes >= size:
            return buffer
        self._buffers.pop(name, None)
        if self.host_memory + size > self.memory_limit:
            logger.warning(
                "%s needs %.2f GiB of host memory, beyond the %.2f GiB of checkpoint.host_memory_gib: training waits for it",
                name,
                size / 2**30,
                self.memory_limit / 2**30,
            )
            return None
        pinned = get_accelerator().device_name() != "cpu"
        self._buffers[name] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[name]

    @staticmethod
    def _write(folder: Path, copies: list, written: dict, others: list[str]) -> dict[str, dict]:
        for name, state in copies:
            written[name] = write_state(folder / name, state)
        for name in others:
            written[name] = checkpoint_files.entry_of(folder / name)
        return written


def memory_limit(gib: float | None, local_ranks: int) -> int:
    """Bytes of host memory that one rank's copies may take: as set, or half of what is free on the machine."""
    return int(gib * 2**30) if gib is not None else psutil.virtual_memory().available // 2 // local_ranks


def copy_tensors(state, copy_tensor: Callable[[torch.Tensor], torch.Tensor], known: dict | None = None):
    """`state` with every tensor replaced by `copy_tensor` of it, once for tensors that are the same memory."""
    known = {} if known is None else known
    if isinstance(state, torch.Tensor):
        key = _memory_of(state)
        if key not in known:
            known[key] = copy_tensor(state.detach())
        return known[key]
    if type(state) in DICTIONARIES:
        return type(state)({key: copy_tensors(value, copy_tensor, known) for key, value in state.items()})
    if type(state) in SEQUENCES:
        return type(state)(copy_tensors(value, copy_tensor, known) for value in state)
    return copy.deepcopy(state)


def tensors_of(state) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif type(state) in (*DICTIONARIES, *SEQUENCES):
        for value in state.values() if type(state) in DICTIONARIES else state:
            yield from tensors_of(value)


def bytes_of(state) -> int:
    """Bytes that a buffer for `state`'s tensors needs."""
    return sum({_memory_of(tensor): _aligned(tensor.nbytes) for tensor in tensors_of(state)}.values())


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without what else is in its storage, all of which torch.save would write."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class _Filler:
    """Copies tensors into a buffer, one behind the other."""

    def __init__(self, buffer: torch.Tensor):
        self._memory, self._position = buffer.numpy(), 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        # A storage of its own: torch.save writes whole storages.
        target = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._position)
        self._position += _aligned(tensor.nbytes)
        return target.view(tensor.shape).copy_(tensor, non_blocking=True)


def write_state(path: Path, state) -> dict:
    """torch.save with fsync; returns the file's entry in the manifest. Raises FloatingPointError for a NaN or infinity.

    A file that can't be written whole is removed: on a full disk, logs and state.json need its room.
    """
    check_finite(path.name, state)
    hashing = None
    try:
        with naming(path), open(path, "wb") as file:
            hashing = _HashingFile(path, file)
            torch.save(state, hashing)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and hashing.fault is not None:  # torch has met it, and hides it
            raise hashing.fault from None
        raise
    return hashing.entry()


def check_finite(name: str, state) -> None:
    """Weights that are not finite must not become the newest checkpoint."""
    masks = _buffers_of(state)
    for tensor in tensors_of(state):
        if tensor.dtype not in FLOATS or not tensor.numel():
            continue
        low, high = map(float, torch.aminmax(tensor))  # both NaN if any element is
        if not high < math.inf or low == -math.inf and id(tensor) not in masks:
            raise FloatingPointError(f"{name} holds NaN or infinity: the checkpoint is not published")


def _buffers_of(state) -> set[int]:
    """The module's buffers, by id: an attention mask among them may hold minus infinity."""
    module, names = (state.get(key) for key in ("module", "buffer_names")) if isinstance(state, dict) else (None, None)
    return {id(module[name]) for name in names or () if name in module} if isinstance(module, dict) else set()


class _HashingFile:
    def __init__(self, path: Path, file):
        self._path, self._file, self._hash, self._bytes = path, file, xxhash.xxh3_128(), 0
        self.fault: OSError | None = None

    def write(self, data) -> int:
        self._hash.update(data)
        self._bytes += len(data)
        try:
            with naming(self._path):
                return self._file.write(data)
        except OSError as error:
            self.fault = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def entry(self) -> dict:
        return {"bytes": self._bytes, "xxh3_128": self._hash.hexdigest()}


def _give_way() -> None:
    """Leave the core to training where both want it. On Linux a thread has a priority of its own."""
    if sys.platform.startswith("linux"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _memory_of(tensor: torch.Tensor) -> tuple:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
