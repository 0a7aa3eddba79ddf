"""Imports go down only: a part of the package knows the parts below it and nothing above or beside it.

The tests on made-up trees prove that each rule can fail.
"""

import pytest

from support.import_rules import local_import_violations, rank_violations, unknown_parts
from support.tree import Tree, read_tree


@pytest.fixture(scope="module")
def tree(repository):
    return read_tree(repository)


def test_imports_go_down_only(tree):
    assert not rank_violations(tree)


def test_every_part_has_a_rank(tree):
    assert not unknown_parts(tree)


def test_functions_import_nothing_but_optional_packages(tree):
    assert not local_import_violations(tree)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("src/dspark/config/a.py", "from dspark.ops.linear import linear"),
        ("src/dspark/config/a.py", "import dspark.engine"),
        ("src/dspark/config/a.py", "from dspark import engine"),
        ("src/dspark/layers/a.py", "from dspark.state.pages import Pages"),
        ("src/dspark/sampling.py", "from dspark.speculative import verify"),
        ("src/dspark/engine/a.py", "from dspark.bench.generate import run"),
        ("src/dspark/serve/a.py", "from dspark.cli import main"),
        ("src/dspark/bench/a.py", "from dspark.cli import main"),
        ("src/dspark/bench/a.py", "from dspark.train import loop"),
        ("src/dspark/models/a.py", "from dspark import LLM"),
        ("src/dspark/layers/a.py", "def f():\n    from dspark.engine import LLM"),
    ],
)
def test_an_import_that_goes_up_is_found(path, line):
    assert len(rank_violations(Tree({path: line}))) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("src/dspark/engine/a.py", "from dspark.config.errors import DSparkError"),
        ("src/dspark/speculative/a.py", "from dspark.sampling import draw"),
        ("src/dspark/cli/a.py", "from dspark.bench.generate import run"),
        ("src/dspark/train/a.py", "from dspark.engine import LLM"),
        ("src/dspark/__init__.py", "from dspark.engine import LLM"),
        ("src/dspark/layers/a.py", "from torch import nn"),
    ],
)
def test_an_import_that_goes_down_is_accepted(path, line):
    assert not rank_violations(Tree({path: line}))


def test_a_part_without_a_rank_is_found():
    assert unknown_parts(Tree({"src/dspark/magic/a.py": ""})) == ["magic"]


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("src/dspark/ops/a.py", "def f():\n    import math", 1),
        ("src/dspark/ops/a.py", "class A:\n    def f(self):\n        from os import path", 1),
        ("src/dspark/ops/a.py", "def f():\n    import matplotlib", 1),
        ("src/dspark/bench/plot.py", "def f():\n    import matplotlib.figure", 0),
        ("src/dspark/ops/a.py", "import math", 0),
    ],
)
def test_an_import_inside_a_function_is_found_unless_its_package_is_optional_there(path, text, count):
    assert len(local_import_violations(Tree({path: text}))) == count
