"""The target as something to train: parameters with gradients, initial values, dense views, router balance."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from dspark.layers.plans import ModelPlan
from dspark.models.decoder import Decoder, PassTokens
from dspark.models.engram_tables import engram_row_counts
from dspark.models.engram_vocabulary import compressed_ids
from dspark.models.registry import parse_config
from dspark.train.embedded import VOCAB_SIZE, embedded_config, engram_settings
from dspark.train.losses import balanced_bias
from dspark.train.protocols import TargetFeatures
from dspark.train.sequence_view import SequenceView
from dspark.train.tokenizer import NOISE, TOKEN_ID
from dspark.train.twins import Recorder, training_ops

DENSE_SHARE = 0.6


class TrainingTarget(nn.Module):
    """See `TrainableTarget`."""

    def __init__(self, config: dict[str, Any], token_map: Tensor, compiled: bool) -> None:
        super().__init__()
        self.config = config
        self.plan: ModelPlan = parse_config(config)
        self.recorder = Recorder()
        self.ops = training_ops(self.recorder, compiled)
        self.model = Decoder(self.plan, self.ops, torch.bfloat16)
        self.model.token_map = token_map
        self._dense = True
        self._loads = LoadBalance(self.model)

    def hidden_rows(self, token_ids: Tensor, dense: bool) -> tuple[Tensor, Tensor]:
        """Head rows [B * S, D] and target_hidden [B * S, n * D] of windows [B, S]."""
        self.recorder.clear()
        batch, length = token_ids.shape
        view = SequenceView(batch, length, self.plan.window, token_ids.device, dense)
        ngrams = window_ngrams(token_ids, self.plan.ngrams.max_ngram) if self.plan.ngrams else None
        out = self.model(PassTokens(token_ids.flatten(), ngrams), view)
        assert out.target_hidden is not None
        return out.hidden, out.target_hidden

    def loss_rows(self, token_ids: Tensor) -> Tensor:
        """See `TrainableTarget.loss_rows`."""
        hidden, _ = self.hidden_rows(token_ids, self._dense and self.training)
        if torch.is_grad_enabled():
            self._loads.add(self.recorder.loads)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `TrainableTarget.logits`."""
        return self.ops.linear(hidden.bfloat16(), self.ops.stored(self.model.head.weight, "bf16")).float()

    def auxiliary_loss(self) -> Tensor:
        """Mean divergence of the indexers in the last forward."""
        losses = self.recorder.index_losses
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self.model.head.weight.device)

    def set_progress(self, progress: float) -> None:
        """Attend all compressed rows early in the run, and the picked ones for the rest."""
        self._dense = progress < DENSE_SHARE

    @torch.no_grad()
    def target_features(self, token_ids: Tensor) -> TargetFeatures:
        """See `TrainableTarget.target_features`; with picked rows, as at inference."""
        hidden, target_hidden = self.hidden_rows(token_ids, dense=False)
        shape = (*token_ids.shape, -1)
        return TargetFeatures(hidden.view(shape), target_hidden.view(shape))

    def balance_experts(self, rate: float) -> None:
        """See `TrainableTarget.balance_experts`."""
        self._loads.balance(rate)


class LoadBalance:
    """Loads of every router since the last balancing step, in the order in which a forward calls them."""

    def __init__(self, module: nn.Module) -> None:
        self._biases = [child.bias for name, child in module.named_modules() if name.endswith("ffn.gate")]
        self._totals: list[Tensor] = []

    def add(self, loads: list[Tensor]) -> None:
        """Add the loads of one forward."""
        self._totals = [a + b for a, b in zip(self._totals, loads, strict=True)] if self._totals else list(loads)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move each bias by `rate` towards an even load."""
        for bias, load in zip(self._biases, self._totals, strict=bool(self._totals)):
            bias.copy_(balanced_bias(bias, load, rate))
        self._totals = []


def window_ngrams(token_ids: Tensor, size: int) -> Tensor:
    """[B, S] -> [B * S, n]: each row's token and its predecessors in the window, -1 before its start."""
    columns = [token_ids]
    for back in range(1, size):
        shifted = torch.full_like(token_ids, -1)
        shifted[:, back:] = token_ids[:, :-back]
        columns.append(shifted)
    return torch.stack(columns, dim=-1).flatten(0, 1)


def new_target(tokenizer_folder: Path, device: torch.device | str, compiled: bool, seed: int = 0) -> TrainingTarget:
    """A fresh embedded-model target with initial weights, for the tokenizer in a folder."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    token_map = compressed_ids(tokenizer, VOCAB_SIZE)
    rows = engram_row_counts(engram_settings())
    config = embedded_config(TOKEN_ID[NOISE], int(token_map.max()) + 1, (rows[0], rows[1]))
    target = TrainingTarget(config, token_map, compiled)
    initialise(target.model, seed)
    return trainable(target).to(device)


def trainable(module: nn.Module) -> Any:
    """Give gradients to every parameter except the routers' selection biases, which are balanced instead."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.endswith("ffn.gate.bias"))
    return module


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Initial values, a function of the seed: matrices by fan-in, norms one, streams nearly independent."""
    generator = torch.Generator().manual_seed(seed)
    depth = sum(1 for name, _ in module.named_modules() if name.endswith(".attn"))
    for name, parameter in module.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if "norm" in name or leaf in ("q_weight", "k_weight"):
            parameter.fill_(1.0)
        elif leaf == "base":
            parameter.copy_(_mix_base(parameter.shape[0]))
        elif leaf == "scale":
            parameter.fill_(0.1)
        elif parameter.dim() == 1:
            parameter.zero_()
        else:
            parameter.normal_(0.0, _deviation(name, parameter, depth), generator=generator)


def _deviation(name: str, parameter: Tensor, depth: int) -> float:
    """Standard deviation of a matrix: smaller where it writes into the streams, so that depth does not grow them."""
    if "embed.weight" in name or "head.weight" in name:
        return 0.02 if "engram" not in name else 0.05
    scale: float = parameter.shape[-1] ** -0.5
    if name.endswith(("wo_b.weight", "w2", "w2.weight", "engram.wkv.weight")):
        scale *= (2 * max(depth, 1)) ** -0.5
    return scale


def _mix_base(size: int) -> Tensor:
    """Initial logits of a mix: streams differ a little in pre and post, and comb is nearly the identity."""
    streams = round((1 + size) ** 0.5) - 1
    spread = torch.linspace(1.0, -1.0, streams)
    return torch.cat((spread, spread, (6.0 * torch.eye(streams) - 3.0).flatten()))
