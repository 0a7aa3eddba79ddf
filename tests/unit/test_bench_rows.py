"""The bench of the row law: the engine's products change no bit with the number of rows; times are not asserted."""

import json

from typer.testing import CliRunner

from dspark.bench.row_law import run_row_law_bench
from dspark.cli.app import app
from dspark.engine import embedded_folder


def test_exact_passes_change_no_row():
    report = run_row_law_bench(embedded_folder(), "the embedded model", [11, 300, 301, 302, 40, 41, 1000, 77], 1)
    assert [row.num_rows for row in report.rows] == [1, 2, 4, 6, 8]
    assert all(row.exact_changed == 0 for row in report.rows)
    assert all(row.exact_ms > 0 and row.library_ms > 0 for row in report.rows)


def test_the_command_prints_json():
    result = CliRunner().invoke(app, ["bench", "rows", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["schema"] == "dspark.bench.rows/1"
    assert {"num_rows", "exact_ms", "library_ms", "ratio", "exact_changed", "library_changed"} <= set(report["rows"][0])


def test_no_repeats_are_refused():
    result = CliRunner().invoke(app, ["bench", "rows", "--repeats", "0"])
    assert result.exit_code != 0
