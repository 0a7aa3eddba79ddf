"""The calibration profile: a measured cost curve and confidence temperatures, trusted only where they were measured.

Version 1 of the format; a field that does not fit refuses the whole profile, by name and with both values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.config.errors import ConfigError

VERSION = 1
IDENTITY_FIELDS = (
    "model_files",
    "model_type",
    "tensor_parallel_size",
    "kv_cache_dtype",
    "index_cache_dtype",
    "expert_backend",
    "graph",
    "gpu_name",
    "torch_version",
    "hip_version",
    "cuda_version",
    "engine_version",
)
REQUIRED_FIELDS = ("version", "identity", "draft_width", "max_num_seqs", "sps_table", "sts_temperatures")
_REMEDY = "calibrate again with `dspark calibrate` on this engine"


@dataclass(frozen=True)
class CalibrationProfile:
    """What calibration found.

    Attributes:
        draft_width: draft tokens of a round, G.
        max_num_seqs: largest batch that was measured.
        steps_per_second: SPS(B) at index B in rows of the target pass, non-increasing; entry 0 is not used.
        temperatures: [G], T_k of the confidence logits.
        identity: what was measured, see IDENTITY_FIELDS.
    """

    draft_width: int
    max_num_seqs: int
    steps_per_second: tuple[float, ...]
    temperatures: tuple[float, ...]
    identity: Mapping[str, Any]


def load_profile(path: Path, *, identity: Mapping[str, Any], width: int, batch_size: int) -> CalibrationProfile:
    """Read a profile and require that it was measured on what is about to run.

    Args:
        path: JSON file.
        identity: this engine's value of each identity field that is known; others are not compared.
        width: draft tokens of a round.
        batch_size: requests that may run at once.
    Raises:
        ConfigError: no readable JSON object, or one line for each field that does not fit.
    """
    fields = _read_object(path)
    faults = list(_faults(fields, identity, width, batch_size))
    if faults:
        raise ConfigError("\n".join(f"calibration profile {path}: {fault}; {_REMEDY}." for fault in faults))
    return CalibrationProfile(
        draft_width=fields["draft_width"],
        max_num_seqs=fields["max_num_seqs"],
        steps_per_second=tuple(float(value) for value in fields["sps_table"]),
        temperatures=tuple(float(value) for value in fields["sts_temperatures"]),
        identity=fields["identity"],
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"calibration profile {path} cannot be read ({error.strerror}): check the path.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"calibration profile {path} is not JSON ({error}): {_REMEDY}.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"calibration profile {path} is not a JSON object: {_REMEDY}.")
    return fields


def _faults(fields: dict[str, Any], identity: Mapping[str, Any], width: int, batch_size: int) -> Iterator[str]:
    """Everything that does not fit; another version has other fields, so nothing else is compared then."""
    version = fields.get("version")
    if version != VERSION or isinstance(version, bool):
        yield f"version is {version!r}, and this engine reads {VERSION}"
        return
    missing = [name for name in REQUIRED_FIELDS if name not in fields]
    if missing:
        yield f"the field {missing[0]} is missing"
        return
    yield from _identity_faults(fields["identity"], identity)
    if not _is_int(fields["draft_width"]) or fields["draft_width"] != width:
        yield f"draft_width is {fields['draft_width']!r}, and this engine drafts {width}"
    if not _is_int(fields["max_num_seqs"]) or fields["max_num_seqs"] < batch_size:
        yield f"max_num_seqs is {fields['max_num_seqs']!r}, and this engine runs up to {batch_size} requests"
    yield from _temperature_faults(fields["sts_temperatures"], width)
    yield from _table_faults(fields["sps_table"], batch_size * (width + 1))


def _identity_faults(found: Any, expected: Mapping[str, Any]) -> Iterator[str]:
    """Fields that are missing, unknown, or differ from what is known here."""
    if not isinstance(found, dict):
        yield f"identity is {found!r}, not an object"
        return
    for name in IDENTITY_FIELDS:
        if name not in found:
            yield f"identity.{name} is missing" + (f", and here it is {expected[name]!r}" if name in expected else "")
        elif name in expected and not _is_same(found[name], expected[name]):
            yield f"identity.{name} is {found[name]!r}, and here it is {expected[name]!r}"
    for name in found:
        if name not in IDENTITY_FIELDS:
            yield f"identity.{name} is {found[name]!r}, and this engine knows no such field"


def _is_same(found: Any, expected: Any) -> bool:
    """Equality of JSON values, in which true is not 1."""
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)


def _temperature_faults(values: Any, width: int) -> Iterator[str]:
    if not isinstance(values, list):
        yield f"sts_temperatures is {values!r}, not a list"
        return
    if len(values) != width:
        yield f"sts_temperatures has {len(values)} entries, and a round drafts {width}"
    yield from _number_faults("sts_temperatures", values)


def _table_faults(values: Any, max_rows: int) -> Iterator[str]:
    if not isinstance(values, list):
        yield f"sps_table is {values!r}, not a list"
        return
    if len(values) <= max_rows:
        yield f"sps_table has {len(values)} entries, and a full batch has {max_rows} rows, which needs {max_rows + 1}"
    wrong = list(_number_faults("sps_table", values))
    yield from wrong
    if wrong:
        return
    for rows in range(1, len(values)):
        if values[rows] > values[rows - 1]:
            yield f"sps_table rises from {values[rows - 1]!r} at {rows - 1} rows to {values[rows]!r} at {rows}"
            return


def _number_faults(name: str, values: list[Any]) -> Iterator[str]:
    """The first entry that is no finite number above 0."""
    for place, value in enumerate(values):
        if not _is_positive(value):
            yield f"{name}[{place}] is {value!r}, not a finite number above 0"
            return


def _is_positive(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return value > 0 and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
