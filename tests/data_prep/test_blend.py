import math
import tracemalloc

import numpy as np
import pytest

from data_prep.blend import Blend
from data_prep.errors import InputError


def one_by_one(weights, count):
    """Megatron's BlendedDataset rule, a draw after another: (source, sample number within it)."""
    total = math.fsum(weights)
    weights, counts, drawn = [weight / total for weight in weights], [0] * len(weights), []
    for k in range(count):
        lags = [weight * max(k, 1) - taken for weight, taken in zip(weights, counts, strict=True)]
        chosen = lags.index(max(lags))
        drawn.append((chosen, counts[chosen]))
        counts[chosen] += 1
    return drawn


@pytest.mark.parametrize("sources", [2, 3, 10, 40])
@pytest.mark.parametrize("equal", [True, False])
def test_draws_are_those_of_the_rule_taken_one_by_one(sources, equal):
    random = np.random.RandomState(sources)
    weights = [1.0] * sources if equal else list(random.random_sample(sources) ** 3 + 1e-3)
    count = 20_000
    expected = one_by_one(weights, count)
    blend = Blend(weights, draws=9000)  # the rest is computed when it is asked for
    assert [blend.draw(k) for k in range(count)] == expected
    for draws in (0, 1, 4096, 12_345, 16_384):
        counts = np.bincount([source for source, _ in expected[:draws]], minlength=sources)
        assert Blend(weights, draws=9000).counts(draws) == counts.tolist()


def test_a_segment_that_began_on_a_wrong_guess_is_run_again(monkeypatch):
    # With no draws to forget it in, a wrong guess stays: only running the segment again makes it right.
    monkeypatch.setattr("data_prep.blend._rounded_shares", lambda weights, at: np.zeros((len(weights), len(at))))
    weights = [5, 3, 1]
    blend = Blend(weights, draws=20_000)
    assert [blend.draw(k) for k in range(20_000)] == one_by_one(weights, 20_000)


def test_memory_is_about_a_byte_a_draw():
    tracemalloc.start()
    blend = Blend([3, 2, 1], draws=2_000_000)
    blend.draw(1_999_999)
    assert tracemalloc.get_traced_memory()[0] < 2.5e6
    tracemalloc.stop()


def test_blend_keeps_every_prefix_within_one_of_its_share():
    blend = Blend([2, 1])
    drawn = [blend.draw(k)[0] for k in range(9)]
    assert drawn.count(0) == 6
    for k in range(1, 10):
        assert abs(drawn[:k].count(0) - k * 2 / 3) <= 1
    # Megatron's rule at k = 0 uses max(k, 1), so the heavier source comes first.
    assert drawn[:3] == [0, 1, 0]


@pytest.mark.parametrize("weights", [[0, 1], [-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_bad_weights(weights):
    with pytest.raises(InputError, match="is not a positive number"):
        Blend(weights)
