"""Memory is shared out from what is free: never past the margin, said in one sentence, refused with what would fit."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dspark import SpeculativeConfig
from dspark.config import Config, ConfigError
from dspark.engine import LLM, embedded_folder
from dspark.engine.assembly import assemble
from dspark.engine.device_memory import HostMemory, Room
from dspark.engine.device_round import DeviceRounds
from dspark.engine.graphs import GraphPlan
from dspark.engine.memory import pages_for, plan_memory, require_weights_fit
from dspark.engine.rehearsal import rehearse
from dspark.engine.runner import TargetRunner
from dspark.engine.sizing import measure_passes
from dspark.engine.speculation import Speculation
from dspark.models.model_bytes import held_bytes
from dspark.state.geometry import StateSizes, rows_ahead
from dspark.validate.doctor import examine
from dspark.validate.doctor_table import closing_lines, opening_lines
from support.divisible_models import write_divisible_checkpoint
from support.engines import tiny_engine
from support.fake_memory import FakeMemory
from support.tiny_checkpoints import write_tiny_checkpoint
from support.tiny_models import BLOCK, tiny_model

MIB = 2**20
SIZES = StateSizes(slot_bytes=MIB, page_bytes=2 * MIB, page_tokens=64)
SMALL: dict = {"max_num_seqs": 3, "max_model_len": 96, "max_num_batched_tokens": 64}


def shared_out(free_mib, margin_mib=10, workspaces_mib=0, max_len=256, **settings):
    config = Config(max_num_seqs=4, prefix_cache_bytes=MIB, **settings)
    room = FakeMemory(free_mib * MIB, margin_mib * MIB).room()
    workspaces = workspaces_mib * MIB
    return plan_memory(
        config, SIZES, room, weights=7, max_len=max_len, workspaces=workspaces, is_measured=workspaces_mib > 0
    )


def test_there_are_pages_for_every_request_at_full_length_where_they_fit():
    plan = shared_out(200)
    assert (plan.num_pages, plan.num_full_requests, plan.num_tokens) == (16, 4, 1024)
    assert plan.left == (200 - 10 - 4 - 1 - 32) * MIB
    assert plan.num_possible == 4 + 153 // 9


@pytest.mark.parametrize("workspaces", [0, 5, 11])
def test_otherwise_as_many_as_fit_beside_the_margin(workspaces):
    plan = shared_out(40, workspaces_mib=workspaces)
    assert plan.num_pages == (40 - 10 - 4 - 1 - workspaces) // 2
    taken = plan.state + plan.workspaces + plan.margin
    assert taken <= 40 * MIB < taken + 2 * plan.page_bytes
    assert plan.num_full_requests == plan.num_pages // 4 < 4


def test_the_sentence_names_every_part():
    words = shared_out(200, workspaces_mib=5).sentence()
    assert words.startswith("4 of 4 requests of up to 256 tokens fit at once, 1024 tokens of pages in all; weights ")
    for part in ("state 0.0361 GiB", "graphs and workspaces 0.00488 GiB", "margin 0.00977 GiB"):
        assert part in words
    assert "not measured" not in words
    assert "graphs and workspaces not measured, but in the margin, margin" in shared_out(200).sentence()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"free_mib": 12}, "lower max_num_seqs"),
        ({"free_mib": 20, "workspaces_mib": 9}, "lower max_num_seqs or max_num_batched_tokens"),
        ({"free_mib": 22, "max_len": 1024}, "set max_model_len to 192 or less"),
        ({"free_mib": 15, "workspaces_mib": 0}, "free memory"),
        ({"free_mib": 22, "max_num_pages": 9}, "max_num_pages 9 take .* 3 fit"),
        ({"free_mib": 15, "max_num_pages": 9}, "left for pages .* free memory"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(arguments, words):
    with pytest.raises(ConfigError, match=words):
        shared_out(**arguments)


def test_weights_that_do_not_fit_are_refused_before_they_are_read():
    room = FakeMemory(10 * MIB, 4 * MIB).room()
    require_weights_fit(room, 6 * MIB)
    with pytest.raises(ConfigError, match=r"the weights need 0\.00684 GiB"):
        require_weights_fit(room, 7 * MIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def test_an_engine_is_sized_by_what_its_largest_passes_take(folder, monkeypatch, caplog):
    memory = FakeMemory(64 * MIB, margin=8 * MIB, need=20 * MIB)
    monkeypatch.setattr("dspark.engine.assembly.memory_of", lambda *place: memory)
    with caplog.at_level(logging.INFO, "dspark.engine"):
        llm = LLM(folder, **SMALL)
    plan = llm.loop.memory
    assert memory.works == 1 and plan.workspaces == 20 * MIB and plan.is_measured
    assert plan.weights == held_bytes(llm.loop.engine.model)
    assert any(plan.sentence() in record.getMessage() for record in caplog.records)
    state = llm.loop.engine.state
    assert sum(ring.nbytes for ring in state.rings.values()) == plan.slots
    assert sum(rows.nbytes for rows in state.appends.values()) == plan.num_pages * plan.page_bytes
    status = json.loads(json.dumps(llm.loop.status().to_dict()))
    assert status["memory"]["num_full_requests"] == plan.num_full_requests == 3
    assert len(llm.generate([[1, 2, 3]])[0].token_ids) > 1


def test_an_engine_whose_passes_take_everything_is_refused(folder, monkeypatch):
    monkeypatch.setattr(
        "dspark.engine.assembly.memory_of", lambda *place: FakeMemory(64 * MIB, need=63 * MIB + 9 * 10**5)
    )
    with pytest.raises(ConfigError, match="lower max_num_seqs"):
        LLM(folder, **SMALL)


def test_a_model_that_does_not_fit_is_not_read(folder, monkeypatch):
    monkeypatch.setattr("dspark.engine.assembly.memory_of", lambda *place: FakeMemory(1000))
    monkeypatch.setattr(
        "dspark.engine.ranks.opening.load_model", lambda *args, **options: pytest.fail("weights were read")
    )
    with pytest.raises(ConfigError, match="the weights need"):
        LLM(folder, **SMALL)


def test_pages_that_are_given_need_no_measurement(folder, monkeypatch):
    memory = FakeMemory(64 * MIB, need=20 * MIB)
    monkeypatch.setattr("dspark.engine.assembly.memory_of", lambda *place: memory)
    assert LLM(folder, **SMALL, max_num_pages=5).loop.memory.num_pages == 5
    assert memory.works == 0


def test_the_rehearsal_runs_the_deepest_chunk_and_whole_rounds(monkeypatch):
    """Rows and positions of its passes are the largest that the engine can have."""
    seen = []
    forward = TargetRunner.forward

    def noted(self, spans, num_padding=0):
        seen.append(([len(span.token_ids) for span in spans], max(s.state.committed + len(s.token_ids) for s in spans)))
        return forward(self, spans, num_padding)

    monkeypatch.setattr(TargetRunner, "forward", noted)
    engine = tiny_engine(("v41",), num_slots=3, num_pages=1, page_tokens=8)
    rehearse(engine, 3, 20, 90)
    assert seen[0] == ([20], 90 - 6 * (1 + BLOCK))
    assert seen[-1][0] == [1 + BLOCK] * 3


def test_the_rehearsal_runs_rounds_ahead(monkeypatch):
    """What they capture is measured as well."""
    shapes, launch = [], DeviceRounds.launch
    monkeypatch.setattr(DeviceRounds, "launch", lambda self, shape: (shapes.append(shape), launch(self, shape))[1])
    graphs = GraphPlan((3, 9, 18), 90, is_captured=False)
    ahead = rows_ahead(1 + BLOCK)
    engine = tiny_engine(("v41",), graphs=graphs, num_slots=3, num_pages=1, page_tokens=8, max_ahead=ahead)
    rehearse(engine, 3, 20, 90)
    assert len(shapes) == 2 and shapes[0].num_rows == 18 and shapes[0].num_blocks == 3


@pytest.mark.parametrize("num_requests", [1, 3])
def test_no_request_ends_in_a_rehearsal_without_drafts(num_requests):
    """The device would have nothing to run ahead with."""
    graphs = GraphPlan((1, 2, 3), 90, is_captured=False)
    engine = tiny_engine(
        ("v4",), Speculation(), graphs=graphs, num_slots=num_requests, num_pages=1, max_query_len=1, max_ahead=2
    )
    rehearse(engine, num_requests, 20, 90)
    assert all(request.finish_reason is None for request in engine.requests.values())


@pytest.mark.parametrize("max_len", [512, 1024])
def test_the_rehearsal_of_requests_that_fill_a_capacity(max_len):
    """The page table of a graph has no room for more than the longest request's pages there."""
    graphs = GraphPlan((3, 9, 18), max_len, is_captured=False)
    engine = tiny_engine(
        ("v4",), graphs=graphs, num_slots=3, num_pages=1, page_tokens=8, max_ahead=rows_ahead(1 + BLOCK)
    )
    rehearse(engine, 3, 20, max_len)


@pytest.mark.parametrize("graphs", [None, GraphPlan((2, 6, 12), 19, is_captured=False)], ids=["op by op", "graphs"])
@pytest.mark.parametrize("max_len", [2, 5, 19])
def test_the_rehearsal_of_short_requests(max_len, graphs):
    engine = tiny_engine(
        ("v4",), graphs=graphs, num_slots=2, num_pages=1, page_tokens=8, max_ahead=rows_ahead(1 + BLOCK)
    )
    rehearse(engine, 2, 40, max_len)


def test_rounds_longer_than_any_request_are_rehearsed(monkeypatch):
    """A draft may be so wide that a few rounds need more positions than a graph of the longest request sees."""
    monkeypatch.setattr("dspark.engine.graphs._LEAST_CAPACITY", 8)
    parts = SimpleNamespace(
        config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=20),
        max_model_len=7,
        speculation=Speculation(BLOCK),
        model=tiny_model("v4"),
        graphs=lambda: GraphPlan((2, 6, 12), 7, is_captured=False),
        engine=lambda num_pages, graphs=None: tiny_engine(
            ("v4",),
            graphs=graphs or parts.graphs(),
            num_slots=2,
            num_pages=num_pages,
            max_ahead=rows_ahead(1 + BLOCK),
        ),
    )
    memory = SimpleNamespace(need_of=lambda work: work() or 5)
    assert measure_passes(parts, memory) > 5


def test_each_rank_has_a_device_or_its_part_of_the_host():
    room = Room("a place", 100, 80, 21)
    assert room.for_each(1, torch.device("cpu")) is room
    assert room.for_each(2, torch.device("cuda")) == replace(room, place="each rank's a place")
    assert room.for_each(2, torch.device("cpu")) == Room("each rank's part of a place", 50, 40, 10)


def test_memory_of_ranks_is_that_of_one_and_named_so(tmp_path):
    folder = write_divisible_checkpoint(tmp_path / "model", "v4")
    whole, half = (examine(folder, Config(tensor_parallel_size=size, **SMALL)).memory for size in (1, 2))
    assert "; weights" in whole.sentence() and "; each of 2 ranks has weights" in half.sentence()
    assert half.sentence().endswith("of each rank's part of this machine")
    assert half.num_ranks == 2 and half.weights < whole.weights
    assert half.total == whole.total // 2 and half.num_pages == whole.num_pages


def test_this_machine_has_memory():
    room = HostMemory().room()
    assert 0 < room.margin < room.free <= room.total


@pytest.mark.parametrize(("used", "free"), [(30 * MIB, 58 * MIB), (63 * MIB, 25 * MIB)])
def test_files_that_a_container_has_read_give_way(tmp_path, monkeypatch, used, free):
    """A first start leaves the checkpoint in the page cache; the second must not be refused for that."""
    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file {4 * MIB}\ninactive_file {20 * MIB}\nbroken\n")
    monkeypatch.setattr("dspark.engine.device_memory._CGROUP", tmp_path)
    room = HostMemory().room()
    assert (room.total, room.free) == (64 * MIB, free)


def test_a_margin_that_a_setting_decides_is_named():
    room = Room("a GPU", 100 * MIB, 90 * MIB, 89 * MIB, "gpu_memory_utilization")
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization, use a larger device"):
        require_weights_fit(room, 2 * MIB)
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization, lower max_num_seqs"):
        plan_memory(Config(), SIZES, room, weights=7, max_len=64, workspaces=0, is_measured=False)


def test_the_doctor_says_what_fits(folder, monkeypatch):
    report = examine(folder, Config(speculative_config=SpeculativeConfig(), **SMALL))
    llm = assemble(folder, **SMALL)
    foreseen, there = report.memory, llm.loop.memory
    assert (foreseen.num_pages, foreseen.slots) == (there.num_pages, there.slots)
    assert any(foreseen.sentence() in line for line in closing_lines(report))
    monkeypatch.setattr("dspark.validate.doctor.memory_of", lambda *place: FakeMemory(1000))
    cramped = examine(folder, Config(**SMALL))
    assert cramped.memory is None and cramped.is_healthy
    assert any("not here: the weights need" in line for line in opening_lines(cramped))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without an accelerator")
def test_the_doctor_says_what_this_machine_lacks():
    """The rest of its report is about any machine."""
    report = examine(embedded_folder(), Config(engram_tables="pinned", speculative_config=SpeculativeConfig()))
    assert report.memory is None and "pinned needs an accelerator" in (report.memory_fault or "")
    assert any("not here: engram_tables pinned" in line for line in opening_lines(report))


def test_pages_of_a_request():
    assert [pages_for(n, 64) for n in (1, 64, 65)] == [1, 1, 2]
