import math

import pytest

from recipes.training.schedule import schedule_factor


def table(total, warmup, decay, decay_steps=0, final_ratio=0.1):
    options = {"total": total, "warmup": warmup, "decay": decay, "decay_steps": decay_steps, "final_ratio": final_ratio}
    return [schedule_factor(k, **options) for k in range(total)]


def test_warm_up_starts_above_zero_and_reaches_the_peak():
    assert table(8, 4, "constant") == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_linear():
    assert table(10, 2, "linear", final_ratio=0.2) == pytest.approx([0.5, 1] + [1 - 0.1 * n for n in range(1, 9)])


def test_cosine_against_the_closed_formula():
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
    assert table(10, 2, "cosine") == pytest.approx([0.5, *expected])
    assert table(10, 2, "cosine")[-1] == pytest.approx(0.1)


def test_warmup_stable_decay():
    values = table(10, 2, "warmup_stable_decay", decay_steps=4, final_ratio=0)
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_no_warm_up_and_steps_beyond_the_end(decay):
    assert 0 < schedule_factor(0, total=5, warmup=0, decay=decay, decay_steps=0, final_ratio=0.1) <= 1
    last = 1 if decay == "constant" else 0.1
    assert schedule_factor(50, total=5, warmup=0, decay=decay, decay_steps=0, final_ratio=0.1) == pytest.approx(last)
