"""A model under test: engines over it in any configuration, and the answer that each request gets alone."""

from dataclasses import replace
from pathlib import Path

import torch

from dspark.config import Config
from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.config.structured import StructuredOutput
from dspark.engine.assembly import Assembly, assemble, build_loop
from dspark.engine.core import Speculation
from dspark.engine.graphs import GraphPlan
from dspark.engine.loop import EngineLoop
from dspark.models.build import read_plan
from dspark.speculative.proposer import Proposer
from dspark.validate.lifecycle.any_lengths import AnyLengths
from dspark.validate.lifecycle.oracle import Blocks, DraftOracle, Oracle
from dspark.validate.lifecycle.settings import EngineSettings
from dspark.validate.lifecycle.wishes import Wish

# Rows of the oracle's passes: more than any prompt, so that each is prefilled in one.
_WHOLE_PROMPT = 8192
# Rows of passes of fixed shape.
_ROW_COUNTS = (1, 2, 4, 6, 12, 18, 24, 30)


class Subject:
    """A model under test.

    Args:
        name: for the report.
        folder: checkpoint; None is the embedded model.
        max_model_len: tokens of a request at most.
        max_output: tokens that its requests generate at most: slow models get short requests.
        ranks: that share it.
    """

    def __init__(self, name: str, folder: Path | None, max_model_len: int, max_output: int, ranks: int = 1) -> None:
        self.name = name
        self.folder = folder
        self.max_output = max_output
        self.ranks = ranks
        self._wanted_len = max_model_len
        alone = EngineSettings(1, _WHOLE_PROMPT, num_speculative_tokens=0, enable_prefix_caching=False)
        plain = self.assemble(alone)
        self.oracle = Oracle(plain.loop)
        self.tokenizer = plain.tokenizer
        self.max_model_len = plain.max_model_len
        self.num_valid_tokens = plain.loop.engine.num_valid_tokens
        self.eos_token_ids = tuple(plain.plan.eos_token_ids)
        self.device = torch.device(plain.device)
        self.page_tokens = plain.loop.engine.state.page_tokens
        self.has_grammar = self._has_grammar(plain.loop)
        draft = read_plan(plain.folder).draft
        self.block_size = draft.block_size if draft else 0
        drafting = replace(alone, num_speculative_tokens=self.block_size)
        self._drafts = DraftOracle(self.loop(drafting)) if self.block_size else None

    @staticmethod
    def _has_grammar(loop: EngineLoop) -> bool:
        """Whether outputs can be given a form: the grammar library is there and knows this tokenizer."""
        try:
            loop.add("form", [0], SamplingParams(structured=StructuredOutput.choice(["yes", "no"])))
        except ConfigError:
            return False
        return loop.abort("form")

    def assemble(self, settings: EngineSettings) -> Assembly:
        """A fresh engine, through the same door as every user: admission, weights, tokenizer, loop."""
        config = Config(
            model=str(self.folder) if self.folder else None,
            tensor_parallel_size=self.ranks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=self._wanted_len,
            max_num_pages=settings.max_num_pages,
            enable_prefix_caching=settings.enable_prefix_caching,
            prefix_cache_interval=settings.prefix_cache_interval,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            speculative_config=settings.speculation,
        )
        return assemble(config=config)

    def loop(self, settings: EngineSettings) -> EngineLoop:
        """The loop of a fresh engine."""
        assembly = self.assemble(settings)
        speculation, shapes = assembly.speculation, None
        if settings.lengths_seed is not None and settings.num_speculative_tokens:
            speculation = replace(speculation, lengths=AnyLengths(settings.lengths_seed))
        if settings.runs_ahead and self.device.type == "cpu":
            shapes = GraphPlan(_ROW_COUNTS, self.max_model_len, is_captured=False)
        if shapes is None and speculation is assembly.speculation:
            return assembly.loop
        return _rebuilt(assembly, speculation, shapes)

    def drafts_of(self, wish: Wish) -> Blocks | None:
        """The blocks of a request alone, at the model's full width; None where it has no draft stages."""
        return self._drafts.blocks(wish) if self._drafts else None

    def loop_with(self, settings: EngineSettings, proposer: Proposer) -> EngineLoop:
        """The loop of a fresh engine with another drafter than the checkpoint's."""
        plain = self.assemble(replace(settings, num_speculative_tokens=0))
        return _rebuilt(plain, Speculation(proposer.num_speculative_tokens, proposer=proposer))


def _rebuilt(assembly: Assembly, speculation: Speculation, shapes: GraphPlan | None = None) -> EngineLoop:
    """An engine over the weights of an assembly that speculates in a way no configuration spells."""
    model, device = assembly.loop.engine.model, torch.device(assembly.device)
    tokenizer, config, max_len = assembly.tokenizer, assembly.config, assembly.max_model_len
    return build_loop(model, tokenizer, config, speculation, max_len, device, shapes=shapes, share=assembly.share)
