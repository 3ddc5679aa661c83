"""Tools and environments that a run names: built-in ones, entry points, and objects of modules that the operator allows.

A name without a colon is a built-in one, or an entry point of an installed package (groups `offbeat.tools` and
`offbeat.environments`). `package.module:name` is imported. Who starts a run in the browser chooses what runs on the training
host that way, so such modules must be listed in OFFBEAT_TOOL_MODULES there, separated by commas; a package allows what is in
it. Light: nothing is imported before it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Literal

Kind = Literal["tool", "environment"]

GROUPS: dict[Kind, str] = {"tool": "offbeat.tools", "environment": "offbeat.environments"}
BUILTINS: dict[Kind, dict[str, str]] = {
    "tool": {"calculator": "trainer_core.rollout.builtin_agents:calculator"},
    "environment": {
        "guess_number": "trainer_core.rollout.builtin_agents:GuessNumber",
        "openenv": "trainer_core.rollout.openenv:connect",
    },
}
ALLOWED_MODULES = "OFFBEAT_TOOL_MODULES"


def load_tools(names: Sequence[str]) -> list[Callable[..., Any]]:
    """The tools of these names, in order. Raises ValueError with one sentence for what can't be had."""
    tools = [_load("tool", name) for name in names]
    for name, tool in zip(names, tools, strict=True):
        if not callable(tool):
            raise ValueError(f"tool {name!r} is a {type(tool).__name__}; a function is needed")
    return tools


def load_environment(name: str, options: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What makes environments of this name with these options; None without a name.

    Raises ValueError with one sentence when there is no such environment, or it does not take the options.
    """
    if not name:
        if options:
            raise ValueError(f"environment options are given ({', '.join(options)}), but no environment")
        return None
    factory = _load("environment", name)
    if not callable(factory):
        raise ValueError(f"environment {name!r} is a {type(factory).__name__}; a class or a function is needed")
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ValueError(f"environment {name!r} does not take the options {dict(options)}: {error}") from error
    return functools.partial(factory, **options) if options else factory


def _load(kind: Kind, name: str) -> Any:
    builtin = BUILTINS[kind].get(name)
    if builtin is not None:
        return _import(kind, name, builtin)
    if ":" in name:
        module = name.partition(":")[0]
        allowed = [entry.strip() for entry in os.environ.get(ALLOWED_MODULES, "").split(",") if entry.strip()]
        if not any(module == entry or module.startswith(f"{entry}.") for entry in allowed):
            raise ValueError(
                f"{kind} {name!r} is in module {module}, which is not allowed on the training host; its operator lists allowed "
                f"modules in {ALLOWED_MODULES} (now {', '.join(allowed) or 'empty'})"
            )
        return _import(kind, name, name)
    installed = {point.name: point for point in entry_points(group=GROUPS[kind])}
    if name not in installed:
        known = ", ".join(sorted({*BUILTINS[kind], *installed}))
        raise ValueError(f"there is no {kind} {name!r} on the training host; there are {known}, and module:name")
    return _import(kind, name, installed[name].value)


def _import(kind: Kind, name: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
    # whatever the module does when it is imported
    except Exception as error:
        raise ValueError(
            f"{kind} {name!r}: module {module} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not attribute or not hasattr(found, attribute):
        raise ValueError(f"{kind} {name!r}: module {module} has no {attribute or 'name behind the colon'!r}")
    return getattr(found, attribute)
