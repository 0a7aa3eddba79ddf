"""What is drawn and judged without a wait equals what the host draws and judges, token by token, for any parameters."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config.sampling import SamplingParams
from dspark.ops.draw import DrawKind, DrawParams
from dspark.ops.markov import MarkovHead
from dspark.ops.opset import TORCH_OPS
from dspark.sampling import RequestSampling, RowSampling, draw
from dspark.sampling.device_rows import DeviceSampling, drafts_on_device, draw_rows, draws_on_device
from dspark.speculative import ForcedAcceptance, VerifySpan, verify
from dspark.speculative.device_verdict import DeviceVerdict

VOCAB = 50
CPU = torch.device("cpu")

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.6, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 80]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def random_logits(num_rows, seed, coarse):
    logits = torch.randn(num_rows, VOCAB + 3, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.mul(2).round().div(2) if coarse else logits


@settings(max_examples=80, deadline=None)
@given(
    params=st.lists(params_strategy, min_size=1, max_size=5),
    owners=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    seed=st.integers(0, 1000),
    coarse=st.booleans(),
)
def test_rows_are_drawn_as_the_host_draws_them(params, owners, seed, coarse):
    owners = [owner % len(params) for owner in owners]
    logits, positions = random_logits(len(owners) + 1, seed, coarse), [seed + 3 * t for t in range(len(owners))]
    rows = [RowSampling(params[owner], position, 1) for owner, position in zip(owners, positions, strict=True)]
    wanted = draw(logits[:-1], rows, num_valid_tokens=VOCAB)
    sampling = DeviceSampling(8, CPU)
    sampling.fill([SamplingParams(temperature=1.0, seed=seed)] * 8)
    kind = sampling.fill(params)
    for larger in range(kind, DrawKind.FILTERED + 1):
        found = draw_rows(
            logits, torch.tensor([*owners, -1]), torch.tensor([*positions, 0]), sampling, DrawKind(larger), VOCAB
        )
        assert torch.equal(found[:-1], wanted)


@settings(max_examples=80, deadline=None)
@given(
    params=st.lists(params_strategy, min_size=1, max_size=4),
    lens=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
    num_right=st.integers(0, 3),
    length=st.one_of(st.none(), st.floats(1, 4)),
)
def test_drafts_are_judged_as_the_host_judges_them(params, lens, seed, num_right, length):
    lens = lens[: len(params)]
    starts = [sum(lens[:r]) + r for r in range(len(lens))]
    logits = random_logits(sum(lens) + len(lens), seed, True)
    history = [1] * (3 + seed)
    rows = [RowSampling(params[r], len(history) + k, 1) for r, n in enumerate(lens) for k in range(n + 1)]
    drawn = draw(logits, rows, num_valid_tokens=VOCAB)
    drafts = torch.full((len(lens), 3), -1)
    for r, start in enumerate(starts):
        for k in range(lens[r]):
            drafts[r, k] = (drawn[start + k] + (k >= num_right)) % VOCAB
    spans = [
        VerifySpan(r, RequestSampling(one, 1, history), drafts[r, : lens[r]].tolist()) for r, one in enumerate(params)
    ]
    forced = None if length is None else ForcedAcceptance.from_length(length, 3)
    wanted = (forced.verify if forced else verify)(logits, spans, num_valid_tokens=VOCAB)
    anchors = torch.full((len(lens),), len(history) - 1)
    judgement = DeviceVerdict(forced, CPU).judge(
        drawn, drafts, torch.tensor(starts), torch.tensor(lens), anchors, DrawParams.pack(params)
    )
    assert judgement.num_accepted.tolist() == wanted.num_accepted
    for found, tokens in zip(judgement.token_ids.tolist(), wanted.token_ids, strict=True):
        assert found == tokens + [-1] * (4 - len(tokens))


def test_a_block_is_drawn_as_the_loop_draws_it():
    """The bias of each token is that of the one before it; padding of the head's weight is never drawn."""
    generator = torch.Generator().manual_seed(1)
    embed, weight = torch.randn(VOCAB, 8, generator=generator), torch.randn(VOCAB + 3, 8, generator=generator)
    base = torch.randn(3, 4, VOCAB, generator=generator)
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=4), SamplingParams(temperature=0.7, top_k=3)]
    positions = torch.tensor([5, 90, 7])
    anchors = torch.tensor([3, 1, 49])
    tokens = TORCH_OPS.draw_blocks(
        base, anchors, positions, MarkovHead(embed, weight), DrawParams.pack(params), DrawKind.FILTERED
    )
    previous = anchors
    for k in range(4):
        logits = base[:, k] + TORCH_OPS.linear(embed[previous], weight)[:, :VOCAB]
        rows = [RowSampling(one, int(positions[r]) + k, 1) for r, one in enumerate(params)]
        previous = draw(logits, rows)
        assert torch.equal(tokens[:, k], previous)


def test_what_only_the_host_can_draw():
    for params in (
        SamplingParams(logit_bias={1: 1.0}),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(temperature=1.0, sampler="ratio"),
    ):
        assert not draws_on_device(params)
        assert not drafts_on_device(params)
    for params in (SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=1)):
        assert drafts_on_device(params) and not draws_on_device(params)
    assert draws_on_device(SamplingParams(sampler="ratio"))
    assert draws_on_device(SamplingParams(temperature=1.0, top_p=0.9, top_k=4, min_p=0.1))
