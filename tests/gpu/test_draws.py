"""Draws at the size of a real vocabulary: launched as a graph, fused and token by token, alone and in company."""

from dataclasses import replace

import pytest
import torch

from dspark.config.sampling import SamplingParams
from dspark.ops.markov import MarkovHead
from dspark.ops.opset import ops_for
from dspark.sampling import RowSampling, draw
from dspark.sampling.device_rows import DeviceSampling, draw_rows
from support.draw_cases import PARAMS

pytestmark = pytest.mark.gpu

VOCAB, NUM_VALID, RANK = 129_280, 128_815, 256
COUNTS = (1, 3, 8, 21)


@pytest.fixture
def device():
    torch.cuda.manual_seed(0)
    return torch.device("cuda")


def requests_of(kind, count):
    params = PARAMS[kind]
    return [replace(params[number % len(params)], seed=number) for number in range(count)]


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize("kind", PARAMS)
def test_a_graph_draws_what_the_host_draws(kind, num_rows, device):
    sampling = DeviceSampling(num_rows, device)
    logits = torch.empty(num_rows, VOCAB, device=device)
    owners, positions = torch.arange(num_rows, device=device), torch.arange(num_rows, device=device) * 7
    assert sampling.fill(requests_of(kind, num_rows)) is kind
    draw_rows(logits.zero_(), owners, positions, sampling, kind, NUM_VALID)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw_rows(logits, owners, positions, sampling, kind, NUM_VALID)
    for scale in (0.5, 3.0):
        logits.normal_(0, scale)
        logits[:, NUM_VALID:] = 99.0
        params = [replace(one, seed=one.seed + int(scale)) for one in requests_of(kind, num_rows)]
        sampling.fill(params)
        graph.replay()
        rows = [RowSampling(one, 7 * number, 1) for number, one in enumerate(params)]
        assert torch.equal(tokens, draw(logits, rows, num_valid_tokens=NUM_VALID))
        alone = [draw(logits[t : t + 1], rows[t : t + 1], num_valid_tokens=NUM_VALID) for t in range(num_rows)]
        assert torch.equal(tokens, torch.cat(alone))


@pytest.mark.parametrize("num_blocks", COUNTS)
@pytest.mark.parametrize("kind", PARAMS)
def test_blocks_are_drawn_as_token_by_token(kind, num_blocks, device):
    ops = ops_for(device)
    head = MarkovHead(torch.randn(VOCAB, RANK, device=device), (torch.randn(VOCAB, RANK, device=device) / 9).bfloat16())
    base = torch.randn(num_blocks, 5, VOCAB, device=device)[:, :, :NUM_VALID] * 3
    anchors = torch.randint(0, NUM_VALID, (num_blocks,), device=device)
    positions = torch.randint(0, 9000, (num_blocks,), device=device)
    sampling, params = DeviceSampling(num_blocks, device), requests_of(kind, num_blocks)
    sampling.fill(params)
    tokens = ops.draw_blocks(base, anchors, positions, head, sampling.params, kind)
    previous = anchors
    for k in range(5):
        logits = base[:, k] + ops.linear(head.embed[previous], head.weight)[:, :NUM_VALID]
        rows = [RowSampling(one, position + k, 1) for one, position in zip(params, positions.tolist(), strict=True)]
        previous = draw(logits, rows)
        assert torch.equal(tokens[:, k], previous)


def test_the_kind_of_a_call_does_not_change_a_greedy_row(device):
    logits = torch.randn(4, VOCAB, device=device).mul(2).round()
    rows = [RowSampling(SamplingParams(), 3, 1)] * 3 + [RowSampling(SamplingParams(temperature=1.0, top_k=5), 3, 1)]
    assert torch.equal(draw(logits, rows)[:3], logits[:3].argmax(-1))
