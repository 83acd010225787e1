"""Workloads of the gateway benchmark: conversations, and a policy that generates words and never ends."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from _rollout_workload import PRESETS, Preset, weights_of, write_policy
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
END_TOKEN = SPECIAL.index("<|im_end|>")
VOCAB_SIZE = 3072
NUM_WORDS = 1024
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEVER = np.float32(-4.0)
"""Weight of tokens that are no words for the hidden dimension that all tokens have; its value is above 10."""

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sessions that run at once, each in a closed loop.

    Attributes:
        num_sessions: Number of concurrent sessions.
        num_turns: Turns per session.
        user_tokens: Approximate number of new tokens in each turn.
        max_tokens: Tokens of each answer; the policy's answers always have as many.
        is_streamed: Stream answers token by token.
    """

    num_sessions: int
    num_turns: int
    user_tokens: int
    max_tokens: int
    is_streamed: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled in a round."""
        return self.num_sessions * self.num_turns * self.max_tokens


CHAT_8, CHAT_64, LONG = "chat_8", "chat_64", "long_history"
WORKLOADS = {
    CHAT_8: Workload(num_sessions=8, num_turns=6, user_tokens=32, max_tokens=64),
    CHAT_64: Workload(num_sessions=64, num_turns=6, user_tokens=32, max_tokens=64),
    LONG: Workload(num_sessions=1, num_turns=40, user_tokens=730, max_tokens=16),
}
SCRIPTED = Workload(num_sessions=8, num_turns=40, user_tokens=32, max_tokens=32)
MAX_MODEL_LEN = 32_768
MODELS: dict[str, Preset] = {
    "1m": replace(PRESETS["tiny"], vocab_size=VOCAB_SIZE, hidden_size=128, kv_cache_gib=0.5),
    "6m": replace(PRESETS["6m"], vocab_size=VOCAB_SIZE),
}
"""Shapes of policies; the smaller one is the default, because the servers' cost is a larger share of its turns."""


def words() -> list[str]:
    """As many as the policy knows, without any meaning."""
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    random = np.random.default_rng(0)
    chosen = random.choice(len(syllables) ** 2, NUM_WORDS, replace=False)
    return [syllables[index // len(syllables)] + syllables[index % len(syllables)] for index in chosen]


def user_message(random: np.random.Generator, known: list[str], num_tokens: int) -> Message:
    """Return a text with a given number of tokens."""
    return {
        "role": "user",
        "content": "".join(f" {known[index]}" for index in random.integers(0, len(known), num_tokens)),
    }


def write_chat_policy(model: str, folder: Path) -> None:
    """Write a policy that samples only words, nearly uniformly, so no answer ends before its limit.

    A text of words is encoded as the sampled tokens, so a server that encodes histories again finds them in its prefix
    cache.
    """
    preset = MODELS[model]
    write_policy(preset, "equal", folder)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": SPECIAL[0], "eos_token": SPECIAL[END_TOKEN]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": TEMPLATE}))
    config = json.loads((folder / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "eos_token_id": END_TOKEN, "max_position_embeddings": 40_960}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    says = [tokenizer.encode(f" {word}").ids for word in words()]
    assert all(len(ids) == 1 for ids in says), "each word is one token"
    save_file(_saying(weights, [ids[0] for ids in says]), folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([f" {word}" for word in words()], trainer)
    return tokenizer


def _saying(weights: dict[str, NDArray[np.float32]], token_ids: list[int]) -> dict[str, NDArray[np.float32]]:
    """Return weights that sample only these tokens: hidden dimension 0 is the same for all tokens and layers."""
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = 1
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    head = weights_of(np.random.default_rng(1), *embedding.shape)
    head[:, 0] = NEVER
    head[token_ids, 0] = 0
    return {**weights, "lm_head.weight": head}
