"""A tree of files as the repository's contract tests see it: real, or made up to prove that a rule can fail."""

import ast
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Tree:
    """Text by path from the root, with forward slashes. Binary files are listed with empty text."""

    texts: dict[str, str]

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """The parsed Python files of the package by path, e.g. "src/dspark/config/errors.py"."""
        return {path: ast.parse(text) for path, text in self.texts.items() if _is_module(path)}

    def has_folder(self, folder: str) -> bool:
        prefix = folder.rstrip("/") + "/"
        return any(path.startswith(prefix) for path in self.texts)

    def has(self, path: str) -> bool:
        """Is there such a file or folder?"""
        return path in self.texts or self.has_folder(path)


def _is_module(path: str) -> bool:
    return path.startswith("src/dspark/") and path.endswith(".py")


def read_tree(root: Path) -> Tree:
    """The files that git tracks or would track; without git, every file outside hidden folders."""
    texts = {}
    for path in _listed_files(root):
        file = root / path
        if file.is_file():
            texts[path] = _text_or_empty(file)
    return Tree(texts)


def _listed_files(root: Path) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        files = (file.relative_to(root).as_posix() for file in root.rglob("*"))
        return sorted(path for path in files if not path.startswith((".git/", ".venv/")))
    return sorted(path for path in listing.split("\0") if path)


def _text_or_empty(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
