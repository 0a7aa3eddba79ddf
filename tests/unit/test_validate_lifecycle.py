"""The lifecycle validator finds what it is there to find: faults put into the engine, one at a time, in tests only.

Each fault is one that some engine had. A fault counts as found when a scenario, or a random episode, that passes
without it fails with it. Answers of requests alone are computed before a fault is put in, as they are in life: alone,
most of these faults do not show.
"""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from dspark.cli.app import app
from dspark.config.sampling import SamplingParams
from dspark.engine import core
from dspark.engine.request import TokenLogprob
from dspark.sampling.rows import RequestSampling, RowSampling
from dspark.state import model_state
from dspark.state.model_state import ModelState
from dspark.state.prefix_cache import PrefixCache, PrefixChain
from dspark.state.views import PassView
from dspark.validate.lifecycle.catalogue import Catalogue
from dspark.validate.lifecycle.episodes import Arrival, Episode, make_episode, play
from dspark.validate.lifecycle.evidence import NotExercisedError, require
from dspark.validate.lifecycle.report import lines, tables
from dspark.validate.lifecycle.run import Budget, Run
from dspark.validate.lifecycle.sampling_probe import chi_square_p
from dspark.validate.lifecycle.scenarios.prompts import hot
from dspark.validate.lifecycle.scenarios.registry import SCENARIOS, ScenarioResult, run_scenario
from dspark.validate.lifecycle.settings import EngineSettings
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.tiny import TINY_NAMES, write_tiny_checkpoint
from dspark.validate.lifecycle.wishes import Answer, Wish, first_difference


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return {name: Subject(name, write_tiny_checkpoint(folder / name, name), 512, 20) for name in TINY_NAMES}


@pytest.fixture
def subject(subjects):
    """A model whose answers alone were all computed without a fault."""
    one = subjects["shared-rows"]
    kept = [
        (oracle, dict(answers))
        for oracle, answers in ((one.oracle, one.oracle._answers), (one._drafts, one._drafts._blocks))
    ]
    yield one
    for oracle, answers in kept:
        name = "_answers" if oracle is one.oracle else "_blocks"
        setattr(oracle, name, answers)


# Faults ---------------------------------------------------------------------------------------------------------------


def skip_absorb_in_plain_rounds(patch):
    """A step in which a request verifies nothing leaves the draft windows as they were."""
    absorb = core.Engine._absorb

    def skipping(self, plan, spans, committed, output):
        if all(span.verify_len or span.num_known > 1 for span in plan.spans):
            absorb(self, plan, spans, committed, output)

    patch.setattr(core.Engine, "_absorb", skipping)


def commit_one_row_fewer(patch):
    commit = ModelState.commit
    patch.setattr(ModelState, "commit", lambda self, request, rows: commit(self, request, max(rows - 1, 1)))


def commit_rejected_rows(patch):
    commit = ModelState.commit
    patch.setattr(
        ModelState, "commit", lambda self, request, rows: commit(self, request, min(rows + 1, request.tentative))
    )


def restore_stale_rings(patch):
    """A hit finds the windows that the slot's last owner left."""
    restore = ModelState.restore

    def stale(self, image):
        rings = {key: ring.clone() for key, ring in self.rings.items()}
        request = restore(self, image)
        for key, ring in rings.items():
            self.rings[key].copy_(ring)
        return request

    patch.setattr(ModelState, "restore", stale)


def restore_without_draft_window(patch):
    """A hit leaves the draft window empty."""
    restore = ModelState.restore

    def without(self, image):
        request = restore(self, image)
        for key in self.rings:
            if key.startswith("mtp"):
                self.rings[key][request.slot] = 0.0
        return request

    patch.setattr(ModelState, "restore", without)


def emit_after_stop(patch):
    """Every token of a verdict is emitted, also behind the one that ends the output."""

    def all_of_them(request, token_ids, eos_token_ids):
        reasons = []
        for token in token_ids:
            request.token_ids.append(token)
            is_stop = token in request.params.stop_token_ids
            is_end = is_stop or (token in eos_token_ids and not request.params.ignore_eos) or request.text.push(token)
            reasons.append("stop" if is_end else "length" if request.num_left <= 0 else None)
        request.finish_reason = next((reason for reason in reasons if reason), None)
        return list(token_ids)

    patch.setattr(core, "take_tokens", all_of_them)


def replay_pending_drafts(patch):
    """A preempted request keeps the drafts that it had not verified."""
    preempt = core.Engine.preempt

    def with_drafts(self, request_id):
        request = self.requests[request_id]
        if request.state is not None and request.draft is not None and request.num_left > 2:
            request.token_ids += request.draft.token_ids[:1]
        preempt(self, request_id)

    patch.setattr(core.Engine, "preempt", with_drafts)


def padding_writes_into_slot_zero(patch):
    write = PassView._write_ring

    def writing(self, ring, rows):
        joined = write(self, ring, rows)
        if self.rows.num_padding:
            ring[0, :] = rows[-1].to(ring.dtype)
        return joined

    patch.setattr(PassView, "_write_ring", writing)


def share_half_filled_pages(patch):
    """A fork writes into the page that its source still fills."""
    patch.setattr(ModelState, "_copied", lambda self, page: self.pages.share(page))


def forget_pages(patch):
    """A closed request gives its slot back, and not its pages."""

    def close(self, request):
        self.requests.remove(request)
        self._free_slots.append(request.slot)

    patch.setattr(ModelState, "close", close)


def find_by_length_only(patch):
    """Cached blocks are told apart by their number, not by their tokens."""

    def extend(self, token_ids, num_blocks):
        self.digests += [b"%d" % number for number in range(len(self.digests), num_blocks)]

    patch.setattr(PrefixChain, "extend", extend)


def keep_image_at_wrong_place(patch):
    """An image is entered under one token more than it holds."""
    keep = PrefixCache.keep

    def shifted(self, chain, token_ids, request, at):
        keep(self, chain, token_ids, request, max(at - 1, request.restored))
        for entry in list(self._entries.values())[-1:]:
            entry.image.committed = min(at, request.committed)

    patch.setattr(PrefixCache, "keep", shifted)


def penalties_once_a_round(patch):
    """Rows inside a block do not count the drafts before them."""

    def rows(self, draft_ids):
        start = len(self.history)
        return [RowSampling(self.params, start + k, self.prompt_len, self.history) for k in range(len(draft_ids) + 1)]

    patch.setattr(RequestSampling, "rows", rows)


def noise_by_row(patch):
    """Noise is keyed by the row of the pass, not by the position."""
    row = RequestSampling.row

    def keyed(self, tentative=(), stream=0):
        found = row(self, tentative, stream)
        return RowSampling(self.params, len(tentative), self.prompt_len, found.history, tentative, stream)

    patch.setattr(RequestSampling, "row", keyed)


def logprobs_of_the_anchor(patch):
    """Every token of a round is reported with the log-probability of its first."""
    measured = core.token_logprobs

    def first(*args):
        found = measured(*args)
        return [replace(one, token=found[0].token) for one in found]

    patch.setattr(core, "token_logprobs", first)


def rings_without_room(patch):
    """Tentative rows overwrite rows that the next pass needs."""
    patch.setattr(model_state, "ring_rows", lambda ring, *_: ring.reach + 1)
    patch.setattr(model_state, "require_ring_rows", lambda *_: None)


FAULTS = {
    rings_without_room: "padding-rows-inert",
    skip_absorb_in_plain_rounds: "varying-verify-lengths",
    commit_one_row_fewer: "slot-reuse-and-output-cap",
    commit_rejected_rows: "slot-reuse-and-output-cap",
    restore_stale_rings: "samples-forked-after-prefill",
    restore_without_draft_window: "warm-equals-cold",
    emit_after_stop: "stop-inside-accepted-block",
    replay_pending_drafts: "repeated-preemption-of-one-request",
    padding_writes_into_slot_zero: "padding-rows-inert",
    share_half_filled_pages: "exact-prefix-fork",
    forget_pages: "abort-and-survivor",
    find_by_length_only: "prompts-that-part",
    keep_image_at_wrong_place: "warm-equals-cold",
    penalties_once_a_round: "mixed-stochastic-requests",
    noise_by_row: "mixed-stochastic-requests",
    logprobs_of_the_anchor: "mixed-stochastic-requests",
}


@pytest.mark.parametrize(("fault", "name"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS])
def test_a_scenario_finds_a_fault(subject, monkeypatch, fault, name):
    before = run_scenario(name, subject)
    assert before.verdict == "passed", before.message
    fault(monkeypatch)
    after = run_scenario(name, subject)
    assert after.verdict == "failed", f"{fault.__name__} was not found: {after}"


class FewRequests:
    """A catalogue of five requests: one long prompt twice, one that shares its length, samples, and a short one."""

    def __init__(self, subject):
        self.subject = subject
        long = hot(subject, 132, 1)
        samples = [hot(subject, 70, 3, seed=seed) for seed in (1, 2)]
        self.entries = [(long,), (long.with_params(seed=5),), (hot(subject, 132, 2),), samples, (hot(subject, 9, 4),)]

    def entry(self, number):
        return tuple(self.entries[number])


EPISODE = Episode(
    number=0,
    settings=EngineSettings(max_num_seqs=3, max_num_batched_tokens=40, lengths_seed=1),
    arrivals=(
        Arrival(entry=0, step=0, preempt_after=(8,)),
        Arrival(entry=3, step=2),
        Arrival(entry=2, step=4, preempt_after=(12,)),
        Arrival(entry=4, step=5, preempt_after=(3, 5)),
        Arrival(entry=1, step=18),
    ),
)


@pytest.mark.parametrize(
    "fault", [restore_stale_rings, replay_pending_drafts, commit_rejected_rows, find_by_length_only, noise_by_row]
)
def test_an_episode_finds_a_fault(subject, monkeypatch, fault):
    catalogue = FewRequests(subject)
    healthy = play(catalogue, EPISODE)
    assert healthy.failure is None
    assert healthy.events["cache hits"] > 1
    fault(monkeypatch)
    assert play(catalogue, EPISODE).failure is not None


# Without a fault ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_happens_and_passes(subject, name):
    result = run_scenario(name, subject)
    assert result.is_ok, result.message
    assert result.story.endswith(".")


def test_a_story_that_did_not_happen_is_no_pass(subject, monkeypatch):
    def quiet(subject):
        require(False, "something happened")

    monkeypatch.setitem(SCENARIOS, "quiet", quiet)
    result = run_scenario("quiet", subject)
    assert (result.verdict, result.is_ok) == ("not exercised", False)
    assert isinstance(NotExercisedError("x"), Exception)
    assert "something happened" in result.message


def test_an_episode_is_what_its_number_says(subject):
    first, second = (make_episode(Catalogue(subject, 3, 180), 7) for _ in range(2))
    assert first == second
    assert first != make_episode(Catalogue(subject, 4, 180), 7)


def test_a_failure_is_cut_down_and_can_be_played_again(subject, monkeypatch):
    run = Run(subject, [], seed=5, max_prompt=180)
    run.episodes(Budget(episodes=3))
    assert run.report.is_ok
    commit_rejected_rows(monkeypatch)
    run = Run(subject, [], seed=5, max_prompt=180, model_flag=("--model", "a folder"))
    run.episodes(Budget(episodes=3))
    failure = run.report.failures[0]
    assert failure.replay.startswith(
        f"dspark validate lifecycle --model 'a folder' --seed 5 --episode {failure.episode}"
    )
    assert len(failure.arrivals) < len(make_episode(Catalogue(subject, 5, 180), failure.episode).arrivals)
    again = Run(subject, [], seed=5, max_prompt=180)
    again.replay(failure.episode, failure.arrivals)
    assert not again.report.is_ok
    json.dumps(run.report.as_json())
    assert any(failure.replay in line for line in lines(run.report))


def scored(value):
    return TokenLogprob(value, (), 1, 1)


def test_differences_are_found_where_they_are():
    wanted = Answer((1, 2, 3), "abc", "length", (scored(-1.0),) * 3)
    assert first_difference(wanted, wanted) is None
    assert first_difference(wanted, Answer((1, 2), "ab", None, wanted.logprobs[:2])) is None
    assert first_difference(wanted, Answer((1, 2), "ab", "length", wanted.logprobs[:2])).place == 2
    assert first_difference(wanted, Answer((1, 2, 3), "abx", "length", wanted.logprobs)).what == "text"
    assert first_difference(wanted, Answer((1, 2, 3), "abc", "stop", wanted.logprobs)).what == "finish_reason"
    other = (scored(-1.0), scored(-1.0000001), scored(-1.0))
    assert first_difference(wanted, Answer((1, 2, 3), "abc", "length", other)).place == 1
    assert first_difference(wanted, Answer((1, 2, 3, 4), "abc", "length", wanted.logprobs)).found == 4


def test_requests_are_told_apart_by_all_that_they_ask():
    wish = Wish((1, 2), SamplingParams(logit_bias={3: 1.0}))
    assert wish.key != wish.with_params(seed=1).key
    assert wish.as_json() == {"prompt_ids": [1, 2], "params": {"logit_bias": {"3": 1.0}}}


def test_chi_square():
    assert chi_square_p([25, 25, 50], [25.0, 25.0, 50.0]) == pytest.approx(1.0)
    assert chi_square_p([40, 60], [50.0, 50.0]) == pytest.approx(0.0455, abs=1e-4)
    assert chi_square_p([0, 100], [50.0, 50.0]) < 1e-9


# The command ----------------------------------------------------------------------------------------------------------

REPORT = {"schema", "is_ok", "model", "seed", "machine", "seconds", "num_steps", "scenarios", "probes", "episodes"}


@pytest.fixture
def small(monkeypatch, subjects):
    """The command on the tiny models alone."""
    opened = lambda model, folder, seed, ranks, on_progress: Run(  # noqa: E731
        subjects["own-rows"], [subjects["shared-rows"]], seed, 180, (), on_progress
    )
    monkeypatch.setattr("dspark.cli.validate_lifecycle._open", opened)
    return lambda *flags: CliRunner().invoke(app, ["validate", "lifecycle", *flags])


def test_a_report_for_programs(small, tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    monkeypatch.setattr("dspark.cli.validate_lifecycle.SCENARIOS", {"warm-equals-cold": None})
    result = small("--episodes", "2", "--seed", "5", "--json", "--output", str(file))
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report == json.loads(file.read_text())
    assert set(report) == REPORT | {"failures"}
    assert report["schema"] == "dspark.validate.lifecycle/1"
    assert {one["verdict"] for one in report["scenarios"]} <= {"passed", "not applicable"}
    assert report["num_steps"] == sum(counts["num_steps"] for counts in report["episodes"]) > 0


def test_a_mismatch_exits_with_one(small, monkeypatch):
    name = "warm-equals-cold"
    assert small("--scenario", name).exit_code == 0
    restore_without_draft_window(monkeypatch)
    result = small("--scenario", name)
    assert result.exit_code == 1
    assert f"{name} on shared-rows: failed" in result.output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--scenario", "nonsense"], "known are"),
        (["--seconds", "1", "--episodes", "1"], "give one of them"),
        (["--arrivals", "1"], "--episode"),
        (["--episode", "1", "--arrivals", "x"], "numbers with commas"),
        (["--episode", "1", "--arrivals", "1,-2"], "numbers with commas"),
        (["--episode", "1", "--arrivals", "9" * 5000], "numbers with commas"),
        (["--episode", "1", "--arrivals", "0,9999"], "episode 1 has requests 0 to"),
        (["--episodes", "-1"], "give 0 or more"),
        (["--model", "no such folder"], "does not exist"),
    ],
)
def test_wrong_flags_are_refused(flags, sentence):
    result = CliRunner().invoke(app, ["validate", "lifecycle", *flags])
    assert result.exit_code != 0
    assert sentence in str(result.exception)


def test_people_get_tables(subject):
    result = ScenarioResult(subject.name, "a", "Story.", "failed", 0.1, {}, "broken")
    run = Run(subject, [], seed=0, max_prompt=100)
    run.report.scenarios.append(result)
    assert [table.row_count for table in tables(run.report)] == [1]
    assert "a on shared-rows: failed: broken" in lines(run.report)[0]
