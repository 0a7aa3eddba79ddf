"""Rules about names, words, lengths and paths in the repository's files."""

import re
from pathlib import PurePosixPath

from support.tree import Tree

MAX_LINES = 400
# Names that say nothing about what a module owns.
EMPTY_NAMES = frozenset(
    {
        "utils",
        "util",
        "common",
        "helpers",
        "helper",
        "misc",
        "manager",
        "base",
        "impl",
        "handler",
        "info",
        "data",
        "ctx",
    }
    | {"new", "old", "legacy", "v2"}
)
# A model family is known to its own file, the registry and the chat encoding, and the package says in its first line
# whom it serves; the rest is built from plan values.
FAMILY_WORD = re.compile(r"(?<![a-z0-9])(?:deepseek_?)?v4(?:[._]?1)?(?![a-z0-9])", re.IGNORECASE)
FAMILY_PLACES = (
    "src/dspark/__init__.py",
    "src/dspark/models/deepseek_v4.py",
    "src/dspark/models/deepseek_v41.py",
    "src/dspark/models/registry.py",
    "src/dspark/serve/encoding/dialects.py",
)
# Built from words, so that this file itself holds no such path.
MACHINE_ROOTS = ("work", "farm", "home", "root", "Users", "tmp")
MACHINE_PATHS = re.compile(f"(?<![\\w.])/(?:{'|'.join(MACHINE_ROOTS)})/[\\w.]|{'bash'}_jobs")


def name_violations(tree: Tree) -> list[str]:
    """Modules and folders of the package whose name is a word for anything."""
    violations = []
    for path in tree.modules:
        parts = [part.removesuffix(".py") for part in PurePosixPath(path).parts[2:]]
        violations += [f"{path}: {part} says nothing about what it owns" for part in parts if part in EMPTY_NAMES]
    return violations


def length_violations(tree: Tree, max_lines: int = MAX_LINES) -> list[str]:
    """Modules too long to be read in one go."""
    counts = {path: tree.texts[path].count("\n") for path in tree.modules}
    return [f"{path}: {count} lines, more than {max_lines}" for path, count in counts.items() if count > max_lines]


def family_word_violations(tree: Tree) -> list[str]:
    """Model families named outside their places, in code, comments or docstrings."""
    modules = {path: tree.texts[path] for path in tree.modules if not path.startswith(FAMILY_PLACES)}
    return _lines_matching(modules, FAMILY_WORD)


def machine_path_violations(tree: Tree) -> list[str]:
    """Paths that exist on one machine only."""
    return _lines_matching(tree.texts, MACHINE_PATHS)


def _lines_matching(texts: dict[str, str], pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path}:{number}: {match.group(0)}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := pattern.search(line))
    ]
