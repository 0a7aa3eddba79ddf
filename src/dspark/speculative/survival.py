"""Confidence logits to survival, with sequential temperature scaling (DSpark sec. 3.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dspark.config.errors import ConfigError
from dspark.ops.elementwise import sigmoid


def compute_survival(confidence_logits: Tensor, temperatures: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Chance that drafts 1..k are all accepted: a_k = product over j <= k of sigmoid(z_j / T_j).

    Args:
        confidence_logits: [R, G], before the sigmoid.
        temperatures: [G] calibrated T_k > 0, a longer list is cut; None is all 1.
    Returns:
        [R, G] float64 on the host, non-increasing along G; a row depends on that row alone.
    Raises:
        ConfigError: fewer temperatures than draft positions, or one that is not positive.
    """
    logits = confidence_logits.detach().float()
    width = logits.shape[1]
    if temperatures is not None:
        if len(temperatures) < width or not all(t > 0 for t in temperatures):
            raise ConfigError(
                f"confidence temperatures must be {width} positive numbers, one a draft position, not "
                f"{list(temperatures)}; calibrate for this width"
            )
        logits = logits / logits.new_tensor(list(temperatures[:width]))
    confidence: NDArray[np.float64] = sigmoid(logits).cpu().numpy().astype(np.float64)
    return np.cumprod(confidence, axis=1, dtype=np.float64)
