"""Products of a decimal ratio and a count, without binary fractions: 0.29 of 100 is 29, not 28."""

from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal, InvalidOperation


def decimal_ratio(ratio: str | float | Decimal) -> Decimal:
    """The ratio as the person wrote it, in (0, 1].

    A float goes through its shortest text, so 0.29 means 29/100. Raises ValueError for anything outside (0, 1].
    """
    try:
        value = ratio if isinstance(ratio, Decimal) else Decimal(str(ratio))
    except InvalidOperation:
        raise ValueError(f"ratio {ratio!r} is not a number; write for example 0.75") from None
    if not value.is_finite() or not 0 < value <= 1:
        raise ValueError(f"ratio {ratio} is outside (0, 1]; 1 keeps as much as the balance allows, 0.5 half of that")
    return value


def floor_product(ratio: str | float | Decimal, count: int) -> int:
    """floor(ratio * count), exact in decimal arithmetic."""
    return int((decimal_ratio(ratio) * count).to_integral_value(rounding=ROUND_FLOOR))
