"""Calls of an LLM do not disturb each other: refusals, abandoned streams and interleaved ones leave nothing behind."""

import json

import pytest

from dspark import SamplingParams
from dspark.config import CheckpointError, ConfigError
from dspark.engine import LLM
from dspark.engine.tokenizer import generation_eos_ids
from support.tiny_checkpoints import write_tiny_checkpoint

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
OTHER = [27, 18, 28]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    return LLM(folder, max_num_seqs=3, max_model_len=96, max_num_batched_tokens=64)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    assert not llm.loop.engine.requests and not llm.loop.scheduler.running and not llm.loop.scheduler.waiting
    assert not llm._undelivered
    llm.loop.engine.state.check_integrity()


def tokens(emissions):
    return [token for emission in emissions for token in emission.token_ids]


@pytest.mark.parametrize("refused", [[1] * 96, [], [10**9], [1.5], [True], None, 7, b"ab", "a\ud800"])
def test_a_refused_prompt_takes_those_before_it_out_again(llm, refused):
    with pytest.raises(ConfigError):
        llm.generate([PROMPT, OTHER, refused], GREEDY)


@pytest.mark.parametrize("params", [{"temperature": 1}, [None], [GREEDY, GREEDY]])
def test_params_of_another_type_or_number_are_refused(llm, params):
    with pytest.raises(ConfigError, match=r"parameters|SamplingParams"):
        llm.generate([PROMPT], params)


def test_streams_and_calls_may_be_interleaved(llm):
    expected = [completion.token_ids for completion in llm.generate([PROMPT, OTHER], GREEDY)]
    first, second = llm.stream(PROMPT, GREEDY), llm.stream(OTHER, GREEDY)
    heads = [next(first), next(second)]
    assert [completion.token_ids for completion in llm.generate([OTHER, PROMPT], GREEDY)] == expected[::-1]
    assert tokens([heads[1], *second]) == expected[1]
    assert tokens([heads[0], *first]) == expected[0]


def test_an_abandoned_stream_frees_its_place(llm):
    expected = llm.generate(OTHER, GREEDY)[0].token_ids
    streams = [llm.stream(PROMPT, GREEDY) for _ in range(3)]
    for stream in streams:
        next(stream)
        stream.close()
    assert llm.generate(OTHER, GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("place", ["_commit", "_absorb", "_propose", "_verify"])
def test_a_failure_inside_a_step_frees_the_request(llm, monkeypatch, place):
    expected = llm.generate(OTHER, GREEDY)[0].token_ids
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.loop.engine, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert llm.generate(OTHER, GREEDY)[0].token_ids == expected


def interrupt(*_args):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("eos", "wrong"), [("x", "'x'"), ([1, None], "None"), (True, "True"), (1.5, "1.5")])
def test_end_of_sequence_ids_of_the_wrong_kind_are_refused(tmp_path, eos, wrong):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CheckpointError, match=f"holds {wrong}, which is no token id"):
        generation_eos_ids(tmp_path)


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (3, (3,)), ([1, 2], (1, 2))])
def test_end_of_sequence_ids_are_none_one_or_several(tmp_path, eos, ids):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert generation_eos_ids(tmp_path) == ids
