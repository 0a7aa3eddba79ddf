"""README.md and docs/ name files that exist and commands that the command line accepts.

The tests on made-up trees prove that each rule can fail.
"""

import pytest

from dspark.cli.app import app
from support.document_rules import (
    command_violations,
    folder_tree_violations,
    mention_violations,
    parse_problem,
    reading_order_violations,
    shell_lines,
)
from support.tree import Tree, read_tree

TOUR = "## Read the code in this order\n\n" + "".join(f"{n}. `src/dspark/{n}.py`\n" for n in range(6))


@pytest.fixture(scope="module")
def tree(repository):
    return read_tree(repository)


def test_documents_name_existing_files(tree):
    assert not mention_violations(tree)


def test_the_tour_through_the_code_exists(tree):
    assert not reading_order_violations(tree)


def test_the_tree_of_folders_is_the_real_one(tree):
    assert not folder_tree_violations(tree)


def test_commands_are_accepted(tree):
    assert any(line.startswith("make ") for _, line in shell_lines(tree))
    assert any(line.startswith("dspark ") for _, line in shell_lines(tree))
    assert not command_violations(tree, app)


@pytest.mark.parametrize(
    "text", ["see `src/dspark/gone.py`", "see `docs/GONE.md`", "see [the notes](GONE.md)", "see `src/dspark/gone/`"]
)
def test_a_missing_file_is_found(text):
    assert len(mention_violations(Tree({"docs/A.md": text}))) == 1


def test_a_link_is_read_from_the_folder_of_its_document():
    tree = Tree({"docs/A.md": "[b](B.md) [r](../README.md) [x](https://example.org)", "docs/B.md": "", "README.md": ""})
    assert not mention_violations(tree)


def test_a_tour_with_a_missing_file_is_found():
    files = {f"src/dspark/{n}.py": "" for n in range(5)}
    assert len(reading_order_violations(Tree({"README.md": TOUR, **files}))) == 1
    assert not reading_order_violations(Tree({"README.md": TOUR, **files, "src/dspark/5.py": ""}))
    assert reading_order_violations(Tree({"README.md": "nothing"}))


def test_a_wrong_tree_of_folders_is_found():
    readme = "```\nsrc/dspark/\n  config/   settings\n  gone/     nothing\n```\n"
    tree = Tree({"README.md": readme, "src/dspark/config/a.py": "", "src/dspark/ops/b.py": ""})
    found = folder_tree_violations(tree)
    assert [violation for violation in found if "src/dspark/gone/" in violation]
    assert [violation for violation in found if "leaves out src/dspark/ops" in violation]
    assert len(found) == 2


@pytest.mark.parametrize(
    "line",
    ["dspark generate --no-such-flag", "dspark nonsense", "dspark generate --max-tokens many", "make nonsense"],
)
def test_a_command_that_is_refused_is_found(line):
    tree = Tree({"README.md": f"```sh\n{line}\n```\n", "Makefile": "demo: x\n"})
    assert len(command_violations(tree, app)) == 1


def test_help_and_version_are_accepted():
    assert parse_problem(app, ["--version"]) is None
    assert parse_problem(app, ["generate", "--help"]) is None
