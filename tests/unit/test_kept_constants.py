"""Constants that are made once serve every later pass: one that is differentiated may follow one that is not."""

import pytest
import torch

from dspark.models.build import Model
from dspark.models.decoder import PassTokens
from dspark.models.registry import parse_config
from dspark.train.sequence_view import SequenceView
from dspark.train.twins import Recorder, training_ops
from support.tiny_models import FAMILIES, WINDOW, fill_randomly, tiny_config

STREAMS = {"v41": 5, "v4": 6}  # as no other test has, so that nothing is kept yet
LENGTH = 8


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_after_inference(family):
    config = tiny_config(family)
    (config["text_config"] if family == "v41" else config)["hc_mult"] = STREAMS[family]
    model = Model(parse_config(config), training_ops(Recorder(), False))
    fill_randomly(model, 0)
    token_ids = torch.arange(2, 2 + LENGTH)
    ngrams = torch.stack([torch.cat((torch.full((back,), -1), token_ids))[:LENGTH] for back in range(3)], dim=1)

    def hidden():
        view = SequenceView(1, LENGTH, WINDOW, torch.device("cpu"), dense=True)
        return model.target(PassTokens(token_ids, ngrams), view).hidden

    with torch.inference_mode():
        before = hidden()
    weight = model.requires_grad_().target.embed.weight
    after = hidden()
    after.sum().backward()
    assert torch.equal(before, after) and weight.grad is not None and weight.grad.abs().sum() > 0
