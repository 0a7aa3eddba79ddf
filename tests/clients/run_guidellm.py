"""Load `dspark serve` with guidellm and with `dspark bench serve`, one after the other, and show both results.

Both send prompts of the same number of tokens and generate the same number, through the same endpoint, at the same
concurrency; their latencies should agree as far as the two sets of random prompts do. Nothing is downloaded: the
prompts are synthetic, and the tokenizer is the model's own.

    python tests/clients/run_guidellm.py --guidellm path/to/guidellm

guidellm may live in another virtual environment: pip install guidellm (and a CPU build of torch).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from dspark.bench.load import ClosedLoop
from dspark.bench.serve import ServeSettings, Target, run_serve_bench
from dspark.bench.serve_process import ServerProcess
from dspark.bench.serve_requests import LengthRange, RequestSettings
from dspark.bench.serve_table import serve_lines, serve_tables
from dspark.engine import embedded_folder


def main() -> int:
    arguments = parse()
    levels = [int(number) for number in arguments.concurrency.split(",")]
    with tempfile.TemporaryDirectory() as folder, ServerProcess(["--log-level", "warning"]) as server:
        failed = run_guidellm(arguments, Path(folder), server.url)
        report = run_serve_bench(
            [Target("dspark bench serve", server.url)],
            [ClosedLoop(level) for level in levels],
            (),
            ServeSettings(arguments.requests),
            RequestSettings(
                max_tokens=arguments.output_len,
                output_len=LengthRange(arguments.output_len, arguments.output_len),
                input_len=LengthRange(arguments.input_len, arguments.input_len),
            ),
        )
    console = Console(width=120, markup=False)
    for table in serve_tables(report):
        console.print(table)
    print("\n".join(serve_lines(report)))
    return 1 if failed or report.num_failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guidellm", default="guidellm", help="the program")
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--requests", type=int, default=24, help="at each level")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    return parser.parse_args()


def run_guidellm(arguments: argparse.Namespace, folder: Path, url: str) -> int:
    """guidellm, offline; its tables go to the terminal. Returns how many of its requests failed."""
    tokens = f"prompt_tokens={arguments.input_len},output_tokens={arguments.output_len}"
    command = [
        *(arguments.guidellm, "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={url},request_format=/v1/completions"),
        *("--profile", "kind=concurrent,streams=1", "--override", "profile.streams", arguments.concurrency),
        *("--constraint", f"kind=max_requests,count={arguments.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={embedded_folder()}"),
        *("--data", f"kind=synthetic_text,{tokens}"),
        *("--output", "kind=console", "--output", f"kind=json,path={folder / 'guidellm.json'}"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    subprocess.run(command, check=True, env={**os.environ, **offline})
    report = json.loads((folder / "guidellm.json").read_text(encoding="utf-8"))
    totals = [benchmark["metrics"]["request_totals"] for benchmark in report["benchmarks"]]
    return sum(total["errored"] for total in totals)


if __name__ == "__main__":
    sys.exit(main())
