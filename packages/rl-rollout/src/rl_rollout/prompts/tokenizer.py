"""Converts text to tokens and back with the tokenizer in a model folder."""

import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.data import IntArray, Json, encodable
from rl_core.errors import DataError, MissingExtraError, SettingsError
from rl_core.files import count_values, read_json_object, read_plain, run_trial
from rl_core.images import ImageProcessor, ImageStore, image_token_id
from rl_core.record_fields import converts_arguments
from rl_rollout.engines.model_folder import PROCESSOR_FILES, VOCABULARY_FILES, check_config, has_tokenizer, takes_images
from rl_rollout.engines.response_text import Decode, ResponseText
from rl_rollout.prompts.image_tokens import ImageTokens
from rl_rollout.prompts.within import call_within

COMPANION_FILES = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "merges.txt",
    "processor_config.json",
    "preprocessor_config.json",
)
"""Files that transformers reads in addition."""

UNTRIED = ("config.json", "processor_config.json", "preprocessor_config.json")
MAX_FILE_BYTES = 1 << 27
MAX_FILE_VALUES = 1 << 23
TRIAL = Path(__file__).with_name("tokenizer_trial.py")
SLOW_CPU_S = 60
"""Extra CPU seconds for a folder without tokenizer.json, because transformers builds the tokenizer."""

DEADLINE_S = 30.0
BYTES_PER_S = 100_000
"""Minimum speed before a timeout. Tokenizers are ten times as fast."""


class PromptTokenizer:
    """A Hugging Face tokenizer, for prompts and responses."""

    @converts_arguments
    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_options: Mapping[str, Json] | None = None,
        date: datetime.date | None = None,
        image_folder: Path | None = None,
    ) -> None:
        """Wrap a tokenizer that is already loaded.

        Args:
            tokenizer: A transformers tokenizer.
            chat_template: Jinja text used instead of the tokenizer's own template.
            template_options: Variables of the template, such as {"enable_thinking": False}.
            date: Day that the template prints as today's; None is today, for as long as this object lives.
            image_folder: Folder of the run's `ImageStore`, for `images`.

        Raises:
            SettingsError: The template draws random numbers, so no prompt could be rendered twice.
        """
        self._tokenizer = tokenizer
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._chat_template = chat_template or tokenizer.chat_template
        self._template_options = dict(template_options or {})
        self._image_folder = image_folder
        self._prints_date = "strftime_now" in str(self._chat_template)
        self._midnight = datetime.datetime.combine(date or datetime.date.today(), datetime.time())
        if self._chat_template and _draws(str(self._chat_template)):
            raise SettingsError(
                f"the chat template of {self._name} uses `random` or `lipsum`, so it would render a prompt differently "
                "each time. Replace that part."
            )

    @classmethod
    @converts_arguments
    def load(
        cls,
        folder: Path,
        *,
        chat_template: str | None = None,
        template_options: Mapping[str, Json] | None = None,
        date: datetime.date | None = None,
        image_folder: Path | None = None,
    ) -> "PromptTokenizer":
        """Load the tokenizer of a model folder. Nothing is downloaded, and no code of the folder runs.

        Raises:
            SettingsError: The folder is missing, has no tokenizer that transformers can load, or a template that draws
                random numbers.
            MissingExtraError: transformers is not installed.
        """
        if not folder.is_dir():
            raise SettingsError(f"{folder} is not a folder. Give a local model folder; nothing is downloaded.")
        # transformers creates an empty tokenizer from config.json alone, so check the files first.
        if not has_tokenizer(folder):
            raise SettingsError(
                f"{folder} has no tokenizer; expected one of {', '.join(VOCABULARY_FILES)}. "
                "Copy the tokenizer's files into the model folder."
            )
        _try_folder(folder, chat_template, template_options)
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtraError(
                "tokenizers need transformers. Install rl-rollout[transformers] as the README says."
            ) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # many types for a damaged folder; a Rust panic is not an Exception
            raise SettingsError(
                f"{folder}: transformers cannot load the tokenizer ({type(error).__name__}: {error})."
            ) from error
        if not tokenizer.chat_template:
            tokenizer.chat_template = _processor_template(folder)
        return cls(
            tokenizer,
            chat_template=chat_template,
            template_options=template_options,
            date=date,
            image_folder=image_folder,
        )

    @property
    def wrapped(self) -> Any:
        """The transformers tokenizer, for libraries that require one."""
        return self._tokenizer

    @cached_property
    def sees_images(self) -> bool:
        """True if the model in the tokenizer's folder takes images."""
        return takes_images(Path(self._name))

    @cached_property
    def image_token_id(self) -> int | None:
        """Id of the tokens that stand for images; None for a model of text."""
        if not self.sees_images:
            return None
        from transformers import AutoConfig

        return image_token_id(AutoConfig.from_pretrained(self._name, local_files_only=True, trust_remote_code=False))

    @cached_property
    def image_settings(self) -> str:
        """Digest of the settings of the image processor, which decide the pixel values."""
        files = (Path(self._name) / name for name in PROCESSOR_FILES)
        texts = [file.read_bytes() if file.is_file() else b"" for file in files]
        return blake2b(b"\0".join(texts), digest_size=16).hexdigest()

    @cached_property
    def image_processor(self) -> ImageProcessor:
        """What turns images into tokens of a prompt.

        Raises:
            SettingsError: The model takes no images, or its folder has no image processor that transformers can load.
        """
        if not self.sees_images:
            raise SettingsError(f"{self._name} takes no images. Use a model that does, or remove the images.")
        return ImageProcessor.load(Path(self._name))

    @cached_property
    def images(self) -> ImageTokens | None:
        """The tokens of images that the run keeps; None for a model of text, or without `image_folder`.

        Raises:
            SettingsError: The model's folder has no image processor that transformers can load.
        """
        if self._image_folder is None or not self.sees_images:
            return None
        return ImageTokens(self.image_processor, ImageStore(self._image_folder))

    @property
    def has_chat_template(self) -> bool:
        """True if messages can be rendered."""
        return bool(self._chat_template)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a response, if the tokenizer has one."""
        found = self._tokenizer.eos_token_id
        return None if found is None else int(found)

    @property
    def num_token_ids(self) -> int:
        """The largest token id plus one. A model's vocabulary must have at least this size."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that are encoded as control tokens."""
        added = self._tokenizer.added_tokens_decoder.values()
        return tuple(sorted({str(token.content) for token in added if token.special}))

    @property
    def fingerprint(self) -> dict[str, str]:
        """Digests of the text-to-token mapping (`vocabulary`), the message format (`template`) and any `images`.

        A template that prints a date adds it as `date`.
        """
        if getattr(self._tokenizer, "is_fast", False):
            vocabulary = self._tokenizer.backend_tokenizer.to_str()
        else:
            vocabulary = json.dumps([self._tokenizer.get_vocab(), self.special_tokens], sort_keys=True)
        template = json.dumps([self._chat_template, self._template_options], sort_keys=True)
        digests = {"vocabulary": vocabulary, "template": template}
        found = {name: blake2b(text.encode(), digest_size=16).hexdigest() for name, text in digests.items()}
        if self.images is not None:
            found["images"] = self.image_settings
        return found | ({"date": self._midnight.date().isoformat()} if self._prints_date else {})

    @property
    def as_json(self) -> str:
        """The tokenizer as the text of one tokenizer.json, including added tokens.

        Raises:
            SettingsError: This kind of tokenizer cannot be written this way.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            raise SettingsError(f"{self._name} has no tokenizer.json, and transformers cannot create one from it.")
        return str(self._tokenizer.backend_tokenizer.to_str())

    def token_id(self, text: str) -> int | None:
        """Return the id of one token by its text, such as "<|im_end|>"; None if the vocabulary lacks it."""
        found = self._tokenizer.get_vocab().get(text)
        return None if found is None else int(found)

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        where: str = "messages",
        tools: Sequence[Mapping[str, Json]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages with the template, without lone surrogates, which tokenizers do not accept.

        An assistant's message at the end is the beginning of the model's answer: the text ends with its content.

        Args:
            messages: `role`, `content`, and other fields of the template.
            where: Description of the messages, for errors.
            tools: Schemas that the template shows to the model; see `rl_rollout.tools.tool_schema`.
            add_generation_prompt: Whether to end where the model answers.

        Raises:
            DataError: There is no template, it refuses these messages, or an assistant's last message has no text.
        """
        if not self._chat_template:
            raise DataError(
                f"{where}: the prompt is a list of messages, but the tokenizer has no chat template. "
                "Set a chat template, or use plain string prompts."
            )
        options = dict(self._template_options)
        if add_generation_prompt and messages and messages[-1].get("role") == "assistant":
            messages = [*messages[:-1], {**messages[-1], "content": _beginning(messages[-1], where=where)}]
            add_generation_prompt, options["continue_final_message"] = False, True
        text = call_within(
            DEADLINE_S,
            lambda: self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._chat_template,
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **({"strftime_now": self._midnight.strftime} if self._prints_date else {}),
                **options,
            ),
            what=f"{where}: the chat template",
            error=DataError,
            fails="refuses the messages",
        )
        return encodable(str(text))

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text.

        Args:
            texts: Texts to encode.
            add_special_tokens: True for plain text, which may need a begin token; False for rendered
                messages, whose template writes its own.
        """
        if not texts:
            return []
        encoded = call_within(
            DEADLINE_S + sum(map(len, texts)) / BYTES_PER_S,
            lambda: self._tokenizer(list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False),
            what=f"the tokenizer of {self._name}, with {len(texts)} texts,",
            error=DataError,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def decode(self, sequences: Sequence[IntArray | Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Decode each sequence, for rewards, tools and people; never for training."""
        if not sequences:
            return []
        ids = [np.asarray(sequence).tolist() for sequence in sequences]
        texts: list[str] = call_within(
            DEADLINE_S + sum(map(len, ids)) / BYTES_PER_S,
            lambda: self._tokenizer.batch_decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            ),
            what=f"the tokenizer of {self._name}, with {len(ids)} token sequences,",
            error=DataError,
        )
        return list(map(encodable, texts))

    def decoder(self, *, skip_special_tokens: bool = False) -> Decode:
        """Return a function that decodes one sequence, for a few tokens at a time."""
        if getattr(self._tokenizer, "is_fast", False):
            fast = self._tokenizer.backend_tokenizer
            return lambda ids: str(fast.decode(ids, skip_special_tokens=skip_special_tokens))
        return lambda ids: self.decode([ids], skip_special_tokens=skip_special_tokens)[0]

    def response_text(
        self, prompt_ids: Sequence[int], *, stop: Sequence[str] = (), skip_special_tokens: bool = False
    ) -> ResponseText:
        """Return the text of a response that arrives in pieces.

        Args:
            prompt_ids: The prompt, or its last tokens.
            stop: Strings that end the text. Engines match them in text with special tokens.
            skip_special_tokens: Omit special tokens.
        """
        return ResponseText(self.decoder(skip_special_tokens=skip_special_tokens), prompt_ids, stop=stop)


def _beginning(message: Mapping[str, Json], *, where: str) -> str:
    """Return the text that the model continues, with text parts joined."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if message.get("tool_calls") or not isinstance(content, str) or not content.strip():
        raise DataError(
            f"{where}: the messages end with an assistant's message that has no text or calls tools; expected text "
            "that the model continues, or a message of the user or a tool at the end. Remove it, or add what follows."
        )
    return content


def _try_folder(folder: Path, chat_template: str | None, options: Mapping[str, Json] | None) -> None:
    """Check the tokenizer's files, then load and use them once in a child process.

    Raises:
        SettingsError: A file is invalid. The message names it.
    """
    names = [name for name in (*VOCABULARY_FILES, *COMPANION_FILES) if os.path.lexists(folder / name)]
    others = [*folder.glob("*.tiktoken"), *folder.glob("additional_chat_templates/*.jinja")]
    contents = {}
    for file in [*(folder / name for name in names), *sorted(others)]:
        raw = read_plain(file, max_bytes=MAX_FILE_BYTES, error=SettingsError)
        if file.suffix == ".json" and count_values(raw) > MAX_FILE_VALUES:
            raise SettingsError(f"{file} must have at most {MAX_FILE_VALUES} values.")
        contents[file] = raw
    if folder / "config.json" in contents:  # transformers reads it first
        check_config(folder / "config.json", error=SettingsError)
    files = [file for file in contents if file.name not in UNTRIED]
    run_trial(
        TRIAL,
        {
            "folder": str(folder),
            "templates": [text for text in (chat_template, *_templates(contents)) if text],
            "options": dict(options or {}),
        },
        files=files,
        libraries=["tokenizers", "jinja2"],
        extra_cpu_s=0 if folder / "tokenizer.json" in contents else SLOW_CPU_S,
        error=SettingsError,
    )


def _templates(contents: Mapping[Path, bytes]) -> Iterator[str]:
    """Return the chat templates in a folder's files."""
    for file, raw in contents.items():
        if file.suffix == ".jinja":
            yield raw.decode(errors="replace")
        elif file.name in ("tokenizer_config.json", "chat_template.json"):
            try:
                found = json.loads(raw).get("chat_template")
            except (ValueError, RecursionError, AttributeError) as error:
                raise SettingsError(f"{file} must contain a JSON object ({error}).") from None
            several = found if isinstance(found, list) else [{"template": found}]
            yield from (str(one["template"]) for one in several if isinstance(one, dict) and one.get("template"))


def _processor_template(folder: Path) -> str | None:
    """Return the template in the file of an older transformers' processor; None without one.

    Raises:
        SettingsError: Its file has something else.
    """
    file = folder / "chat_template.json"
    found = read_json_object(file, error=SettingsError).get("chat_template") if file.is_file() else None
    if found is not None and not isinstance(found, str):
        raise SettingsError(f"{file} must have chat_template as a text; found {type(found).__name__}.")
    return found


def _draws(template: str) -> bool:
    """True if a template uses Jinja's random filter or random text."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        tokens = [(kind, value) for _, kind, value in Environment(autoescape=True).lex(template)]
    except TemplateSyntaxError:  # rendering reports it
        return False
    words = [value for kind, value in tokens if kind in ("name", "operator")]
    strings = {value[1:-1] for kind, value in tokens if kind == "string"}  # a name for `map` and `select`
    return (
        "lipsum" in words or bool({("|", "random"), ("filter", "random")} & {*pairwise(words)}) or "random" in strings
    )
