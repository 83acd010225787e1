"""Reward from a judge model: asks an engine or a service, and reads a score from its answer."""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from rl_core.data import IntArray, Prompt
from rl_core.errors import RolloutError, SettingsError
from rl_core.record_fields import FiniteFloat, PositiveInt, settings_record
from rl_rollout.engines.protocol import GenerateRequest, RolloutEngine, SamplingParams
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.answers import final_text
from rl_rollout.rewards.judge_endpoint import JudgeEndpoint
from rl_rollout.rewards.outputs import preview
from rl_rollout.rewards.protocol import RewardInput, RewardResult
from rl_rollout.rewards.scorer import reward_input

FIELD = re.compile(r"\{(prompt|response|ground_truth|data_source|boundary|column:[^{}]+)\}")
# "8/10", "8 out of 10" and "8 on a scale of 0-10" are scores of 8, followed by the scale.
SCALE = re.compile(
    r"(?:(?<=\d)\s*/|(?<=\d)\s+(?:out\s+)?of\b|\bscale\s+(?:of|from)\b)\s*(?:(?:an?|the)\s+\w+\s+(?:of\s+)?)?"
    r"\d+(?:\.\d+)?(?:\s*(?:-|\u2013|to)\s*\d+(?:\.\d+)?)?",
    re.IGNORECASE,
)
# "2nd", "1,5" and "5e-1" are not scores.
NUMBER = re.compile(r"(?<![\w./\u2212-])(?<!\d,)-?\d+(?:\.\d+)?(?!\w|[.,][\w.]*\d)")
# "Score: 9", "**Rating** is 9", "<score>9" and "[[9]]": what follows may name other numbers, such as of criteria.
NAMED = re.compile(
    r"(?:(?<!/)\b(?:score|rating|grade|mark|verdict|overall|total)\b[^\w\n.-]*[:=>*][^\w\n.-]*"
    r"|(?<!/)\b(?:score|rating|grade|mark)\b[^\w\n.-]*\bis\b[^\w\n.-]*|\[\[\s*)(?=-?\d)",
    re.IGNORECASE,
)
ASIDE = re.compile(r"\([^()]*\)")
# A judge may quote the response, which may hold a score. Quotes without digits may be the keys of JSON.
QUOTED = re.compile(r'"[^"\n]*"|\u201c[^\u201d\n]*\u201d|`[^`\n]*`|^[ \t]*>.*$', re.MULTILINE)
YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


class NoScoreError(RolloutError):
    """A judge's answer has no readable score."""


@settings_record
class JudgeModel:
    """A started engine that judges, and its tokenizer. It may be the policy's engine.

    Attributes:
        engine: Any RolloutEngine. Its owner starts and closes it.
        encode: Returns the token ids of a question, with the chat template applied.
        decode: Returns the text of each token sequence.
    """

    engine: RolloutEngine
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[IntArray]], list[str]]

    @classmethod
    def with_tokenizer(cls, engine: RolloutEngine, tokenizer: PromptTokenizer) -> "JudgeModel":
        """Ask in a user message if the tokenizer has a chat template, else in plain text."""

        def encode(text: str) -> Sequence[int]:
            if not tokenizer.has_chat_template:
                return tokenizer.encode([text], add_special_tokens=True)[0]
            rendered = tokenizer.render([{"role": "user", "content": text}], where="the judge's prompt")
            return tokenizer.encode([rendered], add_special_tokens=False)[0]

        return cls(engine=engine, encode=encode, decode=tokenizer.decode)

    async def answers(self, question: str, sampling: SamplingParams, *, num_samples: int) -> list[tuple[str, str]]:
        """Return the texts and finish reasons of the engine's answers.

        Raises:
            EngineError: The engine cannot serve the request.
        """
        ids = np.asarray(self.encode(question), dtype=np.int32)
        request = GenerateRequest(input_ids=ids, sampling=sampling, num_samples=num_samples)
        found = await self.engine.generate(request)
        texts = self.decode([generation.token_ids for generation in found])
        return [(text, generation.finish_reason) for text, generation in zip(texts, found, strict=True)]


@settings_record
class JudgeReward:
    """A judge's score of a response, scaled so that `low` gives 0 and `high` gives 1.

    The judge answers greedily unless temperature is above 0. The last match in the answer counts, after the judge's
    thinking. An answer without a score between low and high is a failure. So is a cut answer, because its verdict may
    be missing. Component: `score`, as the judge gave it. The extras contain the judge's answer.

    Attributes:
        model: Options of JudgeEndpoint: `url`, `name` and others. Without them, the judge is the JudgeModel that the
            code that builds the reward passes: in the trainers, the policy's engine.
        template: The question, with {prompt}, {response}, {ground_truth}, {data_source} and {column:NAME}; other braces
            are literal. {boundary} is 16 hex digits that the response cannot know, to enclose it.
        parse: "number" reads the last number that is named a score, such as in "Score: 9", or else the last one
            outside of parentheses; "yes_no" the last yes (`high`) or no (`low`). Anything else is a regular expression
            whose first group (or whole match) is a number.
        low: Minimum score.
        high: Maximum score.
        max_tokens: Maximum number of tokens in the answer.
        accept_cut: True also reads an answer that was cut at max_tokens, such as a verdict of a single token.
        temperature: Sampling temperature; 0 is greedy.
        seed: Sampling seed; None samples without one.
        max_response_characters: Maximum length of the response shown to the judge, in characters; the middle of a
            longer one is omitted.
        num_samples: Number of answers, whose mean score counts; it needs a temperature above 0. Answers without a score
            are left out if they are fewer than half. Component: `score_std`.
        calibration: Pairs of a judge's score and the reward that it is worth, such as [[2, 0.0], [6, 0.5], [9, 1.0]],
            by rising scores; linear between them and constant beyond both ends. The reward is the mean worth of the
            answers. None scales by low and high instead.
    """

    model: Any  # JudgeModel, JudgeEndpoint or its options
    template: str
    parse: str = "number"
    low: float = 0.0
    high: float = 1.0
    max_tokens: PositiveInt = 512
    accept_cut: bool = False
    temperature: float = 0.0
    seed: int | None = None
    max_response_characters: PositiveInt = 100_000
    num_samples: PositiveInt = 1
    calibration: tuple[tuple[FiniteFloat, FiniteFloat], ...] | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            SettingsError: An option is invalid.
        """
        if isinstance(self.model, Mapping):
            object.__setattr__(self, "model", JudgeEndpoint(**self.model))
        if not isinstance(self.model, JudgeModel | JudgeEndpoint):
            raise SettingsError(
                "model of reward 'judge' must be a table with url and name, or a JudgeModel, which the program passes: "
                f"build_scorer(options, parts={{'model': JudgeModel(...)}}); found {preview(self.model)}."
            )
        if self.num_samples > 1 and not self.temperature:
            raise SettingsError("num_samples of reward 'judge' needs a temperature above 0: greedy answers are equal.")
        if "{response}" not in self.template:
            raise SettingsError(f"template of reward 'judge' must have {{response}}; found {preview(self.template)}.")
        if not -math.inf < self.low < self.high < math.inf:
            raise SettingsError(f"reward 'judge' needs finite low < high; found {self.low!r} and {self.high!r}.")
        rising = [0.0, 1.0] if self.calibration is None else [score for score, _ in self.calibration]
        if len(rising) < 2 or min(np.diff(rising)) <= 0:
            raise SettingsError(
                "calibration of reward 'judge' must be at least two pairs [score, reward] in strictly rising order of "
                f"the scores, such as [[2, 0.0], [9, 1.0]]; found {preview(self.calibration)}."
            )
        try:
            re.compile(self.parse)
        except re.error as error:
            raise SettingsError(
                f"parse of reward 'judge' must be 'number', 'yes_no' or a regular expression; found {self.parse!r} "
                f"({error})."
            ) from error

    async def rehearse(self, prompt: Prompt) -> None:
        """Render the question about an empty response. The judge's engine need not be started yet.

        Raises:
            SettingsError: The template names a column that the row lacks.
        """
        try:
            self.ask(reward_input(prompt, text="", ids=np.empty(0, np.int32)))
        except KeyError as error:
            raise SettingsError(
                f"template of reward 'judge' names the column {error}, which the first prompt lacks."
            ) from error

    async def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            NoScoreError: The answer was aborted or cut, or has no score between low and high.
            EngineError: The engine cannot serve the request.
            RLError: As in `JudgeEndpoint.answers`.
        """
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)
        answers = await self.model.answers(self.ask(given), sampling, num_samples=self.num_samples)
        scores, failures = list[float](), list[NoScoreError]()
        for text, finish_reason in answers:
            try:
                scores.append(self._score_of(text, finish_reason))
            except NoScoreError as failure:
                failures.append(failure)
        if len(failures) >= max(len(scores), 1):
            raise failures[0]
        score = statistics.fmean(scores)
        components = {"score": score} | ({"score_std": statistics.pstdev(scores)} if self.num_samples > 1 else {})
        reward = (score - self.low) / (self.high - self.low)
        if self.calibration is not None:
            reward = float(np.interp(scores, *np.transpose(self.calibration)).mean())
        return RewardResult(reward=reward, components=components, extras={"judge_answer": answers[-1][0][-2000:]})

    def _score_of(self, answer: str, finish_reason: str) -> float:
        if finish_reason == "abort":
            raise NoScoreError(f"the judge's answer was aborted after {len(answer)} characters.")
        if finish_reason == "length" and not self.accept_cut:
            raise NoScoreError(
                f"the judge's answer was cut at max_tokens = {self.max_tokens}; raise it, or set accept_cut = true "
                f"to read cut answers. The answer ends: {preview(answer[-200:], max_characters=220)}."
            )
        return self.score_in(final_text(answer))

    def ask(self, given: RewardInput) -> str:
        """Return the question to the judge. Fields of the template are not replaced inside the response.

        Raises:
            KeyError: The row lacks a column of the template.
        """
        messages = "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in given.messages)
        fields: Mapping[str, str] = {
            "prompt": messages or str(given.columns.get("prompt", "")),
            "response": _middle_out(given.response_text, max_characters=self.max_response_characters),
            "ground_truth": str(given.ground_truth),
            "data_source": given.data_source,
            "boundary": sha256(given.response_text.encode("utf-8", "replace")).hexdigest()[:16],
        }

        def value(match: re.Match[str]) -> str:
            name = match[1]
            return fields[name] if name in fields else str(given.columns[name.removeprefix("column:")])

        return FIELD.sub(value, self.template)

    def score_in(self, answer: str) -> float:
        """Return the score in an answer.

        Raises:
            NoScoreError: The answer has no score between low and high.
        """
        if self.parse == "number":
            matches = _numbers(answer)
        else:
            pattern = YES_NO if self.parse == "yes_no" else re.compile(self.parse)
            matches = list(pattern.finditer(answer))
        if not matches:
            raise NoScoreError(
                f"the judge's answer has no score (parse = {self.parse!r}): "
                f"{preview(answer[-200:], max_characters=220)}."
            )
        found = matches[-1][1] if matches[-1].re.groups else matches[-1][0]
        if self.parse == "yes_no":
            return self.high if found.lower() == "yes" else self.low
        try:
            score = float(found)
        except (TypeError, ValueError) as error:
            raise NoScoreError(f"the judge's answer has the score {preview(found)}, which is not a number.") from error
        if not self.low <= score <= self.high:
            raise NoScoreError(f"the judge's score must be from {self.low:g} to {self.high:g}; found {score:g}.")
        return score


def _numbers(answer: str) -> list[re.Match[str]]:
    """Return the numbers that may be the score: those named as one, or all outside of parentheses or quotes, or all."""
    answer = SCALE.sub(" ", answer)
    words = ASIDE.sub(" ", QUOTED.sub(lambda quote: " " if any(map(str.isdigit, quote[0])) else quote[0], answer))
    for text in (words, answer):
        if named := [found for name in NAMED.finditer(text) if (found := NUMBER.match(text, name.end()))]:
            return named
    return list(NUMBER.finditer(words)) or list(NUMBER.finditer(answer))


def _middle_out(text: str, *, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[len(text) - half :]}"
