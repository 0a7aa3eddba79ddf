"""All scenarios by name, and what running one comes to."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspark.validate.lifecycle.evidence import NotExercisedError
from dspark.validate.lifecycle.ledger import Ledger
from dspark.validate.lifecycle.scenarios import batching, endings, preemption, prefixes
from dspark.validate.lifecycle.subject import Subject

Scenario = Callable[[Subject], Ledger]

_ALL: tuple[Scenario, ...] = (
    batching.mixed_stochastic_requests,
    preemption.prefill_transition_preemption_with_reorder,
    preemption.decode_preemption_with_reorder_after_verify,
    prefixes.exact_prefix_fork,
    preemption.abort_and_survivor,
    preemption.abort_after_verify,
    batching.slot_reuse_and_output_cap,
    endings.stop_inside_accepted_block,
    endings.end_of_sequence_inside_accepted_block,
    endings.output_cap_inside_block,
    batching.varying_verify_lengths,
    prefixes.image_restored_across_stored_checkpoint,
    preemption.repeated_preemption_of_one_request,
    preemption.cache_exhaustion,
    prefixes.warm_equals_cold,
    prefixes.next_turn_after_stop_inside_block,
    prefixes.hit_on_running_prefix,
    prefixes.prompts_that_part,
    prefixes.samples_forked_after_prefill,
    preemption.prompt_logprobs_in_chunks,
    batching.padding_rows_inert,
    batching.urgent_request_overtakes,
    batching.draft_health_stops_and_resumes,
    endings.structured_output_inside_accepted_block,
    endings.context_limit_inside_block,
    preemption.refused_requests_hold_nothing,
)
# Stories about drafts cannot happen to a model without them.
_NEED_DRAFTS = frozenset(
    {
        preemption.decode_preemption_with_reorder_after_verify,
        preemption.abort_after_verify,
        endings.stop_inside_accepted_block,
        endings.end_of_sequence_inside_accepted_block,
        endings.output_cap_inside_block,
        batching.varying_verify_lengths,
        batching.draft_health_stops_and_resumes,
        prefixes.next_turn_after_stop_inside_block,
    }
)


def scenario_name(scenario: Scenario) -> str:
    """ "warm-equals-cold" for `warm_equals_cold`."""
    return scenario.__name__.replace("_", "-")


SCENARIOS: dict[str, Scenario] = {scenario_name(scenario): scenario for scenario in _ALL}


@dataclass(frozen=True)
class ScenarioResult:
    """What a scenario came to.

    Attributes:
        verdict: "passed", "failed", "not exercised" or "not applicable".
        events: what was counted.
        message: why it did not pass.
    """

    subject: str
    name: str
    story: str
    verdict: str
    seconds: float
    events: dict[str, int]
    message: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict in ("passed", "not applicable")

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return vars(self)


def run_scenario(name: str, subject: Subject) -> ScenarioResult:
    """Play one scenario; whatever goes wrong in it is part of the result."""
    scenario = SCENARIOS[name]
    story = (scenario.__doc__ or "").strip()
    began = time.perf_counter()
    events: dict[str, int] = {}
    verdict, message = "passed", None
    if scenario in _NEED_DRAFTS and not subject.block_size:
        verdict, message = "not applicable", "the model carries no draft stages"
    elif scenario is endings.structured_output_inside_accepted_block and not subject.has_grammar:
        verdict, message = "not applicable", "no grammar library, or it does not know the tokenizer"
    else:
        try:
            events = dict(scenario(subject).events)
        except NotExercisedError as error:
            verdict, message = "not exercised", str(error)
        except Exception as error:  # a crash of the engine is a finding like any other
            verdict, message = "failed", f"{type(error).__name__}: {error}"
    return ScenarioResult(subject.name, name, story, verdict, time.perf_counter() - began, events, message)
