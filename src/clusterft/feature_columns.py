"""The columns of features that a selector reads by name: what the extractor (with torch) and `choose` (without) agree on."""

from __future__ import annotations

IFD_COLUMNS = ("conditional_loss", "direct_loss", "answer_tokens", "reason")
"""Mean losses in nats a token, tokens averaged over, and the number of the reason why the row is not scored."""

IFD_REASONS = ("", "empty", "truncated", "nonfinite")

LESS_REASONS = ("", "no_target_tokens", "nonfinite")
"""By number, in the last column of LESS's rows: why a row has no gradient vectors."""

PROJECTION_VERSION = 1
"""Of the sign matrix that LESS's rows are projected with (`clusterft.projection`); part of their key."""
