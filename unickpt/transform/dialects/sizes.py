"""Formulas for the sizes of axes, such as ``heads / groups``: integer arithmetic without code execution."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from unickpt.base.errors import LanguageError

_LONGEST = 200
_LARGEST = 1 << 62


def evaluate(text: str | int, known: Mapping[str, int]) -> int:
    """Return the value of a formula of names, whole numbers, ``+ - * /`` and parentheses. Divisions must be exact.

    Args:
        text: the formula.
        known: values of the names.

    Raises:
        LanguageError: the formula is malformed, a name is unknown, or the result is not a valid size.
    """
    if isinstance(text, int):
        return text
    value = _value(_parsed(text), known, text)
    if not 0 <= value < _LARGEST:
        raise LanguageError(f"{text!r} is {value}, which is not a valid size")
    return value


def names_in(text: str | int) -> set[str]:
    """Return the names in a formula.

    Raises:
        LanguageError: the formula is malformed.
    """
    return set() if isinstance(text, int) else set(_names(_parsed(text), text))


def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise LanguageError(f"a formula has {len(text)} characters, the limit is {_LONGEST}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise _malformed(text) from err


def _malformed(text: str) -> LanguageError:
    return LanguageError(f"{text!r} is not a formula of names, whole numbers and + - * / ( )")


def _names(node: ast.expr, text: str) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        yield from _names(node.left, text)
        yield from _names(node.right, text)
    elif not (isinstance(node, ast.Constant) and type(node.value) is int):
        raise _malformed(text)


def _value(node: ast.expr, known: Mapping[str, int], text: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in known:
            raise LanguageError(f"{text!r}: {node.id!r} is unknown; known are {', '.join(sorted(known)) or 'none'}")
        return known[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, known, text), _value(node.right, known, text)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            if right == 0 or left % right:
                raise LanguageError(f"{text!r}: {left} / {right} is not a whole number")
            return left // right
    raise _malformed(text)
