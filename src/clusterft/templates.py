"""Prompt formats: a conversation to runs of text, each either context or target.

In: turns and a template's name. Out: a list of `Run`s. A run is tokenised on its own, prompt and answer apart (the released
recipe does so, and it is what makes a generation prompt equal to the training prompt token for token); a target run ends in EOS.

    magicoder   the format of Magicoder's release: preamble, @@ Instruction, @@ Response
    alpaca      the pair of Stanford Alpaca, with and without an input block
    chat        the tokenizer's own chat template; every answer is a target
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from clusterft.records import Example, Turn
from clusterft.text_rules import normalise_input

MAGICODER_PREAMBLE = (
    "You are an exceptionally intelligent coding assistant that consistently delivers accurate and reliable responses "
    "to user instructions."
)
ALPACA_PREAMBLES = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.",
)
TEMPLATES = ("magicoder", "alpaca", "chat")

_MARK = "\ue000{}\ue001"
"""Private-use characters stand in for each message while a chat template is taken apart; templates leave them alone."""


class Run(NamedTuple):
    """A stretch of text. `end`: write EOS after it (the template does not write an end of turn of its own)."""

    text: str
    target: bool
    end: bool = False


def turns_of(example: Example) -> tuple[Turn, ...]:
    """The conversation of an example; a single exchange becomes one question (input block merged later) and one target answer."""
    if example.turns:
        return example.turns
    return Turn("user", example.prompt), Turn("assistant", example.response, True)


def runs(example: Example, template: str, tokenizer: Any) -> list[Run]:
    """Runs of an example under a template. Raises ValueError for an unknown template or a tokenizer without a chat template."""
    turns = turns_of(example)
    block = normalise_input(example.input)
    if template == "magicoder":
        return _marked(turns, block, MAGICODER_PREAMBLE, "@@ Instruction\n", "@@ Response\n")
    if template == "alpaca":
        return _marked(turns, block, ALPACA_PREAMBLES[bool(block)], "### Instruction:\n", "### Response:", "### Input:\n")
    if template == "chat":
        return _chat(turns, block, tokenizer)
    raise ValueError(f"template {template!r} is unknown; known: {', '.join(TEMPLATES)}")


def _marked(turns: Sequence[Turn], block: str, preamble: str, question: str, answer: str, input_mark: str = "") -> list[Run]:
    """Marker templates. Later exchanges repeat the markers; a system message goes in front of the question after it."""
    out: list[Run] = []
    context = preamble + "\n\n"
    for position, turn in enumerate(turns):
        if turn.role == "system":
            context += turn.text + "\n\n"
        elif turn.role == "user":
            context += question + turn.text + "\n\n"
            if block and not any(t.role == "user" for t in turns[:position]):
                context += f"{input_mark}{block}\n\n"
        else:
            context += answer
            if turn.supervised:
                out += [Run(context, False), Run(turn.text, True, end=True)]
                context = "\n\n"
            else:
                context += turn.text + "\n\n"
    return out


def _chat(turns: Sequence[Turn], block: str, tokenizer: Any) -> list[Run]:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("template 'chat': the tokenizer has no chat template; use data.template=alpaca or magicoder")
    contents = [t.text for t in turns]
    if block:
        first = next(i for i, t in enumerate(turns) if t.role == "user")
        contents[first] += "\n\n" + block
    pieces, contents = _take_apart(turns, contents, tokenizer)
    out: list[Run] = []
    context = pieces[0]
    for turn, content, after in zip(turns, contents, pieces[1:], strict=True):
        if not turn.supervised:
            context += content + after
            continue
        trailer, rest = _end_of_turn(after, tokenizer)
        out += [Run(context, False), Run(content + trailer, True, end=not trailer)]
        context = rest
    return out


def _take_apart(turns: Sequence[Turn], contents: list[str], tokenizer: Any) -> tuple[list[str], list[str]]:
    """The template's own text before, between and after the messages, and the messages as it prints them.

    Raises ValueError if the template changes messages in a way that cannot be followed: no guess is made about the mask.
    """
    marks = [_MARK.format(i) for i in range(len(turns))]
    skeleton = _render(turns, marks, tokenizer)
    pieces: list[str] = []
    for mark in marks:
        before, found, skeleton = skeleton.partition(mark)
        if not found:
            raise ValueError("the tokenizer's chat template leaves out a message; use data.template=alpaca or magicoder")
        pieces.append(before)
    pieces.append(skeleton)
    whole = _render(turns, contents, tokenizer)
    for candidate in (contents, [c.strip() for c in contents]):
        if whole == "".join(p + c for p, c in zip(pieces, candidate, strict=False)) + pieces[-1]:
            return pieces, candidate
    raise ValueError("the tokenizer's chat template rewrites messages, so answers cannot be told apart; use data.template=alpaca")


def _render(turns: Sequence[Turn], contents: Sequence[str], tokenizer: Any) -> str:
    messages = [{"role": t.role, "content": c} for t, c in zip(turns, contents, strict=True)]
    return tokenizer.apply_chat_template(messages, tokenize=False)


def _end_of_turn(after: str, tokenizer: Any) -> tuple[str, str]:
    """Splits what follows an answer behind its first special token: that token ends the answer, the rest is context."""
    added = (str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)
    ends = [(after.find(token), token) for token in {*tokenizer.all_special_tokens, *added} if token in after]
    ends = [(at, token) for at, token in ends if not after[:at].strip() and token != tokenizer.bos_token]
    if not ends:
        return "", after
    at, token = min(ends, key=lambda e: (e[0], -len(e[1])))
    return after[: at + len(token)], after[at + len(token) :]
