"""Reading a reward function's source without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

PASSED = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class Problem:
    """What is wrong with the source, and in which line (from 1); line 0 is the source as a whole."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


def validate_source(source: str) -> list[Problem]:
    """Everything that can be said against the source before it runs; empty when it may be tried."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return [Problem(error.lineno or 0, f"{error.msg} ({type(error).__name__})")]
    except ValueError as error:  # NUL bytes
        return [Problem(0, f"the source cannot be read: {error}")]
    functions = _functions(tree)
    if not functions:
        return [_no_function(tree)]
    return _parameter_problems(functions[-1])


def function_name(source: str) -> str:
    """Name of the function that is the reward: the last one at the top level without a leading underscore.

    Raises ValueError when there is none.
    """
    functions = _functions(ast.parse(source))
    if not functions:
        raise ValueError("the source defines no function; write one, such as def reward(completions, **columns):")
    return functions[-1].name


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node for node in found if not node.name.startswith("_")]


def _no_function(tree: ast.Module) -> Problem:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = target.id if isinstance(target, ast.Name) else "it"
            return Problem(node.lineno, f"{name} is a lambda; write def {name}(completions, **columns): instead")
    hidden = next((node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)), None)
    if hidden is not None:
        return Problem(
            hidden.lineno, f"the name {hidden.name} begins with an underscore; the reward needs a public name"
        )
    return Problem(0, "the source defines no function; write one, such as def reward(completions, **columns):")


def _parameter_problems(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Problem]:
    arguments = function.args
    names = [argument.arg for argument in [*arguments.args, *arguments.kwonlyargs]]
    problems = []
    if arguments.posonlyargs:
        problems.append(
            Problem(function.lineno, f"{function.name} has positional-only parameters; it is called by name")
        )
    if arguments.kwarg is None and not {"completions", "completion_ids"} & set(names):
        problems.append(
            Problem(
                function.lineno,
                f"{function.name}({', '.join(names)}) takes no completions; it is called with {', '.join(PASSED)} and the "
                "dataset's columns, all by name",
            )
        )
    return problems
