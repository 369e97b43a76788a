import math
import re
from types import SimpleNamespace

import pytest

from recipes.training import guards
from recipes.training.settings import GuardSettings


def stall(rank, at="train_step (step.py:80)", collective=None):
    return {"rank": rank, "host": f"host_{rank}", "step": 4, "at": at, "collective": collective}


@pytest.mark.parametrize(
    ("stalls", "told"),
    [
        (
            {0: stall(0, collective="all_reduce"), 1: stall(1, "read (files.py:3)"), 2: stall(2, collective="barrier")},
            "rank 1 on host_1 is suspected: it is in read (files.py:3), while rank 0 waits in all_reduce",
        ),
        (
            {0: stall(0, collective="all_reduce"), 1: None},
            "rank 1 is suspected: it reports nothing, while rank 0 waits in all_reduce",
        ),
        (
            {0: stall(0, collective="all_reduce"), 1: stall(1, collective="barrier")},
            "no rank stands out; rank 0 is in train_step (step.py:80), while rank 0 waits in all_reduce",
        ),
        ({0: None, 1: stall(1), 2: stall(2)}, "rank 0 is suspected: it reports nothing"),
        ({0: stall(0), 1: stall(1)}, "no rank stands out; rank 0 is in train_step (step.py:80)"),
    ],
)
def test_the_suspected_rank(stalls, told):
    assert guards.suspect(stalls) == told


@pytest.mark.parametrize(
    ("hashes", "named"),
    [([5, 5, 9, 5], "rank 6 on c of 4 ranks"), ([5, 9], "rank 2 on a, rank 4 on b of 2 ranks")],
)
def test_the_odd_replica_is_named(hashes, named):
    places = [(2, "a"), (4, "b"), (6, "c"), (8, "d")][: len(hashes)]
    assert f"differ after step 7: {named} that should" in guards._odd_ones(hashes, places, 7)


def result(loss, grad_norm=1.0, applied=True):
    return SimpleNamespace(loss=loss, grad_norm=grad_norm, applied=applied)


def detector(**settings):
    return guards.SpikeDetector(GuardSettings(**{"spike": "warn", "spike_window": 5, **settings}))


def test_a_spike_is_far_above_the_last_steps():
    spikes = detector()
    assert spikes.see(1, result(1000.0)) is None  # nothing to compare with
    for step, loss in enumerate([4.0, 4.1, 3.9, 4.2, 3.8], 2):
        assert spikes.see(step, result(loss)) is None
    # Median 4.0, median distance 0.1: the limit is 4 + 10 * 0.1483.
    assert not spikes.leaves_out(5.48) and spikes.leaves_out(5.49)
    assert re.match(r"loss 5.49 is above 5.483 \(median of 5 steps: 4\)", spikes.see(7, result(5.49)))
    assert spikes.see(8, result(5.49)) is not None  # the spike does not count among the last steps
    assert "grad_norm 9 is above" in spikes.see(9, result(4.0, grad_norm=9.0))
    assert spikes.see(10, result(4.0, grad_norm=None)) is None


def test_steps_that_are_not_finite_are_no_spikes_and_do_not_count():
    spikes = detector()
    for step in range(5):
        assert spikes.see(step, result(2.0)) is None
    for bad in (math.nan, math.inf):
        assert spikes.see(6, result(bad, grad_norm=bad)) is None
    assert spikes.state() == {"loss": [2.0] * 5, "grad_norm": [1.0] * 5}
    assert not spikes.leaves_out(2.19) and spikes.leaves_out(2.21)  # one percent is the least deviation


def test_a_restored_detector_goes_on():
    spikes, again = detector(), detector()
    for step in range(5):
        spikes.see(step, result(2.0))
    again.restore(spikes.state())
    assert again.leaves_out(3.0) and not detector().leaves_out(3.0)
    again.restore({})
    assert not again.leaves_out(3.0)


def test_no_detector():
    off = detector(spike=None)
    for step in range(10):
        assert off.see(step, result(10.0**step)) is None
    assert off.state() == {"loss": [], "grad_norm": []}
