"""What files are called, how long they are, and which words and paths they may contain.

The tests on made-up trees prove that each rule can fail.
"""

import pytest

from support.text_rules import (
    MAX_LINES,
    family_word_violations,
    length_violations,
    machine_path_violations,
    name_violations,
)
from support.tree import Tree, read_tree


@pytest.fixture(scope="module")
def tree(repository):
    return read_tree(repository)


def test_names_say_what_a_module_owns(tree):
    assert not name_violations(tree)


def test_modules_can_be_read_in_one_go(tree):
    assert not length_violations(tree)


def test_model_families_are_named_in_their_places_only(tree):
    assert not family_word_violations(tree)


def test_no_tracked_file_names_a_path_of_one_machine(tree):
    assert not machine_path_violations(tree)


@pytest.mark.parametrize("path", ["src/dspark/ops/utils.py", "src/dspark/common/a.py", "src/dspark/engine/manager.py"])
def test_an_empty_name_is_found(path):
    assert len(name_violations(Tree({path: ""}))) == 1


def test_a_long_module_is_found():
    tree = Tree({"src/dspark/a.py": "x = 1\n" * (MAX_LINES + 1), "src/dspark/b.py": "x = 1\n" * MAX_LINES})
    assert [violation.split(":")[0] for violation in length_violations(tree)] == ["src/dspark/a.py"]


@pytest.mark.parametrize("word", ["v41", "V4", "is_v4", "deepseek_v41", "DeepSeek-V4.1", "v4_1", "# only in v4"])
def test_a_model_family_out_of_place_is_found(word):
    text = f'name = "{word}"\n'
    assert len(family_word_violations(Tree({"src/dspark/layers/a.py": text}))) == 1
    assert not family_word_violations(Tree({"src/dspark/models/registry.py": text}))


@pytest.mark.parametrize("word", ["ipv4", "v40", "conv4d", "rev41b"])
def test_a_word_that_only_contains_a_family_is_accepted(word):
    assert not family_word_violations(Tree({"src/dspark/layers/a.py": f"{word} = 1\n"}))


@pytest.mark.parametrize("folder", ["/home/", "/root/", "/t" + "mp/"])
def test_a_path_of_one_machine_is_found(folder):
    assert len(machine_path_violations(Tree({"docs/a.md": f"see {folder}model/config.json"}))) == 1


def test_a_path_that_every_machine_has_is_accepted():
    assert not machine_path_violations(Tree({"run": "#!/usr/bin/env bash\ncd framework/x; see workshop\n"}))
