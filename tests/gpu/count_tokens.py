"""Counts tokens that differ between ways of running the embedded model on an accelerator; there should be none.

Every way decodes the same requests, half of them at temperature 0 and half at temperature 1: plainly or with drafts,
launched as graphs or kernel by kernel, in batches of different sizes, and some requests alone. The first way is the
yardstick. The last line is one JSON object.

    PYTHONPATH=src python tests/gpu/count_tokens.py --requests 1000 --tokens 1000
"""

import argparse
import json
import time

import torch
import triton

from dspark import CompilationConfig, Config, CUDAGraphMode, SamplingParams, SpeculativeConfig
from dspark.engine import LLM

GRAPHS = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)
DRAFTS = SpeculativeConfig(num_speculative_tokens=5)
WAYS = {
    "plain, graphs, 256 at once": Config(device="cuda", max_num_seqs=256, compilation_config=GRAPHS),
    "drafts, graphs, 84 at once": Config(
        device="cuda", max_num_seqs=84, compilation_config=GRAPHS, speculative_config=DRAFTS
    ),
    "plain, eager, 200 at once": Config(device="cuda", max_num_seqs=200),
    "drafts, eager, 128 at once": Config(device="cuda", max_num_seqs=128, speculative_config=DRAFTS),
}
ALONE = Config(device="cuda", max_num_seqs=1, compilation_config=GRAPHS, speculative_config=DRAFTS)


def requests_of(count: int, num_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 40 random tokens; odd requests are sampled."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    prompts = [torch.randint(8, 3000, (length,), generator=generator).tolist() for length in lengths]
    params = [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=float(number % 2), seed=number)
        for number in range(count)
    ]
    return prompts, params


def differing(left: list[list[int]], right: list[list[int]]) -> int:
    """Tokens at whose places two outputs are not the same."""
    return sum(a != b for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


def run(config: Config, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list[list[int]], float]:
    """Tokens of every request, and seconds."""
    llm = LLM(config=config)
    began = time.perf_counter()
    outputs = [completion.token_ids for completion in llm.generate(prompts, params)]
    return outputs, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--eager", type=int, default=200, help="requests of the slow ways")
    parser.add_argument("--alone", type=int, default=4, help="requests that also run alone")
    asked = parser.parse_args()
    prompts, params = requests_of(asked.requests, asked.tokens)
    found: dict[str, dict[str, float]] = {}
    yardstick: list[list[int]] = []
    for name, config in {**WAYS, "drafts, graphs, alone": ALONE}.items():
        chosen = asked.alone if config is ALONE else asked.eager if "eager" in name else asked.requests
        outputs, seconds = run(config, prompts[:chosen], params[:chosen])
        yardstick = yardstick or outputs
        total, wrong = sum(len(one) for one in outputs), differing(yardstick[:chosen], outputs)
        found[name] = {"tokens": total, "differing": wrong, "seconds": round(seconds, 1)}
        print(f"{name}: {total} tokens, {wrong} differ, {seconds:.1f} s", flush=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
    print(json.dumps({"schema": "dspark.gpu.count_tokens/1", "ways": found, **versions}))


if __name__ == "__main__":
    main()
