"""The ragged probe: rows of several requests in one target pass against the same rows alone, bit for bit."""

import random
from collections.abc import Iterator, Sequence

from torch import Tensor

from dspark.engine.runner import SpanTokens, TargetRunner
from dspark.state.model_state import ModelState, RequestState
from dspark.validate.lifecycle.probe import ProbeResult
from dspark.validate.lifecycle.scenarios.prompts import prompt, settings
from dspark.validate.lifecycle.subject import Subject

NUM_PASSES = 24
ARRANGEMENTS = ("together", "permuted", "padded", "split")

Rows = dict[int, tuple[Tensor, Tensor | None]]


def probe_ragged(subject: Subject) -> Iterator[ProbeResult]:
    """Each arrangement of spans of different lengths at different positions."""
    rows = _RaggedRows(subject)
    for arrangement in ARRANGEMENTS:
        yield rows.compare(arrangement, f"ragged rows on {subject.name}, {arrangement}")


class _RaggedRows:
    """Requests at positions around pages and the window, and the next rows of each."""

    def __init__(self, subject: Subject) -> None:
        page = subject.page_tokens
        starts = [0, 1, 2, 5, page - 1, page, page + 3, 2 * page - 2]
        self.lengths = [6, 1, 3, 9, 4, 1, 6, 5]
        engine = subject.loop(settings(subject, max_num_seqs=2 * len(starts), enable_prefix_caching=False)).engine
        self.state: ModelState = engine.state
        self.runner = TargetRunner(engine.model, self.state) if subject.ranks == 1 else engine.target
        self.texts = [prompt(subject, start + 16, number) for number, start in enumerate(starts)]
        self.requests = [self._prefilled(text, start) for text, start in zip(self.texts, starts, strict=True)]
        self.alone: Rows = {}
        for number in range(len(starts)):
            self.alone |= self._passed([number], 0)

    def _prefilled(self, text: Sequence[int], length: int) -> RequestState:
        request = self.state.open()
        if length:
            self.runner.forward([SpanTokens(request, [], text[:length], 1)])
            self.state.commit(request, length)
        return request

    def _passed(self, numbers: Sequence[int], num_padding: int) -> Rows:
        """Logits and features of some requests' next rows in one pass; nothing stays."""
        copies = [self.state.fork(self.requests[number]) for number in numbers]
        spans = []
        for copy, number in zip(copies, numbers, strict=True):
            start, length = copy.committed, self.lengths[number]
            text = self.texts[number]
            spans.append(SpanTokens(copy, text[:start], text[start : start + length], length))
        output = self.runner.forward(spans, num_padding)
        found: Rows = {}
        place = 0
        for number in numbers:
            rows = slice(place, place + self.lengths[number])
            hidden = None if output.target_hidden is None else output.target_hidden[rows].clone()
            found[number] = (output.logits[rows].clone(), hidden)
            place += self.lengths[number]
        for copy in copies:
            self.state.close(copy)
        self.state.check_integrity()
        return found

    def compare(self, arrangement: str, name: str) -> ProbeResult:
        """Pass the rows in many random orders."""
        rng = random.Random(arrangement)
        compared, wrong = 0, 0
        for _ in range(1 if arrangement == "together" else NUM_PASSES):
            for numbers, num_padding in self._arranged(arrangement, rng):
                for number, rows in self._passed(numbers, num_padding).items():
                    compared += self.lengths[number]
                    wrong += sum(_differing_rows(*pair) for pair in zip(rows, self.alone[number], strict=True))
        found = f"{wrong} rows differ" if wrong else "every row has the bits that it has alone"
        return ProbeResult(name, wrong == 0, compared, found)

    def _arranged(self, arrangement: str, rng: random.Random) -> list[tuple[list[int], int]]:
        """Requests of each pass, and its padding rows."""
        numbers = list(range(len(self.requests)))
        if arrangement == "together":
            return [(numbers, 0)]
        rng.shuffle(numbers)
        if arrangement == "split":
            cut = rng.randrange(1, len(numbers))
            return [(numbers[:cut], 0), (numbers[cut:], 0)]
        return [(numbers, rng.choice([1, 2, 7, 16]) if arrangement == "padded" else 0)]


def _differing_rows(found: Tensor | None, alone: Tensor | None) -> int:
    if found is None or alone is None:
        return 0
    return int((found != alone).any(dim=-1).sum())
