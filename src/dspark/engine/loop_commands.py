"""Commands that an AsyncEngine gives its loop, which run between two steps."""

from collections.abc import Callable, Sequence

from dspark.config.sampling import SamplingParams
from dspark.engine.loop_thread import StepLoop
from dspark.scheduler.plan import RequestId


def adding(
    request_ids: Sequence[RequestId],
    prompts: Sequence[Sequence[int]],
    params: Sequence[Sequence[SamplingParams]],
    priority: int,
) -> Callable[[StepLoop], None]:
    """The command that takes in all samples of all prompts, or none."""

    def add(loop: StepLoop) -> None:
        offset = 0
        try:
            for prompt_ids, own in zip(prompts, params, strict=True):
                loop.add_samples(request_ids[offset : offset + len(own)], prompt_ids, own, priority=priority)
                offset += len(own)
        except BaseException:
            for request_id in request_ids[:offset]:
                loop.abort(request_id)
            raise

    return add


def do_nothing(loop: StepLoop) -> None:
    """A command whose answer comes after all emissions of the steps before it."""
