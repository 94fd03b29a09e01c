"""The two losses behind IFD (Li et al. 2024, "From Quantity to Quality"): of an answer given its instruction, and of the answer
alone.

In come a model and encoded rows; out come four columns a row: conditional loss, direct loss (nats a token), answer tokens
averaged over, and the number of a reason why the row cannot be scored (0: none).

    conditional   BOS, instruction, answer                     the row as it is trained on
    direct        BOS, the template's answer mark, answer      the same answer ids, never tokenised again

Boundary rule: the answer is what carries loss in the encoded row. A token at the border of instruction and answer belongs to
both passes or to neither, and both average the same tokens. The mark keeps the answer's first token predictable in the direct
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterft.batching import TokenRow, row_of_labels
from clusterft.feature_columns import IFD_COLUMNS, IFD_REASONS
from clusterft.feature_context import FeatureContext
from clusterft.feature_writer import RowWriter
from clusterft.interfaces import FeatureSpec
from clusterft.pre_experience import PreExperience, experienced_model
from clusterft.prompting import generation_prompt
from clusterft.records import IGNORE_INDEX, Encoded, Example
from clusterft.row_losses import LossPass, count, without_eos, write_by_batch
from clusterft.text_rules import is_empty

_PROBES = ("a", "7", "Zq.", "(x)")


@dataclass(frozen=True)
class IfdParams:
    """Parameters of the extractor.

    precision       float32 | bfloat16, of weights and activations
    score_eos       whether the EOS after an answer counts; the released code has no EOS in its texts
    pre_experience  None, or the settings of the short training that comes before scoring
    """

    precision: str
    score_eos: bool
    pre_experience: dict[str, Any] | None


def answer_mark(template: str, tokenizer: Any) -> list[int]:
    """The ids that stand between any instruction and its answer, with BOS in front where the template has one.

    Found as the common end of a few unlike prompts, so it holds for chat templates too. Raises ValueError if the template puts
    nothing there and there is no BOS: then nothing would predict an answer's first token.
    """
    prompts = [generation_prompt(template, tokenizer, text) for text in _PROBES]
    mark: list[int] = []
    while all(len(p) > len(mark) + 1 for p in prompts) and len({p[-1 - len(mark)] for p in prompts}) == 1:
        mark.insert(0, prompts[0][-1 - len(mark)])
    bos = tokenizer.bos_token_id
    if bos is not None and prompts[0][0] == bos and mark[:1] != [bos]:
        mark.insert(0, bos)
    if not mark:
        raise ValueError(
            f"template {template!r} puts nothing between instruction and answer, and the tokenizer has no BOS: IFD needs one"
        )
    return mark


def pass_rows(encoded: Encoded, mark: Sequence[int]) -> tuple[TokenRow, TokenRow]:
    """(conditional, direct) with the same targets. Answers of several turns follow each other in the direct row."""
    labels = encoded.labels.copy()
    labels[0] = IGNORE_INDEX  # predicted by nothing, so it may not count in the direct pass either
    answer = labels[labels != IGNORE_INDEX]
    ids = np.concatenate([np.asarray(mark, np.int32), answer])
    direct = ids.copy()
    direct[: len(mark)] = IGNORE_INDEX
    return row_of_labels(encoded.input_ids, labels), row_of_labels(ids, direct)


def refusal(example: Example, encoded: Encoded) -> int:
    """Number of the reason why a row is not scored, before any model has seen it; 0 if there is none."""
    answers = [t.text for t in example.turns if t.supervised] if example.turns else [example.response]
    if all(is_empty(a) for a in answers) or not encoded.n_target:
        return IFD_REASONS.index("truncated" if encoded.truncated and not all(is_empty(a) for a in answers) else "empty")
    return IFD_REASONS.index("truncated") if encoded.truncated else 0


def loss_pairs(ready: LossPass, pairs: Sequence[tuple[TokenRow, TokenRow]]) -> np.ndarray:
    """(b, 2) float32: conditional and direct loss of each row, two forward passes over one batch."""
    return np.hstack([ready.rows([conditional for conditional, _ in pairs]), ready.rows([direct for _, direct in pairs])])


def extract_ifd_losses(context: FeatureContext, spec: FeatureSpec, writer: RowWriter) -> None:
    """Extractor: rows (n, 4) float32, see IFD_COLUMNS; a row that is not scored has zero losses and its reason. Params:
    `IfdParams`."""
    params = IfdParams(**spec.params)
    eos = context.tokenizer.eos_token_id
    encoded = [e if params.score_eos else without_eos(e, eos) for e in context.encoded]
    reasons = [refusal(x, e) for x, e in zip(context.pool.examples, encoded, strict=True)]
    mark = answer_mark(context.template, context.tokenizer)
    nothing = row_of_labels(np.zeros(0, np.int32), np.zeros(0, np.int32))
    pairs = [pass_rows(e, mark) if not r else (nothing, nothing) for e, r in zip(encoded, reasons, strict=True)]
    empty = np.zeros((len(encoded), len(IFD_COLUMNS)), np.float32)
    empty[:, IFD_COLUMNS.index("reason")] = reasons

    def block(ready: LossPass, batch: list[int]) -> np.ndarray:
        losses = loss_pairs(ready, [pairs[i] for i in batch])
        count(writer, ready, [pairs[i][1] for i in batch])
        bad = ~np.isfinite(losses).all(axis=1, keepdims=True)
        tokens = np.array([[len(pairs[i][1].targets)] for i in batch])
        return np.hstack([np.where(bad, 0.0, losses), tokens, bad * IFD_REASONS.index("nonfinite")])

    model = None
    if params.pre_experience is not None:
        model = experienced_model(context, PreExperience(**params.pre_experience), writer)
    rows = [conditional for conditional, _ in pairs]
    write_by_batch(context, spec, writer, rows, block, empty=empty, precision=params.precision, model=model)
