"""The public surface changes on purpose only: commands and flags, config fields, exported names.

After a change on purpose: pytest tests/contract/test_surface.py --update-snapshots
"""

import json

import pytest

from dspark.cli.app import app
from support.surface import command_line, config_fields, differences, exported_names, line_differences

HINT = "changed; if on purpose, run: pytest tests/contract/test_surface.py --update-snapshots"
SURFACES = {"cli": lambda: command_line(app), "config": config_fields, "exports": exported_names}


@pytest.mark.parametrize("name", SURFACES)
def test_surface_is_frozen(name, update_snapshots):
    changed = differences(name, SURFACES[name](), update_snapshots)
    assert not changed, "\n".join([f"the surface '{name}' {HINT}", *changed])


@pytest.mark.parametrize("name", SURFACES)
def test_a_surface_has_content_and_a_change_of_it_is_found(name):
    surface = SURFACES[name]()
    frozen = json.dumps(surface, indent=1)
    key = sorted(surface)[-1]
    del surface[key]
    assert any(key in line for line in line_differences(frozen, json.dumps(surface, indent=1)))


def test_the_same_line_elsewhere_does_not_hide_a_change():
    before = {"dspark chat": ["--seed = 0"], "dspark generate": []}
    after = {"dspark chat": ["--seed = 0"], "dspark generate": ["--seed = 0"]}
    assert line_differences(json.dumps(before, indent=1), json.dumps(after, indent=1))
