"""Which shapes are captured, by mode: whole passes over short spans, pieces of passes over any."""

import pytest
import torch

from dspark.config import CompilationConfig, Config
from dspark.engine.graphs import DEFAULT_ROW_COUNTS, plan_graphs

CUDA = torch.device("cuda")


def plan_of(mode, sizes=(), **settings):
    compilation = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    return plan_graphs(Config(compilation_config=compilation, **settings), CUDA, 6, 4096)


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
def test_whole_passes_reach_the_rows_of_a_full_round(mode):
    plan = plan_of(mode, max_num_seqs=9)
    assert plan.row_counts == DEFAULT_ROW_COUNTS[: DEFAULT_ROW_COUNTS.index(64) + 1]
    assert plan.runs_ahead


@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
@pytest.mark.parametrize(("most", "last"), [(400, 512), (512, 512), (513, 1024), (2048, 2048), (2100, 2560)])
def test_pieces_reach_the_rows_of_a_pass(mode, most, last):
    plan = plan_of(mode, max_num_batched_tokens=most)
    assert plan.piece_counts[-1] == last and plan.pieces_for(most) == last
    assert plan.pieces_for(last + 1) is None


def test_pieces_end_where_all_requests_are_whole():
    plan = plan_of("piecewise", max_num_batched_tokens=10**15, max_num_seqs=2)
    assert plan.piece_counts[-1] == 8192, "two requests of 4096 tokens"


def test_pieces_alone_capture_no_pass_whole():
    plan = plan_of("piecewise")
    assert plan.row_counts == () and plan.rows_for(1) is None and not plan.runs_ahead
    assert plan_of("full").pieces_for(1) is None
    assert plan_of("none") is None


def test_sizes_that_are_asked_for_hold_for_both():
    plan = plan_of("full_and_piecewise", (4, 100, 300), max_num_seqs=4)
    assert plan.row_counts == (4, 100) and plan.piece_counts == (4, 100, 300)
