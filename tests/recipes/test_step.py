import numpy as np
import pytest
import torch

from data_prep.loader import collate
from data_prep.samples import DataSpec, SampleStream
from recipes.models import llama
from recipes.models.build import build_model
from tests.conftest import write_tokens


def logits_of(tmp_path, first, mask):
    """Logits [6, vocabulary] of `first` (its end token 9 included) and 8 9 behind it, in one row."""
    shape = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings = llama.Settings(**shape, num_attention_heads=4, num_key_value_heads=2)
    model = build_model(settings, 8, seed=1).eval()
    # Equal documents could be told apart neither by shuffling nor by a mask: these come in the order of the file.
    prefix = write_tokens(tmp_path / "a", [[*first, 9], [8, 9, 1]])
    spec = DataSpec(((str(prefix), 1.0),), 6, "megatron", 1, 1, 16, document_mask=mask)
    batch = collate(SampleStream(spec), np.array([[0]]))
    assert batch.inputs[0, 0].tolist() == [*first, 9, 8, 9]
    arguments = {"input_ids": torch.from_numpy(batch.inputs[0])}
    if mask:
        arguments["position_ids"] = torch.from_numpy(batch.positions[0])
    return model(**arguments, use_cache=False).logits[0].detach()


@pytest.mark.parametrize("mask", [True, False])
def test_documents_see_each_other_only_without_the_mask(tmp_path, mask):
    one, other = (logits_of(tmp_path / name, first, mask) for name, first in (("x", [5, 6, 7]), ("y", [1, 2, 3])))
    assert not torch.allclose(one[:3], other[:3], atol=1e-3)
    assert torch.allclose(one[4:], other[4:], atol=1e-6) == mask
