"""`dspark generate`: continue a text, showing which tokens were drafted; or prove that drafting changed none."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.bench.generate import WARMUP_TOKENS, first_difference
from dspark.cli import exit_codes, options
from dspark.cli.console import ACCEPTED_STYLE, err, fail, has_color, note, out, print_json
from dspark.cli.options import DEFAULTS, DraftChoice
from dspark.cli.prompt import read_prompt
from dspark.cli.reply import Reply, gather
from dspark.cli.session import open_llm, prompt_ids, require_speculation
from dspark.cli.token_text import TokenText
from dspark.config.errors import DSparkError
from dspark.config.sampling import SamplingParams
from dspark.engine import LLM


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; a piece of code without it.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a file; - is stdin.")
    ] = None,
    model: options.Model = None,
    draft: options.Draft = DraftChoice.DSPARK,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode plainly; fail if one token differs, print both speeds.")
    ] = False,
    temperature: options.Temperature = DEFAULTS.temperature,
    top_p: options.TopP = DEFAULTS.top_p,
    top_k: options.TopK = DEFAULTS.top_k,
    min_p: options.MinP = DEFAULTS.min_p,
    seed: options.Seed = DEFAULTS.seed,
    max_tokens: options.MaxTokens = DEFAULTS.max_tokens,
    stop: options.Stop = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    enable_expert_parallel: options.ExpertParallel = False,
    as_json: options.Json = False,
) -> None:
    """Continue a text. Accepted drafts are green, the target's own tokens are not."""
    text = read_prompt(prompt, prompt_file)
    params = options.sampling_params(temperature, top_p, top_k, min_p, seed, max_tokens, stop)
    if compare and draft is DraftChoice.OFF:
        raise DSparkError("--compare runs with and without drafts by itself: leave out --draft off")
    ranks = options.rank_settings(tensor_parallel_size, enable_expert_parallel)
    llm = open_llm(model, draft, **ranks)
    plain_llm = _open_plain(llm, model, text, params, ranks) if compare else None
    reply = _run(llm, text, params, is_shown=not as_json)
    report: dict[str, Any] = {
        "prompt": text,
        "draft": draft.value,
        "speculation": llm.speculation_status,
        "notes": list(llm.admission.notes),
        "sampling": asdict(params),
        **reply.as_json(),
    }
    if plain_llm is not None and not reply.is_interrupted:
        plain = _run(plain_llm, text, params, is_shown=False)
        comparison = _compare(plain, reply)
        report["compare"] = comparison
        if not as_json:
            _print_comparison(comparison, plain)
        reply.is_interrupted = plain.is_interrupted
    if as_json:
        print_json(report)
    if reply.is_interrupted:
        raise typer.Exit(exit_codes.INTERRUPTED)
    if report.get("compare", {}).get("first_difference") is not None:
        raise typer.Exit(exit_codes.FAILED)


def _open_plain(drafted: LLM, model: Path | None, prompt: str, params: SamplingParams, ranks: dict[str, Any]) -> LLM:
    """The engine to compare with. Both run shortly first, so that neither pays alone for what is built once."""
    require_speculation(drafted, "--compare")
    plain = open_llm(model, DraftChoice.OFF, is_companion=True, **ranks)
    for llm in (drafted, plain):
        llm.generate([prompt_ids(llm, prompt)], replace(params, max_tokens=min(WARMUP_TOKENS, params.max_tokens)))
    return plain


def _run(llm: LLM, prompt: str, params: SamplingParams, *, is_shown: bool) -> Reply:
    """Stream one reply, to the terminal or to nowhere."""
    if not is_shown:
        return gather(llm, prompt_ids(llm, prompt), params)
    is_colored = has_color()
    out.print(prompt, style="dim" if is_colored else None, end="")
    printer = TokenText(out.file, llm.tokenizer.decode, is_colored=is_colored)
    reply = gather(llm, prompt_ids(llm, prompt), params, printer.show)
    out.print()
    note(reply.summary())
    if is_colored and any(reply.origins):
        err.print("green: accepted drafts", style=ACCEPTED_STYLE)
    return reply


def _compare(plain: Reply, drafted: Reply) -> dict[str, Any]:
    """Speeds, and the first token that differs; an interrupted plain run is compared as far as it got."""
    expected = plain.token_ids
    actual = drafted.token_ids[: len(expected)] if plain.is_interrupted else drafted.token_ids
    return {
        "plain": plain.as_json(),
        "speed_ratio": drafted.tokens_per_second / plain.tokens_per_second if plain.token_ids else None,
        "first_difference": first_difference(expected, actual),
        "compared_tokens": len(expected),
    }


def _print_comparison(comparison: dict[str, Any], plain: Reply) -> None:
    note(f"plain: {plain.summary()}")
    place = comparison["first_difference"]
    if place is not None:
        fail(f"the tokens differ from plain decoding, first at token {place}")
        return
    ratio = comparison["speed_ratio"]
    speed = f"{ratio:.2f} x the speed of plain decoding" if ratio is not None else "no speed to compare"
    err.print(f"{speed}; all {comparison['compared_tokens']} tokens are identical", style="bold")
