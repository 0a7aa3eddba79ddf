"""Which module of the package may import which, as data, and the check of it."""

import ast
from collections.abc import Iterator

from support.tree import Tree

PACKAGE = "dspark"

# An import goes to the same part or to one of a lower rank.
RANKS = {
    "version": 0,
    "config": 0,
    "checkpoint": 1,
    "ops": 2,
    "parallel": 3,
    "layers": 4,
    "models": 5,
    "state": 6,
    "sampling": 7,
    "speculative": 7,
    "scheduler": 8,
    "engine": 9,
    "serve": 10,
}
# Beside the line: they may import anything below the command line; only the command line imports them.
BESIDE = frozenset({"assets", "bench", "calibrate", "convert", "train", "validate"})
TOP = "cli"
# What sampling.py and speculative/ share a rank for: the samplers are values that verification takes.
SAME_RANK_ALLOWED = frozenset({("speculative", "sampling")})

# An optional package is imported inside a function, in the one file named here.
OPTIONAL_PACKAGES = {
    "fastapi": "serve/",
    "gguf": "checkpoint/",
    "httpx": "bench/serve_client.py",
    "matplotlib": "bench/plot.py",
    "prometheus_client": "serve/",
    "ray": "serve/",
    "transformers": "validate/",
    "uvicorn": "serve/",
}


def rank_violations(tree: Tree) -> list[str]:
    """Every import that goes up, sideways, or into a part that nothing may import."""
    violations = []
    for path, module in tree.modules.items():
        importer = _part_of_path(path)
        if importer in (TOP, ""):  # the package itself offers the public names, and the program
            continue
        for line, target in _package_imports(module):
            if not _is_allowed(importer, target):
                violations.append(f"{path}:{line}: {importer} may not import {target or 'the package root'}")
    return violations


def unknown_parts(tree: Tree) -> list[str]:
    """Parts of the package without a place in the order."""
    known = {*RANKS, *BESIDE, TOP, ""}
    return sorted({part for path in tree.modules if (part := _part_of_path(path)) not in known})


def local_import_violations(tree: Tree) -> list[str]:
    """Imports inside functions, other than an optional package in its one place."""
    violations = []
    for path, module in tree.modules.items():
        relative = path.removeprefix(f"src/{PACKAGE}/")
        for line, name in _imports_in_functions(module):
            place = OPTIONAL_PACKAGES.get(name.split(".")[0])
            if place is None or not relative.startswith(place):
                violations.append(f"{path}:{line}: import of {name} inside a function")
    return violations


def _is_allowed(importer: str, target: str) -> bool:
    if importer == target or (importer, target) in SAME_RANK_ALLOWED:
        return True
    if target in BESIDE or target in (TOP, ""):
        return False
    if importer in BESIDE:
        return True
    return RANKS.get(target, 99) < RANKS.get(importer, -1) or RANKS.get(target) == RANKS.get(importer) == 0


def _part_of_path(path: str) -> str:
    """The folder or module below the package: "config" of src/dspark/config/errors.py; "" of what lies beside them."""
    first = path.removeprefix(f"src/{PACKAGE}/").split("/")[0]
    name = first.removesuffix(".py")
    return "" if name in ("__init__", "__main__") else name


def _package_imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, part) of each import of the package, wherever it stands in the module."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names = [f"{PACKAGE}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == PACKAGE:
                yield node.lineno, rest[0] if rest else ""


def _imports_in_functions(module: ast.Module) -> Iterator[tuple[int, str]]:
    functions = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    seen = set()
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                found = [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [(node.lineno, node.module or "")]
            else:
                continue
            for item in found:
                if item not in seen:
                    seen.add(item)
                    yield item
