"""Draws that never wait for a host: parameters of requests that lie on the device, and what can be drawn from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.ops.draw import DrawKind, DrawParams
from dspark.ops.opset import ops_for
from dspark.sampling.adjust import narrow_vocabulary
from dspark.sampling.rows import changes_logits, uses_ratio_test


class DeviceSampling:
    """Parameters of up to N requests in static tensors, as captured passes read them.

    Attributes:
        params: of the N slots; those that were never filled are greedy.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self.params = DrawParams(DrawParams.pack([SamplingParams()] * max_requests).words.to(device))
        self._filled = [SamplingParams()] * max_requests

    def fill(self, params: Sequence[SamplingParams]) -> DrawKind:
        """Set slots 0, 1, .. and return what draws of these requests need.

        One copy in the order of the stream, for which nobody waits, and none where the slots hold them already.
        """
        count = len(params)
        if self._filled[:count] != list(params):
            self._filled[:count] = params
            words = DrawParams.pack(params).words
            # Pinned memory is given to nobody else before its copy is done.
            words = words.pin_memory() if self.params.words.is_cuda else words
            self.params.words[:count].copy_(words, non_blocking=True)
        return max(map(DrawKind.of, params), default=DrawKind.GREEDY)


def drafts_on_device(params: SamplingParams) -> bool:
    """Whether a request's tokens follow from its logits, seed, position and filters alone."""
    return not (changes_logits(params) or params.structured is not None or uses_ratio_test(params))


def draws_on_device(params: SamplingParams) -> bool:
    """The same of a request whose rows nobody wants to know more of than their tokens."""
    return drafts_on_device(params) and params.logprobs is None and params.prompt_logprobs is None


def draw_rows(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    sampling: DeviceSampling,
    kind: DrawKind,
    num_valid_tokens: int | None = None,
) -> Tensor:
    """The tokens that `draw` gives for these rows, without a wait.

    Args:
        logits: [T, V], any float type.
        owners: [T] int64, the slot of each row's request, or -1 for padding, whose token means nothing.
        positions: [T] int64, of the token that the row draws.
        sampling: the slots.
        kind: what `fill` said; part of the shape of a captured pass.
        num_valid_tokens: real vocabulary size.
    Returns:
        [T] int64.
    """
    rows = narrow_vocabulary(logits, num_valid_tokens)
    return ops_for(logits.device).draw_rows(rows, owners, positions, sampling.params, kind)
