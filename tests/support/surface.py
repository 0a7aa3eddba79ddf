"""The public surface as plain data: commands and flags, config fields, exported names. Frozen by snapshots."""

import dataclasses
import difflib
import importlib
import json
import pkgutil
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

import dspark

SNAPSHOTS = Path(__file__).resolve().parent.parent / "contract" / "snapshots"


def command_line(app: typer.Typer) -> dict[str, list[str]]:
    """Arguments and flags by command: {"dspark generate": ["PROMPT", "--draft [dspark|off] = dspark", ...]}."""
    surface: dict[str, list[str]] = {}
    _describe("dspark", typer.main.get_command(app), surface)
    return surface


def _describe(name: str, command: Any, surface: dict[str, list[str]]) -> None:
    surface[name] = sorted(_describe_parameter(parameter) for parameter in command.params)
    for word, child in sorted(getattr(command, "commands", {}).items()):
        _describe(f"{name} {word}", child, surface)


def _describe_parameter(parameter: Any) -> str:
    """Flags, choices and default; built from what every version of typer offers."""
    if parameter.param_type_name == "argument":
        return parameter.name.upper()
    flags = " / ".join([*parameter.opts, *parameter.secondary_opts])
    default = parameter.default() if callable(parameter.default) else parameter.default
    if isinstance(default, Enum):
        return f"{flags} [{'|'.join(choice.value for choice in type(default))}] = {default.value}"
    has_default = default is not None and default is not False and default not in ([], ())
    return f"{flags} = {default}" if has_default else flags


def config_fields() -> dict[str, dict[str, str]]:
    """Fields, types and defaults of every dataclass that users of the package can name."""
    named = {name: getattr(dspark, name) for name in dspark.__all__}
    config = importlib.import_module("dspark.config")
    named |= {name: getattr(config, name) for name in config.__all__}
    return {name: _fields(value) for name, value in sorted(named.items()) if _is_dataclass_type(value)}


def _is_dataclass_type(value: Any) -> bool:
    return isinstance(value, type) and dataclasses.is_dataclass(value)


def _fields(cls: Any) -> dict[str, str]:
    fields = {}
    for field in dataclasses.fields(cls):
        annotation = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        if not isinstance(field.type, type):
            annotation = str(field.type).replace("typing.", "")
        if field.default is not dataclasses.MISSING:
            annotation += f" = {field.default!r}"
        elif field.default_factory is not dataclasses.MISSING:
            annotation += f" = {field.default_factory()!r}"
        fields[field.name] = annotation
    return fields


def exported_names() -> dict[str, list[str]]:
    """`__all__` of the package and of its parts."""
    modules: list[ModuleType] = [dspark]
    for found in pkgutil.iter_modules(dspark.__path__):
        if found.ispkg:
            modules.append(importlib.import_module(f"dspark.{found.name}"))
    return {module.__name__: sorted(module.__all__) for module in modules if hasattr(module, "__all__")}


def differences(name: str, now: Any, update: bool) -> list[str]:
    """Lines in which `now` differs from the snapshot of that name; with `update` the snapshot is rewritten first."""
    file = SNAPSHOTS / f"{name}.json"
    text = json.dumps(now, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    if update:
        SNAPSHOTS.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    frozen = file.read_text(encoding="utf-8") if file.exists() else ""
    return line_differences(frozen, text)


def line_differences(frozen: str, now: str) -> list[str]:
    """A unified difference without its header; empty when nothing changed."""
    return list(difflib.unified_diff(frozen.splitlines(), now.splitlines(), "frozen", "now", lineterm="", n=3))[2:]
