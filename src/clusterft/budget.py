"""The one rule that turns a budget as a person writes it into a number of rows, and the check every selector makes.

In come the pool's size and a text such as "0.29" or "8"; out comes a number of rows. A text with a decimal point or an exponent
is a fraction of the pool, floored in exact decimal arithmetic and at least one row; a whole number is a number of rows. The
rule is the same for every method, so that rows in one table differ in the method and in nothing else.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

import numpy as np

from clusterft.exact import floor_product


def rows_for(n: int, budget: str | int | float) -> int:
    """Rows to keep of `n`: "0.29" of 100 is 29, "0.05" of 7 is 1, "1.0" is everything, "8" is 8 rows.

    A float stands for its shortest text (0.29 is 29/100, 1.0 is everything). Raises ValueError, with both numbers, if the
    result would lie outside 1 ... n or the text is not a number.
    """
    if n < 1:
        raise ValueError(f"a pool of {n} rows has nothing to choose from")
    text = str(budget).strip()
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite():
        raise ValueError(f"budget {budget!r} is not a number; write a fraction such as 0.25 or a number of rows such as 8")
    if _is_row_count(text):
        return require_rows("budget", int(value), n)
    if not 0 < value <= 1:
        raise ValueError(
            f"budget {text} of {n} rows is outside (0, 1]; write a whole number, without a decimal point, for a number of rows"
        )
    return max(1, floor_product(value, n))


def require_rows(method: str, budget: object, n: int) -> int:
    """`budget` as an int in 1 ... n. Raises ValueError with both numbers otherwise, also for anything that is not a whole
    number."""
    if isinstance(budget, bool) or not isinstance(budget, int | np.integer):
        raise ValueError(f"{method}: a budget of {budget!r} rows out of {n} is not a whole number")
    if not 1 <= budget <= n:
        raise ValueError(f"{method}: a budget of {budget} rows is outside 1 ... {n}, the number of rows that can be chosen")
    return int(budget)


def _is_row_count(text: str) -> bool:
    return text.lstrip("+-").isdigit()
