import re

import pytest

from data_prep.errors import InputError
from launch.planning import chart


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 16), (3, 6)])
def test_idle_shares_are_those_of_the_papers(stages, micro_batches):
    made = chart.schedules(stages, micro_batches)
    shares = {name.partition(",")[0]: chart.idle_share(*one) for name, one in made.items()}
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert shares["GPipe"] == pytest.approx(bubble) and shares["1F1B"] == pytest.approx(bubble)
    half = (stages - 1) / 2
    assert shares["interleaved 1F1B"] == pytest.approx(half / (micro_batches + half))
    assert shares["DualPipeV"] < bubble


@pytest.mark.parametrize("name", ["gpipe", "one_forward_one_backward", "interleaved", "dual_pipe_v"])
def test_every_micro_batch_passes_every_stage_once(name):
    stages, micro_batches, pieces = 4, 8, 2 if name in ("interleaved", "dual_pipe_v") else 1
    ranks = getattr(chart, name)(stages, micro_batches)
    passes = [one for passes in ranks for one in passes]
    expected = {
        chart.Pass(forward, stage, number)
        for forward in (True, False)
        for stage in range(stages * pieces)
        for number in range(micro_batches)
    }
    assert len(passes) == len(expected) and set(passes) == expected


def test_no_pass_begins_before_what_it_needs():
    begun = chart.times(chart.one_forward_one_backward(4, 8), 1)
    begins = {one: begin for passes in begun for one, begin in passes}
    for one, begin in begins.items():
        if one.forward and one.stage:
            assert begin >= begins[chart.Pass(True, one.stage - 1, one.micro_batch)] + 1
        if not one.forward and one.stage < 3:
            assert begin >= begins[chart.Pass(False, one.stage + 1, one.micro_batch)] + 2
    for passes in begun:  # one at a time
        ordered = sorted((begin, 1 if one.forward else 2) for one, begin in passes)
        assert all(begin + length <= after for (begin, length), (after, _) in zip(ordered, ordered[1:], strict=False))


def test_schedules_that_the_micro_batches_allow():
    assert [name.partition(",")[0] for name in chart.schedules(4, 6)] == ["GPipe", "1F1B"]
    assert [name.partition(",")[0] for name in chart.schedules(4, 4)] == ["GPipe", "1F1B", "interleaved 1F1B"]


def test_boxes_are_counted_as_they_are_drawn():
    made = chart.schedules(4, 8)
    assert len(made) == 4 and sum(len(passes) for begun, _ in made.values() for passes in begun) == chart.BOXES * 4 * 8


def test_the_picture(tmp_path):
    shares = chart.draw(2, 4, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert shares["1F1B"] == pytest.approx(0.2)
    with pytest.raises(
        InputError, match=re.escape("1000 micro batches in 16 stages are 192,000 boxes, too many to see")
    ):
        chart.draw(16, 1000, tmp_path / "chart.png")
    with pytest.raises(InputError, match=re.escape("chart.txt: the picture is a .png, .svg or .pdf file")):
        chart.draw(2, 4, tmp_path / "chart.txt")
