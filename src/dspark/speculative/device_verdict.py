"""Forced acceptance where tokens are drawn: the same decisions as `ForcedAcceptance.verify`, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.draw import DrawParams
from dspark.ops.opset import ops_for
from dspark.ops.verdict import ForcedChances, Judgement
from dspark.speculative.forced import ForcedAcceptance


class DeviceVerdict:
    """Judges the drafts of verify passes whose target tokens lie on the device.

    Args:
        forced: decides in place of the comparison, or None.
        device: of the passes.
    """

    def __init__(self, forced: ForcedAcceptance | None, device: torch.device) -> None:
        self._judge = ops_for(device).judge_drafts
        self._chances: Tensor | None = None
        if forced is not None:
            self._chances = torch.tensor(forced.probabilities, dtype=torch.float64, device=device)

    def judge(
        self,
        drawn: Tensor,
        drafts: Tensor,
        row_starts: Tensor,
        verify_lens: Tensor,
        anchor_positions: Tensor,
        params: DrawParams,
    ) -> Judgement:
        """Accept leading drafts of R requests and add the target's own token after them.

        Args:
            drawn: [T] int64, the target's token at every row of the pass, see `dspark.sampling.device_rows.draw_rows`.
            drafts: [R, G] int64. row_starts, verify_lens, anchor_positions: [R] int64.
            params: of the R requests; their seeds decide under forced acceptance.
        """
        forced = None
        if self._chances is not None:
            forced = ForcedChances(self._chances, params.seeds[: drafts.shape[0]], anchor_positions + 1)
        return self._judge(drawn, drafts, row_starts, verify_lens, forced)
