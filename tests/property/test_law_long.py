"""Long requests beside short ones: the bits of a row do not depend on how far another request has come.

Scores, picked rows and keys are padded to whole chunks of the longest request in a pass; a short request then reads
chunks that hold nothing for it.
"""

import pytest
import torch

from support.row_reference import keep_rows, same, write_rows
from support.schedules import poison
from support.tiny_models import NUM_VALID, tiny_model, tiny_state

MODELS = {"v41": ("v41", False, torch.float32), "v4 quantised bf16": ("v4", True, torch.bfloat16)}
LONG = 600  # 600 rows at ratio 1, 75 at ratio 8: more than one chunk of 64 in every kind of layer


def tokens_of(seed, count):
    return torch.randint(2, NUM_VALID, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("model_name", MODELS)
def test_short_and_long_requests_share_passes(model_name):
    model = tiny_model(*MODELS[model_name])
    texts = [tokens_of(1, LONG), tokens_of(2, 23), tokens_of(3, 150)]
    alone = []
    for text in texts:
        state = tiny_state(model, num_slots=1, num_pages=80)
        alone.append(write_rows(model, state, [(state.open(), text)]))

    state = tiny_state(model, num_slots=3, num_pages=120)
    requests = [state.open() for _ in texts]
    cuts = [(200, 3, 1), (263, 9, 70), (500, 10, 71), (519, 17, 77), (594, 18, 144), (LONG, 23, 150)]
    for stops in cuts:
        order = [1, 0, 2] if stops[0] % 2 else [0, 2, 1]
        starts = [requests[number].committed for number in order]
        logits, hidden = write_rows(model, state, [(requests[n], texts[n][: stops[n]]) for n in order])
        offset = 0
        for number, start in zip(order, starts, strict=True):
            count = stops[number] - start
            wanted, wanted_hidden = alone[number]
            assert same(logits[offset : offset + count], wanted[start : stops[number]])
            assert same(hidden[offset : offset + count], wanted_hidden[start : stops[number]])
            keep_rows(model, state, requests[number], hidden[offset : offset + count])
            offset += count
        poison(state)
        state.check_integrity()
