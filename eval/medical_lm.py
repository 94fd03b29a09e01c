"""lm-eval's model class with two additions: prompts as in training, and options that share one reading of their question.

    (question, option) pairs from lm-eval ► MedicalLM ► (log-likelihood, is greedy) pairs

Without a template everything is lm-eval's own. With one, the question becomes the instruction of the training format, with
exactly the token ids that training saw, and the option is tokenised as an answer is. `pack_tokens` scores all options of a
question in one pass: question and options stand in one sequence, an option sees the question and itself only (a tree of
attention), several questions are packed up to so many tokens. Same log-likelihoods as lm-eval's own way up to rounding (1e-4 in
float32, tenths of a nat an option under bf16), at a third of the work for option texts. Importing this module imports lm-eval
(seconds): do it late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from clusterft.progress import PassProgress
from clusterft.prompting import generation_prompt
from eval.errors import EvaluationError

Request = tuple[tuple[str, str], list[int], list[int]]
Score = tuple[float, bool]


@dataclass(frozen=True)
class _Question:
    """A context with the options asked about it; places are positions in lm-eval's list of requests."""

    context: list[int]
    options: list[list[int]]
    places: list[int]

    @property
    def length(self) -> int:
        """Tokens to read: the context and every option without its last token."""
        return len(self.context) + sum(len(o) - 1 for o in self.options)


class MedicalLM(HFLM):
    """HFLM for one trained model. `cut` collects contexts that had to lose tokens on the left to fit the model."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        template: str | None,
        batch_size: int,
        pack_tokens: int | None,
        autocast: bool,
        progress: bool,
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            mixed_precision_dtype="bfloat16" if autocast else None,
        )
        if pack_tokens is not None and model.config._attn_implementation not in ("sdpa", "eager"):
            raise EvaluationError(
                f"pack_tokens needs attention sdpa or eager, this model has {model.config._attn_implementation}; "
                "set pack_tokens=null"
            )
        self.template, self.pack_tokens, self.progress = template, pack_tokens, progress
        self.cut: set[str] = set()
        self._prompts: dict[str, list[int]] = {}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """What lm-eval's chat mode calls. The template itself is applied as token ids in `_encode_pair`."""
        return "".join(message["content"] for message in chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return f"clusterft:{self.template}"

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """(context ids, option ids). Raises EvaluationError for an option that has no token of its own."""
        if self.template is None:
            question, option = super()._encode_pair(context, continuation)
        else:
            if context not in self._prompts:
                self._prompts[context] = generation_prompt(self.template, self.tokenizer, context)
            question = self._prompts[context]
            option = self.tokenizer(continuation, add_special_tokens=False)["input_ids"]
        if not option:
            raise EvaluationError(f"option {continuation!r} has no token of its own after {context[-40:]!r}; drop this question")
        if len(question) + len(option) > self.max_length + 1:
            self.cut.add(context)
        return question, option

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Score]:
        return super().loglikelihood(requests, disable_tqdm=not self.progress)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Score]:
        if self.pack_tokens is None:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        scores: list[Score | None] = [None] * len(requests)
        too_long = [i for i, (_, c, o) in enumerate(requests) if len(c) + len(o) > self.max_length + 1]
        for i, score in zip(too_long, super()._loglikelihood_tokens([requests[i] for i in too_long], True), strict=True):
            scores[i] = score
        packs = pack(group(requests, set(too_long)), self.pack_tokens)
        with PassProgress("options", len(requests), None, shown=not disable_tqdm, unit="options") as bar:
            for questions in packs:
                for place, score in self._score(questions):
                    scores[place] = score
                    bar.advance(1)
        assert all(s is not None for s in scores)
        return [s for s in scores if s is not None]

    @torch.inference_mode()
    def _score(self, questions: Sequence[_Question]) -> list[tuple[int, Score]]:
        """Log-likelihood of every option of the questions of one pack."""
        ids, positions, mask, rows, targets, places = layout(questions)
        model, device = self.model, self.device
        allowed = mask.to(device)[None, None]
        if model.config._attn_implementation == "eager":  # adds its mask to the scores; sdpa takes a boolean one
            allowed = torch.zeros_like(allowed, dtype=model.dtype).masked_fill(~allowed, torch.finfo(model.dtype).min)
        with torch.autocast(device.type, dtype=self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None):
            logits = model(
                input_ids=ids.to(device)[None],
                position_ids=positions.to(device)[None],
                attention_mask=allowed,
                use_cache=False,
                logits_to_keep=rows.to(device),
            ).logits[0]
        wanted = targets.to(device)
        log_p = torch.log_softmax(logits.float(), dim=-1)
        token_scores, hits = log_p.gather(1, wanted[:, None])[:, 0].cpu(), (logits.argmax(-1) == wanted).cpu()
        out, start = [], 0
        for place, length in places:
            stop = start + length
            out.append((place, (float(token_scores[start:stop].sum()), bool(hits[start:stop].all()))))
            start = stop
        return out


def group(requests: Sequence[Request], without: set[int]) -> list[_Question]:
    """Requests with one context become one question, in order of first appearance."""
    found: dict[tuple[int, ...], _Question] = {}
    for place, (_, context, option) in enumerate(requests):
        if place not in without:
            question = found.setdefault(tuple(context), _Question(context, [], []))
            question.options.append(option)
            question.places.append(place)
    return list(found.values())


def pack(questions: Sequence[_Question], tokens: int) -> list[list[_Question]]:
    """Longest first, as many as fit into `tokens`; a longer question stands alone."""
    packs: list[list[_Question]] = []
    room = 0
    for question in sorted(questions, key=lambda q: -q.length):
        if question.length > room:
            packs.append([])
            room = tokens
        packs[-1].append(question)
        room -= question.length
    return packs


def layout(
    questions: Sequence[_Question],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """A pack as one sequence of t tokens.

    Returns ids (t,), positions (t,), mask (t, t) True where a token may look, rows (r,) that predict option tokens, those tokens
    (r,), and (place, number of rows) of every option. The last token of an option is only predicted, never read.
    """
    total = sum(q.length for q in questions)
    ids, positions = torch.empty(total, dtype=torch.long), torch.empty(total, dtype=torch.long)
    mask = torch.zeros(total, total, dtype=torch.bool)
    rows: list[int] = []
    targets: list[int] = []
    places: list[tuple[int, int]] = []
    at = 0
    for q in questions:
        n, start = len(q.context), at
        ids[start : start + n], positions[start : start + n] = torch.tensor(q.context), torch.arange(n)
        mask[start : start + n, start : start + n] = torch.ones(n, n, dtype=torch.bool).tril()
        at += n
        for option, place in zip(q.options, q.places, strict=True):
            k = len(option) - 1
            ids[at : at + k], positions[at : at + k] = torch.tensor(option[:-1], dtype=torch.long), torch.arange(n, n + k)
            mask[at : at + k, start : start + n] = True
            mask[at : at + k, at : at + k] = torch.ones(k, k, dtype=torch.bool).tril()
            rows += [start + n - 1, *range(at, at + k)]
            targets += option
            places.append((place, k + 1))
            at += k
    return ids, positions, mask, torch.tensor(rows), torch.tensor(targets), places
