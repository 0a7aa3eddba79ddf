"""Two ranks that share a golden model reproduce the reference's numbers, within the tolerances of one."""

from pathlib import Path

import pytest

from dspark.parallel.group import RankGroup
from dspark.validate.golden import validate_case
from support.rank_processes import run_ranks

# The fourth case has one quantisation block a width and cannot be divided.
CASES = ["v41_bf16", "v41_quant", "v4_bf16"]


def missed(group: RankGroup, folder: Path) -> list[str]:
    """Checks that do not hold on this rank, with each rank's experts narrower and fewer; none may be left out."""
    found = []
    for whole_experts in (False, True):
        report = validate_case(folder, ("fp32",), ranks=group, whole_experts=whole_experts)
        assert {"decode_logits", "main_hidden_decode", "draft_logits"} <= {check.quantity for check in report.checks}
        found += [f"{check} (whole experts: {whole_experts})" for check in report.checks if not check.is_ok]
    return found


@pytest.mark.parametrize("case", CASES)
def test_case_is_reproduced_by_two_ranks(shared_dir, tmp_path, case):
    assert run_ranks(tmp_path, 2, missed, shared_dir / "golden" / case) == [[], []]
