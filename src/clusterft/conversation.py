"""Conversations (ShareGPT and OpenAI messages) to turns, by role and never by position.

In: the list of one row's messages as it was parsed. Out: a tuple of `Turn`, or a `Refusal` with a reason that can be counted.
Rules: neighbours of one role are joined by a newline, a trailing question is cut off, an empty answer in the middle is context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from clusterft.records import Turn
from clusterft.text_rules import is_empty, printable

ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "bot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
_WORD = {"user": "instruction", "assistant": "response", "system": "system"}


class Refusal(NamedTuple):
    """Why a row was set aside: `reason` to count, `detail` for a person."""

    reason: str
    detail: str = ""


class _Message(NamedTuple):
    role: str
    text: str
    muted: bool


def conversation_turns(value: Any, system: Any = None) -> tuple[Turn, ...] | Refusal:
    """Turns of one conversation. `system` is the row's own system column, put first where the messages have none."""
    listed = _as_list(value)
    if isinstance(listed, Refusal):
        return listed
    messages: list[_Message] = []
    for position, entry in enumerate(listed):
        message = _message(entry, position)
        if isinstance(message, Refusal):
            return message
        messages.append(message)
    if isinstance(system, str) and not is_empty(system) and messages[0].role != "system":
        messages.insert(0, _Message("system", system, True))
    return _supervise(_join_neighbours(messages))


def _as_list(value: Any) -> list[Any] | Refusal:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return Refusal("malformed_turns", "the turns are text that is not a JSON list")
    if value is None or value == []:
        return Refusal("no_turns", "the conversation has no turns")
    if not isinstance(value, list):
        return Refusal("malformed_turns", f"the turns are a {type(value).__name__}, expected a list")
    return value


def _message(entry: Any, position: int) -> _Message | Refusal:
    if not isinstance(entry, Mapping):
        return Refusal("malformed_turn", f"turn {position + 1} is {type(entry).__name__}, expected an object")
    if getattr(entry, "conflicting", frozenset()) & {"from", "role", "value", "content", "weight"}:
        return Refusal("duplicate_key", f"turn {position + 1} names a key twice with different values")
    raw_role = _either(entry, "from", "role")
    role = ROLES.get(raw_role.strip().lower()) if isinstance(raw_role, str) else None
    if role is None:
        return Refusal(
            f"unknown_role:{printable(str(raw_role)[:40])}", f"turn {position + 1}; known roles: {', '.join(sorted(ROLES))}"
        )
    text = _text(_either(entry, "value", "content"), _WORD[role], position)
    if isinstance(text, Refusal):
        return text
    return _Message(role, text, role != "assistant" or entry.get("weight") == 0)


def _either(entry: Mapping[str, Any], first: str, second: str) -> Any:
    """The value of the name that is not null: a table that joins both layouts writes null under the other one's names."""
    value = entry.get(first)
    return entry.get(second) if value is None else value


def _text(value: Any, word: str, position: int) -> str | Refusal:
    if isinstance(value, list):  # OpenAI's content parts
        if not all(isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in value):
            return Refusal("non_text_content", f"turn {position + 1} has parts that are not text")
        return "\n".join(p["text"] for p in value)
    if value is None or (isinstance(value, float) and value != value):
        return Refusal(f"null_{word}", f"turn {position + 1} is null")
    if not isinstance(value, str):
        return Refusal(f"non_string_{word}", f"turn {position + 1} is {type(value).__name__}")
    return value


def _join_neighbours(messages: list[_Message]) -> list[_Message]:
    joined: list[_Message] = []
    for message in messages:
        if not joined or joined[-1].role != message.role:
            joined.append(message)
            continue
        before = joined[-1]
        texts = [t for t in (before.text, message.text) if not is_empty(t)]
        joined[-1] = _Message(message.role, "\n".join(texts), before.muted or message.muted)
    return joined


def _supervise(messages: list[_Message]) -> tuple[Turn, ...] | Refusal:
    spoken = [m for m in messages if m.role != "system"]
    if not spoken:
        return Refusal("no_turns", "only a system message")
    if spoken[0].role == "assistant":
        return Refusal("starts_with_assistant", "the first turn after the system message is an answer")
    if is_empty(spoken[0].text):
        return Refusal("empty_instruction", "the first question is empty")
    answers = [m for m in messages if m.role == "assistant"]
    if not answers:
        return Refusal("no_response", "no turn is an answer")
    targets = [not m.muted and m.role == "assistant" and not is_empty(m.text) for m in messages]
    if not any(targets):
        muted = any(m.muted for m in answers)
        return (
            Refusal("no_target_turn", "every answer has weight 0")
            if muted
            else Refusal("empty_response", "every answer is empty")
        )
    last = max(i for i, target in enumerate(targets) if target)
    return tuple(Turn(m.role, m.text, t) for m, t in zip(messages[: last + 1], targets[: last + 1], strict=True))
