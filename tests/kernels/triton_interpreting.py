"""Triton 3.6's interpreter, mended where it differs from a GPU, for tests under TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float
_dot = interpreter.InterpreterBuilder.create_dot
_patch_tensor = interpreter._patch_lang_tensor


def _rounded(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """float32 -> bfloat16 to the nearest, ties to even; the interpreter cuts the digits off."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(data, source, target, rounding)
    bits = np.ascontiguousarray(data).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, nearest).astype(np.uint16)


def _dot_of_values(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """bfloat16 operands by their values; the interpreter multiplies their bit patterns."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, d, *options)


def _patch_index(tensor: Any, scope: Any) -> None:
    """Loop bounds are arrays of one element, which NumPy 2.4 no longer takes for numbers."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@contextmanager
def mended() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.object(interpreter, "_convert_float", _rounded))
        stack.enter_context(patch.object(interpreter.InterpreterBuilder, "create_dot", _dot_of_values))
        stack.enter_context(patch.object(interpreter, "_patch_lang_tensor", _patch_index))
        yield
