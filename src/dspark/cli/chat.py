"""`dspark chat`: a dialogue in the terminal."""

import sys

import typer

from dspark.cli import exit_codes, options
from dspark.cli.console import fail, has_color, note, out
from dspark.cli.files import decode_utf8
from dspark.cli.options import DEFAULTS, DraftChoice
from dspark.cli.reply import Reply, gather
from dspark.cli.session import model_folder, open_llm
from dspark.cli.token_text import TokenText
from dspark.config.errors import DSparkError
from dspark.config.sampling import SamplingParams
from dspark.engine import LLM
from dspark.serve.encoding import ChatEncoding, chat_encoding, piece_ids
from dspark.serve.encoding.protocol import Message


def chat(
    model: options.Model = None,
    draft: options.Draft = DraftChoice.DSPARK,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    top_k: options.TopK = DEFAULTS.top_k,
    min_p: options.MinP = DEFAULTS.min_p,
    seed: options.Seed = DEFAULTS.seed,
    max_tokens: options.MaxTokens = DEFAULTS.max_tokens,
    stop: options.Stop = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    enable_expert_parallel: options.ExpertParallel = False,
) -> None:
    """Talk to the model, a line at a time. /new forgets the dialogue, Ctrl-D ends it, Ctrl-C stops a reply."""
    params = options.sampling_params(temperature, top_p, top_k, min_p, seed, max_tokens, stop)
    encoding = chat_encoding(model_folder(model))
    llm = open_llm(model, draft, **options.rank_settings(tensor_parallel_size, enable_expert_parallel))
    messages: list[Message] = []
    note("type a line; /new starts again, Ctrl-D ends")
    while (line := _read_line()) is not None:
        if line == "/new":
            messages.clear()
        elif line:
            _take_turn(llm, encoding, params, messages, line)


def _read_line() -> str | None:
    """The next line without its surrounding space, or None at the end of input; invalid UTF-8 is asked for again."""
    while True:
        if sys.stdin.isatty():
            out.print("> ", end="", style="bold")
        line = sys.stdin.buffer.readline()
        if not line:
            return None
        try:
            return decode_utf8(line, "the line").strip()
        except DSparkError as error:
            fail(f"{error}: type it again")


def _take_turn(llm: LLM, encoding: ChatEncoding, params: SamplingParams, messages: list[Message], line: str) -> None:
    """Ask, print the reply, and remember both; a turn that is refused is forgotten."""
    question = {"role": "user", "content": line}
    try:
        prompt = piece_ids(llm.tokenizer, encoding.pieces([*messages, question]))
        reply = _answer(llm, prompt, params)
    except DSparkError as error:
        fail(f"{error} (/new starts again)")
        return
    messages += [question, {"role": "assistant", "content": _spoken(encoding, reply.text)}]
    note(reply.summary())
    if reply.is_interrupted:
        raise typer.Exit(exit_codes.INTERRUPTED)


def _answer(llm: LLM, prompt: list[int], params: SamplingParams) -> Reply:
    printer = TokenText(out.file, llm.tokenizer.decode, is_colored=has_color())
    reply = gather(llm, prompt, params, printer.show)
    out.print()
    return reply


def _spoken(encoding: ChatEncoding, text: str) -> str:
    """What a reply says; thoughts are not part of the dialogue that follows."""
    parser = encoding.parser()
    return "".join(delta.content for delta in [*parser.push(text), *parser.finish()])
