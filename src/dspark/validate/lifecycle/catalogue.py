"""Random requests by number: what number 17 of a seed is, is known without the other sixteen hundred."""

import random
from typing import Any

from dspark.config.sampling import SamplingParams
from dspark.config.structured import StructuredOutput
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.wishes import Wish

_NUM_DOCUMENTS = 3
FORMS = (
    StructuredOutput.regex("[a-z]{2,9}( [0-9]{1,3})*"),
    StructuredOutput.choice(["yes", "no", "not yet", "nothing"]),
    StructuredOutput.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}}, "required": ["b"]}
    ),
)
_NEVER = "\N{SNOWMAN} never"


class Catalogue:
    """Requests of one subject. Prompts share first tokens; some repeat a prompt, some continue an earlier answer.

    Args:
        subject: whose vocabulary and tokenizer they are made for.
        seed: of everything.
        max_prompt: tokens of a prompt at most.
    """

    def __init__(self, subject: Subject, seed: int, max_prompt: int) -> None:
        self.subject = subject
        self.seed = seed
        self.max_prompt = min(max_prompt, subject.max_model_len - subject.max_output - 1)
        self._entries: dict[int, tuple[Wish, ...]] = {}
        self._documents = [self._document(number) for number in range(_NUM_DOCUMENTS)]

    def entry(self, number: int) -> tuple[Wish, ...]:
        """One request, or several samples of one prompt."""
        if number not in self._entries:
            rng = random.Random(f"{self.seed}/{self.subject.name}/{number}")
            self._entries[number] = self._make(rng, number)
        return self._entries[number]

    def _document(self, number: int) -> tuple[int, ...]:
        rng = random.Random(f"{self.seed}/{self.subject.name}/document {number}")
        return tuple(rng.randrange(self.subject.num_valid_tokens) for _ in range(self.max_prompt))

    def _make(self, rng: random.Random, number: int) -> tuple[Wish, ...]:
        prompt = self._prompt(rng, number)
        params = self._params(rng)
        wish = Wish(prompt, self._with_ending(rng, Wish(prompt, params)))
        if rng.random() > 0.12 or params.sampler == "ratio":
            return (wish,)
        seeds = [rng.randrange(2**20) for _ in range(rng.choice([1, 2, 3]))]
        return (wish, *(wish.with_params(seed=seed, stop=()) for seed in seeds))

    def _prompt(self, rng: random.Random, number: int) -> tuple[int, ...]:
        kind = rng.random()
        if number and kind < 0.25:
            return self.entry(rng.randrange(number))[0].prompt_ids
        if number and kind < 0.5:
            before = self.entry(rng.randrange(number))[0]
            if before.is_exact:
                follow_up = before.prompt_ids + self.subject.oracle.answer(before).token_ids + self._tokens(rng, 3)
                if len(follow_up) <= self.max_prompt:
                    return follow_up
        if kind < 0.57:
            return self._tokens(rng, 8)
        document = rng.choice(self._documents)
        return document[: self._length(rng)] + self._tokens(rng, rng.choice([1, 1, 6]))

    def _length(self, rng: random.Random) -> int:
        """A prompt length, often next to the end of a page."""
        most, page = self.max_prompt - 6, self.subject.page_tokens
        if most > page and rng.random() < 0.7:
            return min(
                page * min(rng.choice([1, 1, 1, 2, 3]), most // page) + rng.choice([-20, -9, -8, -3, -1, 0, 1, 5]), most
            )
        return rng.randint(1, most)

    def _tokens(self, rng: random.Random, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(self.subject.num_valid_tokens) for _ in range(rng.randint(1, most)))

    def _params(self, rng: random.Random) -> SamplingParams:
        """How tokens are drawn; where they end is chosen later."""
        chosen: dict[str, Any] = {"max_tokens": self.subject.max_output, "ignore_eos": True}
        if rng.random() < 0.65:
            chosen |= {
                "temperature": rng.choice([0.4, 0.8, 1.0, 1.0, 1.5, 2.5]),
                "top_k": rng.choice([0, 0, 0, 5, 30]),
                "top_p": rng.choice([1.0, 1.0, 0.95, 0.7]),
                "min_p": rng.choice([0.0, 0.0, 0.02, 0.2]),
                "seed": rng.choice([rng.randrange(100), rng.randrange(2**64)]),
            }
        if rng.random() < 0.3:
            chosen |= {
                "repetition_penalty": rng.choice([1.0, 1.2, 0.8]),
                "presence_penalty": rng.choice([0.0, 0.4, -0.3]),
                "frequency_penalty": rng.choice([0.0, 2.0, 0.5, -0.2]),
            }
            if rng.random() < 0.5:  # favourites come again within a block, where penalties count the drafts
                chosen["logit_bias"] = {rng.randrange(self.subject.num_valid_tokens): 8.0 for _ in range(4)}
        elif rng.random() < 0.3:
            eos = rng.choice(self.subject.eos_token_ids)
            chosen["logit_bias"] = {
                eos: rng.choice([2.0, 4.0, 6.0]),
                rng.randrange(self.subject.num_valid_tokens): -3.0,
            }
        if rng.random() < 0.06:
            chosen["sampler"] = "ratio"
        if rng.random() < 0.08 and self.subject.has_grammar:
            chosen["structured"] = rng.choice(FORMS)
        return SamplingParams(**chosen)

    def _with_ending(self, rng: random.Random, wish: Wish) -> SamplingParams:
        """The parameters with a length, stops and logprobs; stops are looked for in the request's own answer.

        Most requests ask for logprobs: a wrong row that draws the right token shows in them alone.
        """
        changes: dict[str, Any] = {
            "max_tokens": rng.choice(
                [rng.randint(1, 4), rng.randint(2, self.subject.max_output), self.subject.max_output]
            ),
            "ignore_eos": rng.random() < 0.3,
            "logprobs": rng.choice([None, 0, 0, 0, 1, 4]),
        }
        kind = rng.random()
        if wish.is_exact and kind < 0.45:
            answer = self.subject.oracle.answer(wish)
            if kind < 0.25 and answer.text:
                start = rng.randrange(len(answer.text))
                changes["stop"] = (answer.text[start : start + rng.randint(1, 4)], _NEVER)
            elif kind >= 0.25:
                changes["stop_token_ids"] = (rng.choice(answer.token_ids), rng.randrange(self.subject.num_valid_tokens))
        if rng.random() < 0.08:
            changes["prompt_logprobs"] = rng.choice([0, 2])
        return wish.with_params(**changes).params
