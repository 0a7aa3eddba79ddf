"""Muon for the hidden matrices and AdamW for everything else, with one clip over both.

Muon replaces a matrix's momentum by the nearest semi-orthogonal matrix, so that every direction moves alike.
Matrices of one shape, and stacks of expert matrices, go through Newton-Schulz as one batched product.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.config.errors import DSparkError

#: Parameters whose rows are looked up or which end in a vocabulary or a routing choice; Muon's equal step
#: in every direction is wrong for them.
_ADAM_WORDS = (
    "embed", "head", "markov", "confidence", ".gate.weight", "hc_", "q_weight", "k_weight", "weights_proj", ".ape",
)  # fmt: skip


def is_hidden_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether Muon should train this parameter: a matrix or a stack [E, out, in] inside the network."""
    return parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1 and not any(w in name for w in _ADAM_WORDS)


@dataclass(frozen=True)
class OptimizerConfig:
    """Rates are peaks; the schedule scales all of them.

    Attributes:
        muon_lr: step of a matrix, in units of its spectral norm.
        adam_lr: for vectors, gates and heads.
        embed_lr: for tables that are looked up by token.
        muon_momentum: Nesterov momentum.
        betas, eps: AdamW's.
        weight_decay: decoupled, on Muon's matrices only.
        grad_clip: bound of the gradient norm, over all parameters of a clip group.
        kind: "muon" or "adamw" (then adam_lr trains the matrices too, with weight_decay).
    """

    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    embed_lr: float = 4e-3
    muon_momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10
    weight_decay: float = 0.02
    grad_clip: float = 1.0
    kind: str = "muon"

    def __post_init__(self) -> None:
        if self.kind not in ("muon", "adamw"):
            raise DSparkError(f"optimizer {self.kind!r} is not known: choose muon or adamw")


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Push the singular values of [..., out, in] matrices towards 1 (Newton-Schulz, quintic, Jordan et al. 2024).

    The coefficients trade exactness for speed: singular values end in about [0.7, 1.2]. The products run in bf16
    on a GPU, which the iteration tolerates.
    """
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised in batches of equal shape.

    Args:
        params: matrices [out, in] or stacks [E, out, in].
        lr: step; a tall matrix's step is scaled by sqrt(out / in).
        momentum: Nesterov.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise DSparkError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[tuple(parameter.shape[-2:])].append(parameter)
            for parameters in by_shape.values():
                self._step_shape(parameters, group)

    def _step_shape(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momenta = [self._momentum(parameter) for parameter in parameters]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        looked_ahead = torch._foreach_lerp(grads, momenta, group["momentum"])
        shape = parameters[0].shape[-2:]
        counts = [parameter.numel() // shape.numel() for parameter in parameters]
        stacked = torch.cat([update.reshape(-1, *shape) for update in looked_ahead])
        updates = orthogonalise(stacked).split(counts)
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(
            parameters,
            [update.view_as(parameter) for update, parameter in zip(updates, parameters, strict=True)],
            alpha=-group["lr"] * scale,
        )

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]


class TrainOptimizer:
    """All optimizers of a run behind one step.

    Args:
        named_parameters: those that require no gradient are left out.
        config: rates.
        is_matrix: which parameters Muon trains.
        clip_group: name of the group whose norm a parameter counts towards; models that are trained side by side
            must not scale each other's gradients.

    Raises:
        DSparkError: nothing is trainable.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: OptimizerConfig,
        is_matrix: Callable[[str, torch.nn.Parameter], bool] = is_hidden_matrix,
        clip_group: Callable[[str], str] = lambda name: "",
    ) -> None:
        named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        if not named:
            raise DSparkError("no parameter requires a gradient: nothing to train")
        self.config = config
        self.parameters = [parameter for _, parameter in named]
        self._clipped: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
        for name, parameter in named:
            self._clipped[clip_group(name)].append(parameter)
        matrices = [p for name, p in named if is_matrix(name, p)]
        tables = [p for name, p in named if not is_matrix(name, p) and "embed" in name]
        rest = [p for name, p in named if not is_matrix(name, p) and "embed" not in name]
        groups = [
            {"params": tables, "lr": config.embed_lr, "weight_decay": 0.0},
            {"params": rest, "lr": config.adam_lr, "weight_decay": 0.0},
        ]
        self._optimizers: list[torch.optim.Optimizer] = []
        if config.kind == "adamw":
            groups.append({"params": matrices, "lr": config.adam_lr, "weight_decay": config.weight_decay})
        elif matrices:
            self._optimizers.append(Muon(matrices, config.muon_lr, config.muon_momentum, config.weight_decay))
        groups = [group for group in groups if group["params"]]
        if groups:
            fused = self.parameters[0].is_cuda
            self._optimizers.append(torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=fused))
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]

    def step(self, factor: float) -> float | None:
        """Clip, update with every rate scaled by factor, and clear the gradients.

        Returns:
            The largest gradient norm before the clip, or None when it is not finite and the update was skipped.
        """
        norms = [
            torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip, foreach=True)
            for parameters in self._clipped.values()
        ]
        norm = float(torch.stack(norms).max())
        finite = math.isfinite(norm)
        if finite:
            for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * factor
                optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return norm if finite else None

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of every optimizer, in order."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned for the same parameters and config."""
        if len(states) != len(self._optimizers):
            raise DSparkError("the checkpoint was made with another optimizer: resume with the same --optimizer")
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)
