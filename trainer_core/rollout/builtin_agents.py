"""A tool and an environment that come with Offbeat: a calculator, and a game in which a number is to be found."""

from __future__ import annotations

import ast
import operator
from typing import Any

_BINARY: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Any] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
MAX_LENGTH = 200
MAX_EXPONENT = 100


def calculator(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as (3 + 4) * 2.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _evaluate(node: ast.expr) -> int | float:
    """The value of a parsed expression. Raises ValueError on anything but arithmetic, ArithmeticError as Python does."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    result: int | float | complex
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        result = _UNARY[type(node.op)](_evaluate(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
            raise ValueError(f"an exponent is above {MAX_EXPONENT}")
        result = _BINARY[type(node.op)](left, right)
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    if isinstance(result, complex) or abs(result) > 1e300:
        raise ValueError("the result is no number of ordinary size")
    return result


class GuessNumber:
    """A number from `low` to `high` is to be found. A find is worth 1; each guess costs `cost`.

    The number is the row's `number` or `answer` column.
    """

    def __init__(self, low: int = 0, high: int = 9, cost: float = 0.1) -> None:
        self._low, self._high, self._cost = low, high, cost

    def reset(self, **row: Any) -> str:
        """Begin with the number of a row. Raises ValueError when it has none in the range."""
        given = row.get("number", row.get("answer"))
        try:
            self._number = int(str(given))
        except (TypeError, ValueError):
            raise ValueError(
                f"guess_number needs a whole number in the 'number' or 'answer' column, not {given!r}"
            ) from None
        if not self._low <= self._number <= self._high:
            raise ValueError(f"guess_number is played from {self._low} to {self._high}; a row has {self._number}")
        self._guesses, self._found = 0, False
        return f"Find the number from {self._low} to {self._high}."

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.
        """
        self._guesses += 1
        self._found = self._found or number == self._number
        return "found" if number == self._number else "higher" if number < self._number else "lower"

    def get_reward(self) -> float:
        """1 for a find, less the cost of the guesses."""
        return float(self._found) - self._cost * self._guesses
