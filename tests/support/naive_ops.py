"""What the ops mean, written out row by row in double precision; slow and obvious."""

import math

import torch
from torch import Tensor

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x.double()))


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x.double(), torch.zeros_like(x, dtype=torch.float64))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.double()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight.double()


def sparse_attention(q: Tensor, sources: list[tuple[Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        keys = torch.cat([rows[index[row][index[row] >= 0]].double() for rows, index in sources])
        for head in range(q.shape[1]):
            scores = keys @ q[row, head].double() * scale
            weights = torch.cat((scores, sink[head : head + 1].double())).softmax(0)[:-1]
            out[row, head] = weights @ keys
    return out


def gate_and_up(projected: Tensor, limit: float) -> Tensor:
    gate, up = projected.double().chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * sigmoid(gate) * up


def routed_experts(
    x: Tensor, expert_ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, group: int
) -> Tensor:
    """Rows near a rounding boundary of the quantiser may differ by a step: compare with room for that."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for expert, weight in zip(expert_ids[row].tolist(), weights[row].double(), strict=True):
            inner = gate_and_up((w13[expert].double() @ x[row].double()).unsqueeze(0), limit) * weight
            out[row] += w2[expert].double() @ quantise_fp8(inner.float(), group)[0]
    return out


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    products = torch.einsum("thk,ck->thc", q.double(), keys.double()).clamp(min=0)
    return (products * weights.double().unsqueeze(-1)).sum(1)


def quantise_fp8(x: Tensor, group: int) -> Tensor:
    def one(values: Tensor) -> Tensor:
        step = torch.tensor(1.0 / 448.0, dtype=torch.float32)
        scale = _power_of_two(float(values.abs().max().clamp(min=1e-4) * step))
        return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale

    return _by_group(x, group, one)


def quantise_fp4(x: Tensor, group: int) -> Tensor:
    def one(values: Tensor) -> Tensor:
        step = torch.tensor(1.0 / 6.0, dtype=torch.float32)
        scale = _power_of_two(float(values.abs().max().clamp(min=6.0 * 2.0**-126) * step))
        return _nearest_fp4(values.double() / scale) * scale

    return _by_group(x, group, one)


def quantise_fp4_e4m3(x: Tensor, group: int) -> Tensor:
    def one(values: Tensor) -> Tensor:
        scale = (values.abs().max().clamp(min=6.0 * 2.0**-9) / 6.0).clamp(max=448.0).to(torch.float8_e4m3fn).float()
        return _nearest_fp4((values / scale).double()) * scale.double()

    return _by_group(x, group, one)


def _by_group(x: Tensor, group: int, quantise: object) -> Tensor:
    rows = [torch.cat([quantise(part) for part in row.split(group)]) for row in x.float()]
    return torch.stack(rows)


def _power_of_two(x: float) -> float:
    return 2.0 ** math.ceil(math.log2(x))


def _nearest_fp4(x: Tensor) -> Tensor:
    """Nearest code, ties to the even one; what is larger than 6 becomes 6."""
    distance = (x.abs().clamp(max=6.0).unsqueeze(-1) - _FP4).abs()
    odd = torch.arange(8) % 2
    best = (distance + odd * 1e-12).argmin(-1)
    return _FP4[best] * torch.sign(x)


def apply_rope(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """Turn the last pairs as complex numbers; angles are rounded to float32 as the model does."""
    angles = (positions.float().unsqueeze(-1) * freqs).double()
    if x.dim() == 3:
        angles = angles.unsqueeze(1)
    tail = x[..., -2 * freqs.shape[0] :].double()
    turned = torch.view_as_complex(tail.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((x[..., : -2 * freqs.shape[0]].double(), torch.view_as_real(turned).flatten(-2)), dim=-1)


def mix_streams(
    logits: Tensor, scale: Tensor, base: Tensor, size: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits, scale, base = logits.double(), scale.double(), base.double()
    pre = sigmoid(logits[:, :size] * scale[0] + base[:size]) + eps
    post = 2 * sigmoid(logits[:, size : 2 * size] * scale[1] + base[size : 2 * size])
    comb = (logits[:, 2 * size :] * scale[2] + base[2 * size :]).unflatten(-1, (size, size)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.einsum("tsd,ts->td", streams.double(), pre.double())


def expand_streams(output: Tensor, streams: Tensor, mix: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    _, post, comb = mix
    carried = torch.einsum("tij,tid->tjd", comb.double(), streams.double())
    return torch.einsum("tj,td->tjd", post.double(), output.double()) + carried


def engram_gate(streams: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, key = streams.double(), key.double()
    cosine = (wide * weight.double() * key).sum(-1) * streams.shape[-1] ** -0.5
    cosine = cosine / (wide.square().mean(-1) + eps).sqrt() / (key.square().mean(-1) + eps).sqrt()
    return sigmoid(torch.sign(cosine) * cosine.abs().clamp(min=1e-6).sqrt())


def best_columns(scores: Tensor, count: int) -> Tensor:
    """Columns of the largest scores, best first; among equals the lower column."""
    rows = [sorted(range(scores.shape[1]), key=lambda c, row=row: (-row[c], c))[:count] for row in scores.tolist()]
    return torch.tensor(rows)


def pick_rows(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    rows = []
    for row, seen in zip(scores, visible.tolist(), strict=True):
        picks = sorted(best_columns(row[None, :seen], count)[0].long().tolist())
        rows.append(picks + [-1] * (count - len(picks)))
    return torch.tensor(rows)


def candidate_rows(scores: Tensor, visible: Tensor, block_size: int, num_blocks: int) -> Tensor:
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    for row, seen in enumerate(visible.tolist()):
        starts = list(range(0, seen, block_size))
        worth = {start: max(scores[row, start : min(start + block_size, seen)].tolist()) for start in starts}
        newest = starts[-1:]
        others = sorted(starts[:-1], key=lambda start: (-worth[start], start))[: num_blocks - 1]
        for start in newest + others:
            kept[row, start : min(start + block_size, seen)] = True
    return kept


def route(logits: Tensor, bias: Tensor, count: int, eps: float, scaling: float) -> tuple[Tensor, Tensor]:
    scores = softplus(logits).sqrt()
    ids = best_columns(scores + bias.double(), count)
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + eps) * scaling


def hash_ngrams(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    rows = []
    for ngram in ngrams.tolist():
        columns, hashed = [], ngram[0] * int(multipliers[0])
        for back in range(1, len(ngram)):
            hashed ^= ngram[back] * int(multipliers[back])
            columns += [hashed % int(p) + int(o) for p, o in zip(primes[back - 1], offsets[back - 1], strict=True)]
        rows.append(columns)
    return torch.tensor(rows)
