"""An engine of four ranks: neither company, nor drafts, nor rounds on the device change a token."""

from dspark.config import Config, SpeculativeConfig
from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import assemble, build_loop
from dspark.engine.graphs import GraphPlan
from dspark.engine.speculation import Speculation
from support.divisible_models import write_divisible_checkpoint
from support.engines import run_out

MAX_LEN = 128
AHEAD = GraphPlan((3, 18), MAX_LEN, is_captured=False)
WISHES = [
    ([5 + number] * (1 + 6 * number), SamplingParams(max_tokens=10, ignore_eos=True, temperature=number / 2, seed=7))
    for number in range(3)
]


def decoded(loop, numbers):
    """Tokens of requests that run at once."""
    for number in numbers:
        loop.add(number, *WISHES[number])
    emissions = run_out(loop)
    return {number: [token for each in emissions[number] for token in each.token_ids] for number in numbers}


def test_tokens_follow_from_the_request_alone(tmp_path):
    config = Config(
        str(write_divisible_checkpoint(tmp_path / "model", "v41")),
        tensor_parallel_size=4,
        max_model_len=MAX_LEN,
        max_num_seqs=len(WISHES),
        speculative_config=SpeculativeConfig(),
    )
    assembly = assemble(config=config)
    drafted = assembly.loop
    tokens = decoded(drafted, range(3))
    assert {key: value for number in range(3) for key, value in decoded(drafted, [number]).items()} == tokens
    sizes = assembly.max_model_len, assembly.placement.device
    model, tokenizer = drafted.engine.model, assembly.tokenizer
    for speculation, shapes in ((Speculation(), None), (assembly.speculation, AHEAD), (Speculation(), AHEAD)):
        other = build_loop(model, tokenizer, config, speculation, *sizes, shapes=shapes, share=assembly.share)
        assert decoded(other, range(3)) == tokens
        assert (other._ahead is not None) == (shapes is AHEAD) and other.engine.share.team.size == 4
