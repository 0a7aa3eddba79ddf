"""A calibration profile is trusted only where it was measured: every field that differs refuses it by name."""

from typing import Any

import pytest

from dspark.config import ConfigError
from dspark.speculative.profile import IDENTITY_FIELDS, load_profile
from support.profiles import IDENTITY, profile_fields, write_profile

WIDTH, BATCH = 3, 2


def load(path, identity=IDENTITY, width=WIDTH, batch_size=BATCH):
    return load_profile(path, identity=identity, width=width, batch_size=batch_size)


@pytest.fixture
def fields() -> dict[str, Any]:
    return profile_fields(WIDTH, BATCH)


@pytest.fixture
def refusal(tmp_path):
    """The message with which fields are refused."""

    def refuse(fields, **engine):
        with pytest.raises(ConfigError) as caught:
            load(write_profile(tmp_path / "profile.json", fields), **engine)
        return str(caught.value)

    return refuse


def test_a_profile_that_fits_gives_curve_and_temperatures(fields, tmp_path):
    profile = load(write_profile(tmp_path / "profile.json", fields))
    assert profile.steps_per_second == tuple(fields["sps_table"])
    assert profile.temperatures == (1.0, 1.1, 1.2)
    assert len(profile.steps_per_second) > BATCH * (WIDTH + 1)


def test_a_smaller_batch_than_the_measured_one_fits(fields, tmp_path):
    assert load(write_profile(tmp_path / "profile.json", fields), batch_size=1).max_num_seqs == BATCH


def test_integers_and_equal_neighbours_are_fine(fields, tmp_path):
    fields["sps_table"] = [5] * 9
    fields["sts_temperatures"] = [1, 1, 1]
    assert load(write_profile(tmp_path / "profile.json", fields)).steps_per_second[-1] == 5.0


@pytest.mark.parametrize("version", [2, 0, "1", True, None])
def test_another_version_is_refused(fields, refusal, version):
    assert f"version is {version!r}" in refusal(fields | {"version": version})


@pytest.mark.parametrize("name", IDENTITY_FIELDS)
def test_every_identity_field_is_compared_and_named_with_both_values(fields, refusal, name):
    fields["identity"][name] = "something else"
    message = refusal(fields)
    assert f"identity.{name} is 'something else'" in message
    assert repr(IDENTITY[name]) in message
    del fields["identity"][name]
    assert f"identity.{name} is missing" in refusal(fields)


def test_one_changed_hash_is_enough(fields, refusal):
    fields["identity"]["model_files"] = IDENTITY["model_files"] | {"config.json": "c" * 64}
    assert "identity.model_files" in refusal(fields)


def test_a_field_whose_value_is_not_known_here_is_not_compared(fields, tmp_path):
    fields["identity"]["gpu_name"] = "a GPU"
    known = {name: value for name, value in IDENTITY.items() if name != "gpu_name"}
    assert load(write_profile(tmp_path / "profile.json", fields), identity=known).identity["gpu_name"] == "a GPU"


def test_true_is_not_one(fields, refusal):
    fields["identity"]["tensor_parallel_size"] = True
    assert "identity.tensor_parallel_size is True, and here it is 1" in refusal(fields)


def test_an_unknown_identity_field_is_refused(fields, refusal):
    fields["identity"]["moon_phase"] = "full"
    assert "identity.moon_phase" in refusal(fields)


def test_another_width_or_a_larger_batch_is_refused_with_both_values(fields, refusal):
    assert "draft_width is 3, and this engine drafts 5" in refusal(fields, width=5)
    assert "max_num_seqs is 2, and this engine runs up to 4 requests" in refusal(fields, batch_size=4)


def test_a_table_must_reach_the_full_batch(fields, refusal):
    fields["sps_table"] = fields["sps_table"][:-1]
    assert "sps_table has 8 entries, and a full batch has 8 rows, which needs 9" in refusal(fields)


def test_one_temperature_a_draft_position(fields, refusal):
    fields["sts_temperatures"] = [1.0, 1.0]
    assert "sts_temperatures has 2 entries, and a round drafts 3" in refusal(fields)


@pytest.mark.parametrize("name", ["sps_table", "sts_temperatures"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1", None, [], 10**400])
def test_every_number_is_finite_and_above_zero(fields, refusal, name, value):
    fields[name][1] = value
    assert f"{name}[1] is {value!r}, not a finite number above 0" in refusal(fields)


def test_more_rows_are_never_faster(fields, refusal):
    fields["sps_table"][4] = fields["sps_table"][3] * 1.01
    message = refusal(fields)
    assert "sps_table rises" in message
    assert repr(fields["sps_table"][3]) in message


@pytest.mark.parametrize("name", ["identity", "draft_width", "max_num_seqs", "sps_table", "sts_temperatures"])
@pytest.mark.parametrize("value", [None, "x", 3.5, True, {}])
def test_a_field_of_the_wrong_kind_is_refused_by_name(fields, refusal, name, value):
    assert name in refusal(fields | {name: value})


@pytest.mark.parametrize(
    "name", ["version", "identity", "draft_width", "max_num_seqs", "sps_table", "sts_temperatures"]
)
def test_a_missing_field_is_named(fields, refusal, name):
    del fields[name]
    assert name in refusal(fields)


def test_all_faults_are_listed_at_once(fields, refusal):
    fields["identity"]["graph"] = "full"
    fields["draft_width"] = 4
    assert len(refusal(fields).splitlines()) == 2


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"null", b"[" * 10**5])
def test_a_file_that_is_no_profile_is_refused_by_path(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"profile\.json"):
        load(path)


def test_a_missing_file_is_refused_by_path(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "nowhere.json")
