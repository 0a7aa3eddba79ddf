"""Run lm-eval against `dspark serve` on a small task of its own, and check its numbers against the engine alone.

The task is made of the package's prompts, so nothing is downloaded. It has two halves: which of four continuations is
the text's own (log-probabilities of prompts), and what the model continues with (generation up to a line's end). The
same is computed in this process by an engine that decodes one request at a time, plainly; the script exits 1 when
lm-eval, over HTTP, arrives at anything else.

    python tests/clients/run_lm_eval.py --lm-eval path/to/lm_eval

lm-eval may live in another virtual environment: pip install "lm-eval[api]" transformers torch
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from dspark import LLM, SamplingParams
from dspark.bench.prompts import load_prompts
from dspark.bench.serve_process import ServerProcess
from dspark.engine import embedded_folder

NUM_CHOICES = 4
TAIL_WORDS = 6
MAX_TOKENS = 24
# Sums of the same numbers, written as text on the way.
TOLERANCE = 1e-9
STOPS = ("\n", "<|eos|>")
MODEL = "dspark-embedded"
_TASK = """task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
num_fewshot: 0
"""
_CHOICE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
_CONTINUE = """output_type: generate_until
doc_to_target: "{{target}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 24
  temperature: 0.0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def main() -> int:
    arguments = parse()
    alone = LLM(draft="off", max_num_seqs=1, enable_prefix_caching=False)
    documents = [describe(alone, *halves) for halves in cut_texts()]
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), documents)
        with ServerProcess(["--log-level", "warning"]) as server:
            run(arguments.lm_eval, Path(folder), server.url)
        problems = compare(Path(folder), documents)
    print("\n".join(problems) or "lm-eval over HTTP and the engine alone agree")
    return 1 if problems else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lm-eval", default="lm_eval", help="the program")
    return parser.parse_args()


def cut_texts() -> list[tuple[str, list[str], int]]:
    """(context, continuations, index of the true one): the others are ends of other texts."""
    texts = [prompt.text.rstrip() for prompt in load_prompts() if prompt.text is not None]
    halves = [split(text) for text in texts]
    cut = []
    for number, (context, tail) in enumerate(halves):
        own = random.Random(number)
        others = own.sample([other for index, (_, other) in enumerate(halves) if index != number], NUM_CHOICES - 1)
        choices = [*others, tail]
        own.shuffle(choices)
        cut.append((context, choices, choices.index(tail)))
    return cut


def split(text: str) -> tuple[str, str]:
    """A text without its last words, and those words with the white space before them.

    lm-eval counts white space at the end of a context to the continuation; so there is none.
    """
    words = text.split(" ")
    context = " ".join(words[:-TAIL_WORDS]).rstrip()
    return context, text[len(context) :]


def describe(alone: LLM, context: str, choices: list[str], answer: int) -> dict:
    """A document with what the engine alone says about it."""
    greedy = SamplingParams(max_tokens=MAX_TOKENS, stop=STOPS)
    (continued,) = alone.generate([alone.tokenizer.encode(context)], greedy)
    values = [log_probability(alone, context, choice) for choice in choices]
    return {"context": context, "choices": choices, "answer": answer, "target": continued.text, "expected": values}


def log_probability(alone: LLM, context: str, choice: str) -> float:
    """Sum over the tokens of a continuation, as lm-eval cuts them: what the whole text has beyond the context's."""
    before = alone.tokenizer.encode(context)
    after = alone.tokenizer.encode(context + choice)[len(before) :]
    (scored,) = alone.generate([before + after], SamplingParams(max_tokens=1, prompt_logprobs=0))
    return sum(entry.token for entry in scored.prompt_logprobs[len(before) :])


def write_tasks(folder: Path, documents: list[dict]) -> None:
    """The documents and the two descriptions that lm-eval reads."""
    file = folder / "documents.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    for task, body in (("dspark_choice", _CHOICE), ("dspark_continue", _CONTINUE)):
        (folder / f"{task}.yaml").write_text(_TASK.format(task=task, file=file) + body, encoding="utf-8")


def run(program: str, folder: Path, url: str) -> None:
    """lm-eval, offline; its output goes to the terminal."""
    model = f"model={MODEL},base_url={url}/v1/completions,num_concurrent=4,tokenized_requests=True"
    tokenizer = f"tokenizer_backend=huggingface,tokenizer={embedded_folder()}"
    command = [program, "run", "--model", "local-completions", "--model_args", f"{model},{tokenizer}"]
    command += ["--tasks", "dspark_choice,dspark_continue", "--include_path", str(folder), "--batch_size", "4"]
    command += ["--output_path", str(folder / "results"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    subprocess.run(command, check=True, env={**os.environ, **offline})


def compare(folder: Path, documents: list[dict]) -> list[str]:
    """Where lm-eval's numbers are not those of the engine alone."""
    problems, largest = [], 0.0
    for sample in read_samples(folder, "dspark_choice"):
        expected = documents[sample["doc_id"]]["expected"]
        for value, (found, _) in zip(expected, (pair[0] for pair in sample["resps"]), strict=True):
            largest = max(largest, abs(float(found) - value))
    if largest > TOLERANCE:
        problems.append(f"a log-probability differs by {largest}")
    for sample in read_samples(folder, "dspark_continue"):
        expected, found = documents[sample["doc_id"]]["target"], sample["resps"][0][0]
        if found != expected:
            problems.append(f"document {sample['doc_id']} continues with {found!r}, not {expected!r}")
    print(f"{len(documents)} documents, largest difference of a log-probability {largest:.2e}")
    return problems


def read_samples(folder: Path, task: str) -> list[dict]:
    (file,) = (folder / "results").rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


if __name__ == "__main__":
    sys.exit(main())
