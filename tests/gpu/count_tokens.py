"""Counts tokens that differ between ways of running the embedded model on an accelerator; there should be none.

Every way decodes the same requests, half of them at temperature 0 and half at temperature 1: plainly or with drafts,
launched as graphs or kernel by kernel, in batches of different sizes, and some requests alone. The first way is the
yardstick. Requests come in portions, and a line is printed after each; the last line is one JSON object.

    PYTHONPATH=src python tests/gpu/count_tokens.py --requests 1000 --tokens 1000

With `--tensor-parallel-size` a tiny model takes the place of the embedded one, which ranks cannot divide, and every way
runs on as many accelerators.

The host is the slower half of this model, so several processes with seeds of their own count faster than one.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import triton

from dspark import CompilationConfig, Config, CUDAGraphMode, SamplingParams, SpeculativeConfig
from dspark.engine import LLM
from dspark.validate.lifecycle.tiny import TINY_NAMES, write_tiny_checkpoint

GRAPHS = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)
DRAFTS = SpeculativeConfig(num_speculative_tokens=5)
YARDSTICK = "plain, graphs, 256 at once"
WAYS = {
    YARDSTICK: Config(device="cuda", max_num_seqs=256, compilation_config=GRAPHS),
    "drafts, graphs, 84 at once": Config(
        device="cuda", max_num_seqs=84, compilation_config=GRAPHS, speculative_config=DRAFTS
    ),
    "plain, eager, 100 at once": Config(device="cuda", max_num_seqs=100, enforce_eager=True),
    "drafts, eager, 64 at once": Config(device="cuda", max_num_seqs=64, enforce_eager=True, speculative_config=DRAFTS),
    "drafts, graphs, alone": Config(
        device="cuda", max_num_seqs=1, compilation_config=GRAPHS, speculative_config=DRAFTS
    ),
}


def requests_of(count: int, num_tokens: int, seed: int, max_id: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 40 random tokens; odd requests are sampled."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    prompts = [torch.randint(8, max_id, (length,), generator=generator).tolist() for length in lengths]
    params = [
        SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, temperature=float(number % 2), seed=number + 10**6 * seed
        )
        for number in range(count)
    ]
    return prompts, params


def differing(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> int:
    """Tokens at whose places two outputs are not the same."""
    return sum(a != b for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--portion", type=int, default=256, help="requests between two lines")
    parser.add_argument("--eager", type=int, default=100, help="requests of each slow way")
    parser.add_argument("--alone", type=int, default=3, help="requests that also run alone")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count_all(asked, Path(folder))


def ways_of(ranks: int, folder: Path) -> dict[str, Config]:
    """The ways on so many ranks."""
    if ranks == 1:
        return WAYS
    model = str(write_tiny_checkpoint(folder / "tiny", TINY_NAMES[0], ranks=ranks))
    return {name: replace(config, model=model, tensor_parallel_size=ranks) for name, config in WAYS.items()}


def count_all(asked: argparse.Namespace, folder: Path) -> None:
    ways = ways_of(asked.tensor_parallel_size, folder)
    max_id = 3000 if asked.tensor_parallel_size == 1 else 100
    prompts, params = requests_of(asked.requests, asked.tokens, asked.seed, max_id)
    engines: dict[str, LLM] = {}
    left = {name: asked.eager if "eager" in name else asked.requests for name in ways} | {
        "drafts, graphs, alone": asked.alone
    }
    found = {name: {"tokens": 0, "differing": 0, "seconds": 0.0} for name in ways}
    for start in range(0, asked.requests, asked.portion):
        yardstick: list[list[int]] = []
        for name, config in ways.items():
            count = min(left[name], asked.portion)
            left[name] -= count
            if not count:
                continue
            if name not in engines:
                engines[name] = LLM(config=config)
            llm = engines[name]
            began = time.perf_counter()
            chosen = slice(start, start + count)
            outputs = [completion.token_ids for completion in llm.generate(prompts[chosen], params[chosen])]
            yardstick = yardstick or outputs
            figures = found[name]
            figures["seconds"] += round(time.perf_counter() - began, 1)
            figures["tokens"] += sum(map(len, outputs))
            figures["differing"] += differing(yardstick[: len(outputs)], outputs)
        summary = "; ".join(f"{name}: {one['tokens']} tokens, {one['differing']} differ" for name, one in found.items())
        print(summary, flush=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
    report = {"schema": "dspark.gpu.count_tokens/1", "ways": found, "tensor_parallel_size": asked.tensor_parallel_size}
    print(json.dumps(report | versions))


if __name__ == "__main__":
    main()
