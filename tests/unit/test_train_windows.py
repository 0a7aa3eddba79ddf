"""Training windows: where they begin, exact domain shares, and batches that depend on (seed, step) only."""

import numpy as np
import pytest

from dspark.config.errors import DSparkError
from dspark.train.tokens import TokenArray
from dspark.train.windows import TokenBatches, WindowSampler, heldout_batches, mixture_pattern, plan_windows


def array(first, lengths):
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    return TokenArray(np.arange(first, first + sum(lengths), dtype=np.int16), starts, 3 * sum(lengths))


ARRAYS = {"code": array(0, [50] * 20), "chat": array(2000, [7] * 60)}
MIXTURE = {"code": 3, "chat": 1}


def test_windows_begin_at_short_documents_and_continue_long_ones():
    assert plan_windows(np.arange(0, 40, 5), 40, 8).tolist() == [0, 8, 15, 23, 30]
    assert plan_windows(np.arange(0, 40, 7), 42, 8).tolist() == [0, 7, 14, 21, 28]
    assert plan_windows(np.array([0]), 30, 8).tolist() == [0, 8, 16]
    assert plan_windows(np.array([0]), 30, 8, offset=3).tolist() == [3, 11, 19]
    with pytest.raises(DSparkError, match="cannot fill"):
        plan_windows(np.array([0]), 7, 8)


def test_every_token_of_a_long_run_is_covered():
    starts = np.array([0, 13, 14, 29, 60, 61, 90])
    windows = plan_windows(starts, 128, 16)
    covered = set().union(*(range(w, w + 16) for w in windows))
    assert covered >= set(range(int(windows[-1]) + 16))


def test_pattern_spreads_domains_evenly():
    assert mixture_pattern({"a": 3, "b": 1}) == ("a", "a", "b", "a")
    with pytest.raises(DSparkError, match="positive"):
        mixture_pattern({"a": 0})


def test_shares_are_exact_and_every_window_is_read_once_an_epoch():
    sampler = WindowSampler(ARRAYS, MIXTURE, 16, seed=1)
    starts, domain = sampler.window_starts(0, 400)
    assert np.bincount(domain).tolist() == [300, 100]
    per_epoch = len(plan_windows(ARRAYS["code"].starts, 1000, 16))
    code = starts[domain == 0]
    assert len(set(code[:per_epoch].tolist())) == per_epoch
    assert sampler.epochs(400)["code"] == pytest.approx(300 / per_epoch)


def test_a_step_is_the_same_whatever_came_before_it():
    sampler = WindowSampler(ARRAYS, MIXTURE, 16, seed=1)
    whole = sampler.window_starts(0, 64)[0]
    parts = [WindowSampler(ARRAYS, MIXTURE, 16, seed=1).window_starts(step, 8)[0] for step in range(7, -1, -1)]
    assert np.array_equal(np.concatenate(parts[::-1]), whole)
    assert not np.array_equal(WindowSampler(ARRAYS, MIXTURE, 16, seed=2).window_starts(0, 64)[0], whole)


def test_batches_hold_the_tokens_of_their_domain():
    sampler = WindowSampler(ARRAYS, MIXTURE, 16, seed=1)
    batch = TokenBatches(sampler, 8).batch(3)
    domain = sampler.window_starts(3, 8)[1]
    assert batch.shape == (8, 16)
    assert ((batch[:, 0] >= 2000).numpy() == (domain == 1)).all()
    assert (batch.diff(dim=1) == 1).all()


def test_missing_domains_are_named():
    with pytest.raises(DSparkError, match="prose"):
        WindowSampler(ARRAYS, {"code": 1, "prose": 1}, 16, seed=0)


def test_heldout_batches_are_full_and_spread():
    parts = list(heldout_batches(ARRAYS["code"], 16, 4, 3))
    assert [len(part) for part in parts] == [4, 4, 4]
    assert (
        len(list(heldout_batches(ARRAYS["chat"], 16, 8, 1000)))
        == len(plan_windows(ARRAYS["chat"].starts, 420, 16)) // 8
    )
    (repeated,) = heldout_batches(ARRAYS["chat"], 16, 64, 2)
    assert repeated.shape == (64, 16)
