"""The tiny model: a random Llama and a byte-level tokenizer, made in code.

In: a configuration. Out: the same weights in every process. For `+scale=smoke` and tests: every stage runs with real classes in
seconds. It has learnt nothing, and no number made with it means anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
_INIT_SEED = 0
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: ids 0 to 2 are BOS, EOS and pad, 3 + i is the i-th symbol of the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIAL_TOKENS
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def build_tiny_model(config: PretrainedConfig, *, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """A randomly initialised model; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_INIT_SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    model.config.architectures = [type(model).__name__]
    return model.to(dtype).eval()
