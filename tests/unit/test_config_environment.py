"""The environment holds preferences of the machine only, and is read in one place."""

from pathlib import Path

from dspark.config import read_environment


def test_defaults_and_values():
    assert read_environment({}).home == Path("~/.dspark").expanduser()
    assert not read_environment({"NO_COLOR": ""}).no_color
    environment = read_environment({"DSPARK_HOME": "/data/dspark", "NO_COLOR": "1"})
    assert (environment.home, environment.no_color) == (Path("/data/dspark"), True)
