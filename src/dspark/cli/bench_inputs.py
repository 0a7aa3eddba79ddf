"""What the benchmarks are run on: prompts as token ids, read from the package, a corpus, or files of questions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.bench.generate import Item
from dspark.bench.heldout import cut_prompts
from dspark.bench.plot import require_matplotlib
from dspark.bench.prompts import DOMAINS, BenchPrompt, Message, load_prompts
from dspark.cli.files import read_text, require_writable
from dspark.cli.session import model_folder, prompt_ids
from dspark.config.errors import DSparkError
from dspark.engine import LLM
from dspark.serve.encoding import chat_encoding, piece_ids
from dspark.train.corpus import read_documents

_CORPUS_PATTERN = "heldout-*.jsonl.xz"
_FOLDER_PROMPTS = 8


def as_item(llm: LLM, prompt: BenchPrompt, model: Path | None) -> Item:
    """Token ids of a prompt; dialogues go through the model's chat format."""
    if prompt.text is not None:
        token_ids = prompt_ids(llm, prompt.text)
    else:
        token_ids = piece_ids(llm.tokenizer, chat_encoding(model_folder(model)).pieces(prompt.messages))
    return Item(prompt.domain, prompt.name, tuple(token_ids))


def check_plot(file: Path) -> None:
    """Refuse what would fail after minutes of measuring.

    Raises:
        DSparkError: matplotlib is missing, or the file cannot be a PNG file there.
    """
    require_matplotlib()
    if file.suffix.lower() != ".png":
        raise DSparkError(f"--plot writes PNG files, and {file.name} does not end in .png")
    require_writable("--plot", file)


def check_outputs(as_json: Path | None, plot: Path | None) -> None:
    """The same for the files of a report, where there are any."""
    if plot is not None:
        check_plot(plot)
    if as_json is not None:
        require_writable("--json", as_json)
    if plot is not None and plot == as_json:
        raise DSparkError(f"--json and --plot both name {plot}: give each a file of its own")


def choose_prompts(folder: Path | None, domains: Sequence[str] | None, count: int | None) -> list[BenchPrompt]:
    """The package's own prompts, or those of a folder.

    Args:
        folder: holds a corpus's heldout-DOMAIN.jsonl.xz, or DOMAIN.jsonl with one question a line: {"turns": [text]},
            {"messages": [...]} or {"text": text}. None takes the package's prompts.
        domains: some of them; None takes all.
        count: prompts of each domain.

    Raises:
        DSparkError: a domain or the folder's files are missing or damaged, or count is below 1.
    """
    if folder is None:
        return load_prompts(domains or DOMAINS, count)
    count = _FOLDER_PROMPTS if count is None else count
    if count < 1:
        raise DSparkError(f"at least one prompt per domain is needed, not {count}")
    if any(folder.glob(_CORPUS_PATTERN)):
        readers = [
            cut_prompts(domain, read_documents(folder, "heldout", domain), count) for domain in domains or DOMAINS
        ]
        return [prompt for prompts in readers for prompt in prompts]
    return [prompt for domain in domains or _domains_in(folder) for prompt in _read_questions(folder, domain, count)]


def _domains_in(folder: Path) -> list[str]:
    found = sorted(path.stem for path in folder.glob("*.jsonl"))
    if not found:
        raise DSparkError(
            f"{folder} holds neither {_CORPUS_PATTERN} nor *.jsonl: --prompt-dir takes a folder of prompts"
        )
    return found


def _read_questions(folder: Path, domain: str, count: int) -> list[BenchPrompt]:
    file = folder / f"{domain}.jsonl"
    lines = [line for line in read_text(file).splitlines() if line.strip()]
    return [_as_question(file, domain, number, line) for number, line in enumerate(lines[:count], start=1)]


def _as_question(file: Path, domain: str, number: int, line: str) -> BenchPrompt:
    """One line of a file of questions; of a dialogue in turns, the first message is asked."""
    text: str | None = None
    messages: tuple[Message, ...] = ()
    try:
        record: dict[str, Any] = json.loads(line)
        if "turns" in record:
            messages = ({"role": "user", "content": record["turns"][0]},)
        elif "messages" in record:
            messages = tuple(record["messages"])
        else:
            text = record["text"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise DSparkError(f"{file}, line {number}: no prompt with turns, messages or text ({error})") from error
    return BenchPrompt(domain, f"{domain}-{number}", file.name, "of the file", text, messages)
