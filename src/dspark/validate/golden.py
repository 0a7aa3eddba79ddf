"""The engine's model against a reference's numbers, quantity by quantity, with the tolerance that each dtype allows.

In fp32 the model must reproduce the reference; rows that rounding noise moves (a quantiser's code flips) are left out
of the comparison of numbers. In bf16 only what survives rounding is asked for: clear decisions, directions, most
drafts.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dspark.models.build import load_model
from dspark.ops.opset import TORCH_OPS, OpSet
from dspark.parallel.group import ALONE, RankGroup
from dspark.validate.golden_case import GoldenRun, read_case
from dspark.validate.teacher_forced import Observed, run_teacher_forced

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# fp32: largest absolute error on stable rows; a correct model is two orders of magnitude below it.
MAX_ERROR = 5e-3
# Gap between the two largest logits above which the choice must agree, whatever the rounding.
CLEAR_MARGIN = {"fp32": 0.5, "bf16": 1.5}
# bf16: mean cosine with the reference's rows, share of equal draft tokens, rms of confidence logits.
MIN_LOGIT_COSINE = 0.95
MIN_HIDDEN_COSINE = 0.98
MIN_DRAFT_COSINE = 0.9
MIN_EQUAL_DRAFTS = 0.7
MAX_CONFIDENCE_RMS = 2.0


@dataclass(frozen=True)
class Check:
    """One quantity of one run.

    Args:
        run: "long" or "short". dtype: of the activations.
        quantity: its name.
        largest_error: absolute, over all compared rows; None for what has no size, such as token ids.
        measured: the figure that decides, in words.
        is_ok: does it hold?
        num_rows, num_compared: rows of the reference, and how many of them were compared.
    """

    run: str
    dtype: str
    quantity: str
    largest_error: float | None
    measured: str
    is_ok: bool
    num_rows: int
    num_compared: int


@dataclass(frozen=True)
class GoldenReport:
    """All checks of one case."""

    case: str
    checks: tuple[Check, ...]

    @property
    def is_ok(self) -> bool:
        """Did every check hold?"""
        return all(check.is_ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"case": self.case, "ok": self.is_ok, "checks": [asdict(check) for check in self.checks]}


def validate_case(
    folder: Path,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    ops: OpSet = TORCH_OPS,
    device: str = "cpu",
    ranks: RankGroup = ALONE,
    whole_experts: bool = False,
) -> GoldenReport:
    """Compare the model of a golden folder with the folder's numbers.

    Args:
        folder: `model/` and at least one run beside it.
        dtypes: activations to try; see `DTYPES`.
        ops, device: twins and where they run.
        ranks, whole_experts: see `load_model`; every rank makes the comparison.

    Raises:
        DSparkError: the folder is no golden case, or its model cannot be loaded.
    """
    case = read_case(folder)
    checks: list[Check] = []
    for dtype in dtypes:
        for run in case.runs:
            # A fresh model for each run: nothing of one may help the other.
            model = load_model(case.model, ops, DTYPES[dtype], device=device, ranks=ranks, whole_experts=whole_experts)
            observed = run_teacher_forced(model, run)
            checks += _compare_run(run, observed, dtype)
    return GoldenReport(case.name, tuple(checks))


def _compare_run(run: GoldenRun, observed: Observed, dtype: str) -> Iterator[Check]:
    """Every quantity that the reference holds."""
    make = partial(Check, run.name, dtype)
    compare_rows = _compare_exactly if dtype == "fp32" else _compare_directions
    for quantity, part in (
        ("prefill_logits", "prefill"),
        ("decode_logits", "decode"),
        ("main_hidden_prefill", "prefill"),
        ("main_hidden_decode", "decode"),
    ):
        if quantity in run.tensors:
            yield compare_rows(make, quantity, getattr(observed, quantity), run.tensors[quantity], run, part)
    yield _compare_choices(make, observed, run, dtype)
    yield _compare_continuation(make, observed, run, dtype)
    if "engram_hash_ids" in run.tensors:
        yield _compare_integers(make, "engram_hash_ids", observed.engram_hash_ids, run.tensors["engram_hash_ids"])
    if "draft_ids" in run.tensors:
        yield from _compare_drafts(make, observed, run, dtype)
    elif observed.draft_ids is not None:
        rows = len(observed.draft_ids)
        yield make("draft_ids", None, "not compared: the case holds no draft_ids", True, rows, 0)


Make = Callable[..., Check]


def _compare_exactly(
    make: Make, quantity: str, found: Tensor | None, expected: Tensor, run: GoldenRun, part: str
) -> Check:
    """fp32: largest absolute error on the rows that noise does not move."""
    if found is None or found.shape != expected.shape:
        return _absent(make, quantity, found, expected)
    rows = run.stable(part, len(expected))
    largest = _largest((found.float() - expected.float())[rows])
    measured = f"at most {MAX_ERROR:.0e}"
    return make(quantity, largest, measured, largest <= MAX_ERROR, len(expected), int(rows.sum()))


def _compare_directions(
    make: Make, quantity: str, found: Tensor | None, expected: Tensor, run: GoldenRun, part: str
) -> Check:
    """bf16: mean cosine of rows."""
    if found is None or found.shape != expected.shape:
        return _absent(make, quantity, found, expected)
    cosine = float(cosine_similarity(found.float(), expected.float(), dim=-1).mean())
    least = MIN_HIDDEN_COSINE if quantity.startswith("main_hidden") else MIN_LOGIT_COSINE
    largest = _largest(found.float() - expected.float())
    measured = f"mean cosine {cosine:.4f}, at least {least}"
    return make(quantity, largest, measured, cosine > least, len(expected), len(expected))


def _compare_choices(make: Make, observed: Observed, run: GoldenRun, dtype: str) -> Check:
    """The most likely token of every position whose choice is decided."""
    expected = torch.cat([run.tensors["prefill_logits"], run.tensors["decode_logits"]])
    found = torch.cat([observed.prefill_logits, observed.decode_logits])
    rows = _decided(run, dtype)
    wrong = int((found.argmax(-1) != expected.argmax(-1))[rows].sum())
    return make("argmax", None, f"{wrong} wrong", wrong == 0, len(expected), int(rows.sum()))


def _decided(run: GoldenRun, dtype: str) -> Tensor:
    """[P + N] bool: positions whose two best logits are clearly apart or, in fp32, whose row is stable."""
    prefill, decode = run.tensors["prefill_logits"], run.tensors["decode_logits"]
    best = torch.cat([prefill, decode]).topk(2, dim=-1).values
    decided = best[:, 0] - best[:, 1] > CLEAR_MARGIN[dtype]
    if dtype == "fp32":
        decided |= torch.cat([run.stable("prefill", len(prefill)), run.stable("decode", len(decode))])
    return decided


def _compare_continuation(make: Make, observed: Observed, run: GoldenRun, dtype: str) -> Check:
    """Each generated token is the argmax of the row before it, so the greedy continuation is the reference's."""
    choices = torch.cat([observed.prefill_logits[-1:], observed.decode_logits]).argmax(-1)
    expected = torch.tensor(run.generated_ids)
    # The reference's own two dtypes agree on every generated token, so bf16 is asked for all of them.
    rows = _decided(run, dtype)[-len(expected) :] if dtype == "fp32" else torch.ones(len(expected), dtype=torch.bool)
    wrong = int((choices != expected)[rows].sum())
    return make("greedy_ids", None, f"{wrong} wrong", wrong == 0, len(expected), int(rows.sum()))


def _compare_integers(make: Make, quantity: str, found: Tensor | None, expected: Tensor) -> Check:
    if found is None or found.shape != expected.shape:
        return _absent(make, quantity, found, expected)
    wrong = int((found != expected).sum())
    return make(quantity, _largest(found - expected), f"{wrong} wrong", wrong == 0, len(found), len(found))


def _compare_drafts(make: Make, observed: Observed, run: GoldenRun, dtype: str) -> Iterator[Check]:
    """Draft tokens, logits and confidence; after a row's first different token its logits follow another text."""
    expected = run.tensors["draft_ids"]
    found = observed.draft_ids
    if found is None or observed.draft_logits is None or observed.confidence is None or found.shape != expected.shape:
        yield _absent(make, "draft_ids", found, expected)
        return
    if dtype == "fp32":
        rows = run.stable("draft", len(expected))
        wrong = int((found != expected)[rows].any(-1).sum())
        yield make("draft_ids", None, f"{wrong} rows wrong", wrong == 0, len(expected), int(rows.sum()))
        for quantity in ("draft_logits", "confidence"):
            yield _compare_exactly(make, quantity, getattr(observed, quantity), run.tensors[quantity], run, "draft")
        return
    equal = float((found == expected)[:, 1:].float().mean())
    measured = f"{equal:.0%} equal, at least {MIN_EQUAL_DRAFTS:.0%}"
    yield make("draft_ids", None, measured, equal >= MIN_EQUAL_DRAFTS, len(expected), len(expected))
    same_text = (found == expected)[:, :-1].long().cumprod(-1).bool()
    yield _compare_same_text(make, observed.draft_logits, run.tensors["draft_logits"], same_text)
    error = (observed.confidence - run.tensors["confidence"])[same_text]
    rms = float(error.square().mean().sqrt())
    measured = f"rms {rms:.3f}, at most {MAX_CONFIDENCE_RMS}"
    yield make("confidence", _largest(error), measured, rms < MAX_CONFIDENCE_RMS, len(expected), len(expected))


def _compare_same_text(make: Make, found: Tensor, expected: Tensor, same_text: Tensor) -> Check:
    """bf16 draft logits [N, G, V] at the positions [N, G] whose earlier draft tokens are the reference's."""
    left, right = found[same_text].float(), expected[same_text].float()
    cosine = float(cosine_similarity(left, right, dim=-1).mean())
    measured = f"mean cosine {cosine:.4f}, at least {MIN_DRAFT_COSINE}"
    largest = _largest(left - right)
    return make("draft_logits", largest, measured, cosine > MIN_DRAFT_COSINE, len(found), int(same_text.any(-1).sum()))


def _largest(difference: Tensor) -> float:
    """Largest absolute value; 0 where nothing was compared."""
    return float(difference.abs().max()) if difference.numel() else 0.0


def _absent(make: Make, quantity: str, found: Tensor | None, expected: Tensor) -> Check:
    shape = "nothing" if found is None else f"shape {list(found.shape)}"
    measured = f"the model gives {shape}, the reference shape {list(expected.shape)}"
    return make(quantity, None, measured, False, len(expected), 0)
