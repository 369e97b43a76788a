import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from data_prep.order_cache import OrderCache
from tests.conftest import REPOSITORY

BUILD = """
import json, sys, time
import numpy as np
from data_prep import order_cache
order_cache.KEEP_FROM = 0
def build():
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    return {"a": np.arange(10)}
arrays = order_cache.OrderCache(sys.argv[1]).arrays({"n": 1}, 10, build)
print(json.dumps(arrays["a"].tolist()))
"""


@pytest.fixture(autouse=True)
def keep_small(monkeypatch):
    monkeypatch.setattr("data_prep.order_cache.KEEP_FROM", 0)


def start(directory, sleep_s):
    command = [sys.executable, "-c", BUILD, str(directory), str(sleep_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def must_not_build():
    raise AssertionError("built again")


def test_one_process_builds_and_the_others_wait(tmp_path):
    processes = [start(tmp_path, 1) for _ in range(3)]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert [lines[-1] for lines in outputs] == [json.dumps(list(range(10)))] * 3
    assert sum("building" in lines for lines in outputs) == 1


def test_a_killed_builder_leaves_nothing_and_the_next_one_builds(tmp_path):
    process = start(tmp_path, 60)
    assert process.stdout.readline() == "building\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and not path.name.startswith(".")]
    begin = time.monotonic()
    arrays = OrderCache(tmp_path).arrays({"n": 1}, 10, lambda: {"a": np.arange(3)})
    assert arrays["a"].tolist() == [0, 1, 2] and time.monotonic() - begin < 30


def test_a_damaged_entry_is_made_again(tmp_path):
    cache = OrderCache(tmp_path)
    cache.arrays({"n": 1}, 10, lambda: {"a": np.arange(1000)})
    assert cache.arrays({"n": 1}, 10, must_not_build)["a"].sum() == 499500
    (file,) = tmp_path.glob("*/a.npy")
    file.write_bytes(file.read_bytes()[:-8])
    assert cache.arrays({"n": 1}, 10, lambda: {"a": np.arange(1000)})["a"].sum() == 499500
    assert cache.arrays({"n": 1}, 10, must_not_build)["a"].sum() == 499500


def test_a_failing_builder_is_told_and_leaves_nothing(tmp_path):
    with pytest.raises(AssertionError, match="built again"):
        OrderCache(tmp_path).arrays({"n": 1}, 10, must_not_build)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_without_a_directory_and_for_small_orders_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.order_cache.KEEP_FROM", 100)
    for cache in (OrderCache(None), OrderCache(tmp_path)):
        assert cache.arrays({"n": 1}, 10, lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
    assert not list(tmp_path.iterdir())
