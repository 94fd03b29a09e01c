"""One door to numba, so that its cache never stands in the way of an installation that cannot be written to.

In goes a plain function, out comes its compiled form. Compiled code is kept beside the source when that is writable, else in the
user's cache folder; where neither can be written the function is compiled anew in every process.
"""

from __future__ import annotations

from collections.abc import Callable

import numba


def compiled(function: Callable | None = None, *, fast: bool = False) -> Callable:
    """Decorator: compiles on first use, releases the interpreter lock.

    fast=True lets sums be reordered for vector units. The order is fixed when the code is compiled, so that a row's value
    depends on the row alone and not on its place in an array.
    """
    if function is None:
        return lambda f: compiled(f, fast=fast)
    options = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"} if fast else False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as problem:  # numba found no folder that it may write to
        if "cannot cache" not in str(problem):
            raise
        return numba.njit(**options)(function)
