"""Rules about README.md and docs/: what they name exists, and what they tell people to type is accepted."""

import re
import shlex
from collections.abc import Iterator

import typer

from support.tree import Tree

README = "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL_NAMES = frozenset({"sh", "bash", "shell", "console"})
READING_ORDER = re.compile(r"read the code in this order(.*?)(?=^#|\Z)", re.IGNORECASE | re.MULTILINE | re.DOTALL)
# A file or folder of this repository in backquotes, or as the target of a relative link.
MENTION = re.compile(r"`((?:src|tests|docs|\.ci)/[\w./*-]*|[A-Z][\w-]*\.md|Makefile|constraints\.txt|pyproject\.toml)`")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
READING_FILES = 6


def mention_violations(tree: Tree) -> list[str]:
    """Files and folders that a document names and that do not exist."""
    violations = []
    for path, text in _documents(tree):
        folder = path.rpartition("/")[0]
        for name in MENTION.findall(text):
            if not (_exists(tree, name) or _exists(tree, _join(folder, name))):
                violations.append(f"{path}: names {name}, which does not exist")
        for target in LINK.findall(text):
            if not _exists(tree, _join(folder, target)):
                violations.append(f"{path}: links to {target}, which does not exist")
    return violations


def reading_order_violations(tree: Tree) -> list[str]:
    """The tour through the code names six files, and each exists."""
    section = READING_ORDER.search(tree.texts.get(README, ""))
    if section is None:
        return [f"{README}: has no section 'read the code in this order'"]
    files = [name for name in MENTION.findall(section.group(1)) if name.endswith(".py")]
    violations = [f"{README}: the tour names {file}, which does not exist" for file in files if file not in tree.texts]
    if len(files) != READING_FILES:
        violations.append(f"{README}: the tour names {len(files)} files, not {READING_FILES}")
    return violations


def folder_tree_violations(tree: Tree) -> list[str]:
    """Every folder in README's tree exists, and every folder of the package is in the tree."""
    listed = set(_folders_in_tree(tree.texts.get(README, "")))
    if not listed:
        return [f"{README}: has no tree of folders"]
    violations = [
        f"{README}: the tree lists {folder}, which does not exist" for folder in listed if not tree.has(folder)
    ]
    parts = {"/".join(path.split("/")[:3]) for path in tree.texts if re.match(r"src/dspark/\w+/", path)}
    violations += [
        f"{README}: the tree leaves out {folder}" for folder in parts - {item.rstrip("/") for item in listed}
    ]
    return sorted(violations)


def command_violations(tree: Tree, app: typer.Typer) -> list[str]:
    """Commands in shell blocks that the command line refuses, and make targets that do not exist."""
    targets = set(re.findall(r"^([\w-]+):", tree.texts.get("Makefile", ""), re.MULTILINE))
    violations = []
    for path, line in shell_lines(tree):
        command = re.split(r"\s[<>|]\s", line)[0]
        words = [word for word in shlex.split(command, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if words[:1] == ["dspark"] and (problem := parse_problem(app, words[1:])):
            violations.append(f"{path}: `{line}`: {problem}")
        if words[:1] == ["make"]:
            violations += [f"{path}: make has no target {word}" for word in words[1:] if word not in targets]
    return violations


def shell_lines(tree: Tree) -> Iterator[tuple[str, str]]:
    """(document, command) of every line in a shell block; a trailing backslash joins two lines."""
    for path, text in _documents(tree):
        for language, body in BLOCK.findall(text):
            if language in SHELL_NAMES:
                for line in body.replace("\\\n", " ").splitlines():
                    command = line.strip().removeprefix("$ ")
                    if command and not command.startswith("#"):
                        yield path, command


def parse_problem(app: typer.Typer, words: list[str]) -> str | None:
    """Why the command line refuses these words, or None. Nothing is run."""
    command = typer.main.get_command(app)
    context = None
    try:
        while True:
            context = command.make_context(command.name or "dspark", list(words), parent=context)
            if not hasattr(command, "resolve_command"):
                return None
            rest = [*context._protected_args, *context.args]
            _, command, words = command.resolve_command(context, rest)
    except Exception as error:  # the class of a usage error is private to typer
        if hasattr(error, "format_message"):
            return error.format_message()
        if type(error).__name__ == "Exit":  # --help and --version end here, and are accepted
            return None
        raise


def _documents(tree: Tree) -> Iterator[tuple[str, str]]:
    for path, text in tree.texts.items():
        if path == README or (path.startswith("docs/") and path.endswith(".md")):
            yield path, text


def _folders_in_tree(readme: str) -> Iterator[str]:
    """Folders listed by an indented block: two spaces of indent a level, a name ending in a slash, then a phrase."""
    for _, body in BLOCK.findall(readme):
        if not body.startswith("src/dspark/"):
            continue
        stack: list[tuple[int, str]] = []
        for line in body.splitlines():
            if not (match := re.match(r"( *)([\w./-]+/)(?:\s|$)", line)):
                continue
            indent = len(match.group(1))
            while stack and stack[-1][0] >= indent:
                stack.pop()
            path = "".join(name for _, name in stack) + match.group(2)
            stack.append((indent, match.group(2)))
            yield path


def _exists(tree: Tree, name: str) -> bool:
    if "*" in name:
        name = name.split("*", maxsplit=1)[0].rpartition("/")[0]
    return tree.has(name.rstrip("/"))


def _join(folder: str, name: str) -> str:
    parts = [part for part in folder.split("/") if part]
    for part in name.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)
