"""Answers requests of sessions: finds their place in the tree, encodes new messages, samples, and stores samples."""

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import structlog

from rl_core.data import Json
from rl_core.errors import EngineDiedError, EngineError, RLError, RolloutError, SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.engines.protocol import GenerateRequest, Generation
from rl_rollout.engines.requests import check_request
from rl_rollout.gateway.agent_requests import AgentRequest, Answer, StreamedAnswer
from rl_rollout.gateway.placing import ConversationEncoder, PlacedRequest, Placer
from rl_rollout.gateway.refusals import TOO_LONG, FaultLog, RefusedError
from rl_rollout.gateway.replies import ReplyReader
from rl_rollout.gateway.request_limits import GatewayEngine, check_entries, check_length, limited, too_long
from rl_rollout.gateway.sampling import DecidedBy, decide
from rl_rollout.gateway.sessions import Session, Sessions
from rl_rollout.gateway.tree import Sample, TreePosition, digest_of
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.tools.parsers import VLLM, is_of_vllm, parser_for

log = structlog.get_logger(__name__)

DISTRIBUTION = ("temperature", "top_p", "top_k")
KEPT_OVERHEADS = 4096
MAX_KEPT_ANSWERS = 16
FIRST_TOKEN_S = 5.0
"""Maximum time in seconds that a stream waits for its first token before it begins."""
OF_THIS_MACHINE = re.compile(r"\n|Traceback|(?<!\w)/\w+/")
"""What an engine's error may say to the log alone: stacks and paths."""


@settings_record
class ServiceOptions:
    """Options of the answers to requests.

    Attributes:
        decided_by: Whose temperature, top-p, top-k and seed apply: "run" (needed for training) or "client".
        tool_parser: Parser of the model's tool calls: a built-in name, `path.py:Class`, or "vllm:NAME" for one of
            vLLM's; None leaves calls in the text.
        reasoning_parser: Parser of the model's reasoning: "vllm:NAME"; None parses `<think>` and whatever
            `tool_parser` recognizes.
        structures: "ignore" leaves the response to the model if a request asks for a response format or a forced call,
            and says so in the answer's header. "enforce" honours both; such responses never train. None ignores them
            if the run decides, and enforces them if the client does.
        reasoning: "keep" leaves reasoning in later contexts, so that a conversation is one trajectory. "drop" removes
            it, and each turn with reasoning is a separate trajectory.
        stop_tokens: Tokens that end a turn, in addition to the tokenizer's own end token.
        chats: Check the chat template at the start; False is for programs that send only prompts of tokens or text.
    """

    decided_by: DecidedBy = "run"
    tool_parser: str | None = "hermes"
    reasoning_parser: str | None = None
    structures: Literal["ignore", "enforce"] | None = None
    reasoning: Literal["keep", "drop"] = "keep"
    stop_tokens: tuple[str, ...] = ()
    chats: bool = True

    @property
    def enforces_structures(self) -> bool:
        """True if response formats and forced calls are enforced."""
        return (self.structures or ("ignore" if self.decided_by == "run" else "enforce")) == "enforce"

    def __post_init__(self) -> None:
        """Check that the parsers are compatible.

        Raises:
            SettingsError: `reasoning_parser` is not vLLM's, or `tool_parser` is neither vLLM's nor None.
        """
        if self.reasoning_parser is None:
            return
        names = (self.reasoning_parser, self.tool_parser or VLLM)
        if not all(map(is_of_vllm, names)):
            raise SettingsError(
                f'reasoning_parser must be "vllm:NAME", with tool_parser = None or "vllm:NAME"; found {names}.'
            )


class PolicyService:
    """The policy as a service for agents.

    Attributes:
        counts: Event counts over all sessions.
        overheads_ms: Time of the most recent turns in milliseconds, without the engine's time.
    """

    def __init__(self, engine: GatewayEngine, tokenizer: PromptTokenizer, options: ServiceOptions) -> None:
        """Load the parsers and check the chat template.

        Args:
            engine: A started engine.
            tokenizer: The policy's tokenizer, with a chat template.
            options: Options of the answers.

        Raises:
            SettingsError: The template cannot join turns, or an option names an unknown parser or token.
        """
        named = options.tool_parser or (options.reasoning_parser and VLLM)
        reasoning, stop_tokens = options.reasoning_parser, options.stop_tokens
        parser = parser_for(named, tokenizer, reasoning=reasoning, stop_tokens=stop_tokens) if named else None
        stops = [tokenizer.token_id(token) for token in (parser.stop_tokens if parser else ())]
        for token in options.stop_tokens:
            stops.append(tokenizer.token_id(token))
            if stops[-1] is None:
                raise SettingsError(f"stop_tokens: the tokenizer has no token {token!r}.")
        self.engine, self.options = engine, options
        self.counts: Counter[str] = Counter()
        self.overheads_ms: deque[float] = deque(maxlen=KEPT_OVERHEADS)
        self._stop_token_ids = tuple(token for token in stops if token is not None)
        self._encoder = ConversationEncoder(tokenizer, end_token_ids=self._stop_token_ids)
        if options.chats:
            self._encoder.try_template()
        self._placer = Placer(self._encoder, tokenizer)
        self._reader = ReplyReader.of(tokenizer, parser, self._stop_token_ids)
        self._logged: set[str] = set()
        self._faults = FaultLog()
        self._failure: EngineDiedError | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def engine_failure(self) -> Exception | None:
        """Why the engine serves no requests; None while it does."""
        failure: Exception | None = getattr(self.engine, "death", None) or self._failure
        return failure

    def check_engine(self) -> None:
        """Check that the engine, once started, supports the options.

        Raises:
            SettingsError: Structures must be enforced, and the engine has none.
        """
        if self.options.structures != "enforce":
            return
        try:
            traits = self.engine.traits
        except RolloutError:  # an agent loop's engines come with its sessions, whose requests are refused by name
            return
        if "json_schema" not in traits.structures:
            raise SettingsError(
                f'structures = "enforce" needs an engine with structures, such as vllm; {traits.name} has none. Use '
                'structures = "ignore".'
            )

    async def begin(self, session: Session, ask: AgentRequest) -> StreamedAnswer:
        """Start a streamed answer. Cancel its `answer` to abort it.

        Returns after the first text, or after FIRST_TOKEN_S: SDKs do not retry a stream that fails once it has begun.

        Raises:
            RefusedError: The request cannot be served; the message has the reason.
        """
        live = StreamedAnswer()
        live.answer = asyncio.ensure_future(self.answer(session, ask, live))
        live.answer.add_done_callback(lambda _: live.news.set())
        try:
            await live.changes()
            live.news.clear()
            await live.changes(within_s=FIRST_TOKEN_S)
        except asyncio.CancelledError:
            live.answer.cancel()
            raise
        if live.answer.done():
            answer = live.answer.result()
            live.begin(answer.name, answer.num_prompt_tokens, answer.overridden)
        return live

    async def answer(self, session: Session, ask: AgentRequest, live: StreamedAnswer | None = None) -> Answer:
        """Sample a turn. A cancelled request is aborted in the engine, and its tokens do not train.

        Raises:
            RefusedError: The request cannot be served; the message has the reason.
        """
        if ask.idempotency_key is None:
            return await self._answer(session, ask, live)
        key = f"{ask.idempotency_key}/{ask.digests[-1].hex()}"
        while (earlier := session.answers.get(key)) is not None:
            self._count(session, "replayed")
            try:
                return await asyncio.shield(earlier)
            except asyncio.CancelledError:
                if not earlier.cancelled():
                    raise
                session.answers.pop(key, None)  # the earlier request was cancelled, not this one
        task = asyncio.ensure_future(self._answer(session, ask, live))
        session.answers[key] = task
        while len(session.answers) > MAX_KEPT_ANSWERS:
            session.answers.pop(next(iter(session.answers)))
        try:
            return await asyncio.shield(task)
        except BaseException:
            session.answers.pop(key, None)
            task.cancel()
            raise

    async def check_body(self, session: Session, body: dict[str, Json]) -> None:
        """Check a body before it is read, and keep its images, whose places then have their digests.

        One with too many messages would block others; it counts as a turn.

        Raises:
            RefusedError: There are too many messages or images, an image cannot be used, or the session may not ask.
        """
        session.check_may_ask()
        try:
            check_entries(body, self.engine.traits)
        except RefusedError:
            self._count(session, "turns")
            raise
        await self._placer.keep_images(session, body, max_images=self.engine.traits.max_images)

    async def num_input_tokens(self, session: Session, ask: AgentRequest) -> int:
        """Return the number of tokens of a conversation, without sampling or storing anything.

        Raises:
            RefusedError: The conversation is too long, or the chat template refuses it.
        """
        check_length(ask, self.engine.traits)
        return await self._placer.num_tokens(session, ask)

    async def _answer(self, session: Session, ask: AgentRequest, live: StreamedAnswer | None) -> Answer:
        request = await self._placed(session, ask)
        with session.admit() as (number, name):
            ask, request.number = request.ask, number
            tools = ask.tools if ask.may_call else ()
            room = self.engine.traits.max_model_len - len(request.input_ids)
            own = session.sampling(number)
            sampling, overridden = decide(ask.sampling, own, decided_by=self.options.decided_by, room=room)
            stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *self._stop_token_ids)))
            engine_request = GenerateRequest(
                input_ids=request.input_ids,
                sampling=replace(sampling, stop_token_ids=stops),
                num_samples=ask.num_choices,
                images=request.turn.images,
                request_id=name,
                on_tokens=None if live is None else live.feed,
            )
            try:
                check_request(engine_request, self.engine.traits)
            except EngineError as error:
                raise RefusedError(str(error)) from error
            self._accept(request)
            self._report(session, overridden)
            request.is_own = all(getattr(sampling, name) == getattr(own, name) for name in DISTRIBUTION)
            if live is not None:
                live.streams = self._reader.streams(
                    ask.num_choices, after=request.turn.new_ids, tools=tools, stop=sampling.stop, form=ask.form
                )
                live.begin(name.replace("/", "-"), len(request.input_ids), overridden)
            generations, engine_s = await self._generate(request, engine_request)
            samples = [self._keep(request, generation, engine_s) for generation in generations]
            overhead_ms = (time.perf_counter() - request.started_at - engine_s) * 1000
            self.overheads_ms.append(overhead_ms)
            session.overheads_ms.append(overhead_ms)
            return Answer(
                name=name.replace("/", "-"),
                samples=samples,
                num_prompt_tokens=len(request.input_ids),
                overridden=overridden,
                texts_of=lambda one: self._reader.texts_of(one.generation.token_ids, after=one.turn.new_ids),
                on_delivered=None if session.log is None else session.log.delivered,
            )

    async def _placed(self, session: Session, ask: AgentRequest) -> PlacedRequest:
        """Encode and place a request. One that is too long counts as a turn, so that an agent cannot repeat it forever.

        Raises:
            RefusedError: The request cannot be served; the message has the reason.
        """
        session.check_may_ask()
        traits = self.engine.traits
        try:
            ask = limited(ask, traits, enforces=self.options.enforces_structures)
            request = await self._placer.placed(session, ask)
            if len(request.input_ids) >= traits.max_model_len:
                raise too_long(f"{len(request.input_ids)} tokens", traits)
        except RefusedError as error:
            if error.code == TOO_LONG:
                self._count(session, "turns")
            raise
        return request

    def _accept(self, request: PlacedRequest) -> None:
        """Count an accepted request and open its turn. No other request has been accepted since it was placed."""
        session, place, turn = request.session, request.place, request.turn
        self._count(session, "turns")
        if request.ask.retry_count:
            self._count(session, "retries")
        if place.turn is not None:
            self._count(session, "repeated")
        elif place.is_fork:
            self._count(session, "forks")
        elif place.after is None:
            reason = _first_difference(session, place, request.ask)
            self._count(session, f"roots_{reason}")
            if reason != "first":
                log.info("gateway_new_root", session=session.session_id, differs=reason, message_index=place.num_known)
        request.turn = session.tree.open_turn(turn, request.digests)

    async def _generate(self, request: PlacedRequest, asked: GenerateRequest) -> tuple[list[Generation], float]:
        session, digest = request.session, request.place.key
        started_at = time.perf_counter()
        task = asyncio.ensure_future(self.engine.generate(asked))
        try:
            generations = await asyncio.shield(task)
        except asyncio.CancelledError:
            ending = asyncio.ensure_future(self._abandon(session, task, str(asked.request_id)))
            self._ending.add(ending)  # a separate task, since a request may be cancelled twice
            ending.add_done_callback(self._ending.discard)
            raise
        except RLError as error:
            session.note_fault(digest, str(error))
            self._count(session, "engine_errors")
            session.keep()
            said = f"the engine cannot serve the request: {error}"
            if isinstance(error, EngineDiedError):
                self._failure = error
            if isinstance(error, EngineDiedError) or OF_THIS_MACHINE.search(str(error)):
                self._faults.note("gateway_engine_failed", error)
                said = "the engine has failed; the gateway's log has the reason."
            raise RefusedError(said, kind="api_error") from error
        for generation in generations:
            if generation.finish_reason == "abort" or not len(generation.token_ids):
                reason = f"the engine aborted after {len(generation.token_ids)} tokens"
                session.note_fault(digest, reason)
                self._count(session, "abandoned_tokens", sum(len(one.token_ids) for one in generations))
                session.keep()
                raise RefusedError(f"{reason}.", kind="api_error")
        session.faults.pop(digest, None)
        self._failure = None
        return generations, time.perf_counter() - started_at

    async def _abandon(self, session: Session, task: "asyncio.Future[list[Generation]]", request_id: str) -> None:
        """Abort a request whose client has disconnected, and count its tokens."""
        self._count(session, "disconnected")
        try:
            await self.engine.abort([request_id])
            generations = await task
        except RLError:
            return
        self._count(session, "abandoned_tokens", sum(len(one.token_ids) for one in generations))

    def _keep(self, request: PlacedRequest, generation: Generation, engine_s: float) -> Sample:
        ask, session = request.ask, request.session
        tools = ask.tools if ask.may_call else ()
        stop = generation.matched_stop
        after = request.turn.new_ids
        message = self._reader.read(generation.token_ids, after=after, tools=tools, stop=stop, form=ask.form)
        kept = generation.token_ids
        if self.options.reasoning == "drop" and ask.form == "chat":
            kept = self._reader.without_reasoning(kept, after=after)
        is_probe = not ask.trains or ask.sampling.max_tokens == 1 or ask.sampling.structure is not None
        sample = Sample(
            turn=request.turn,
            message=message,
            generation=generation,
            asked_digest=digest_of(request.input_ids, request.turn.images),
            kept_ids=kept,
            request_index=request.number,
            generate_s=engine_s / ask.num_choices,
            never_trains=is_probe or not request.is_own,
            is_delivered=False,
        )
        self._count(session, "sampled_tokens", len(generation.token_ids))
        if is_probe:
            self._count(session, "probes")
        if not request.is_own:
            self._count(session, "other_sampling")
        if session.log is not None:
            session.log.said(sample, request.digests[request.place.num_known :])
        session.tree.add(sample, request.digests)
        return sample

    def _report(self, session: Session, overridden: Mapping[str, str]) -> None:
        """Count overridden fields, and log each field once."""
        session.counts["overridden"] += bool(overridden)
        for name, change in overridden.items():
            self.counts[f"overridden_{name}"] += 1
            if name not in self._logged:
                self._logged.add(name)
                log.warning("gateway_request_field_overridden", field=name, change=change)

    def _count(self, session: Session, name: str, number: int = 1) -> None:
        session.counts[name] += number
        self.counts[name] += number

    def overhead_ms(self, quantile: float) -> float:
        """Return a quantile of `overheads_ms` in milliseconds; NaN before the first turn."""
        return float(np.quantile(self.overheads_ms, quantile)) if self.overheads_ms else float("nan")


def _first_difference(session: Session, place: TreePosition, ask: AgentRequest) -> str:
    """Return why a conversation is a new root: the role of its first new message, or one of the reasons below."""
    if session.tree.is_empty:
        return "first"
    if ask.prompt is not None:
        return "prompt"
    if not place.knows_tools:
        return "tools"
    if place.num_known < len(ask.messages):
        return ask.messages[place.num_known].role
    return "shorter"  # a prefix of an earlier conversation


def metrics_text(service: PolicyService, sessions: Sessions) -> str:
    """Return the metrics in Prometheus text format 0.0.4."""
    lines = ["# TYPE rl_gateway_sessions gauge", f"rl_gateway_sessions {len(sessions)}"]
    lines += ["# TYPE rl_gateway_requests_running gauge"]
    lines += [f"rl_gateway_requests_running {sum(len(session.running) for session in sessions)}"]
    lines += ["# TYPE rl_gateway_events_total counter"]
    for name, number in sorted(service.counts.items()):
        lines.append(f'rl_gateway_events_total{{event="{re.sub("[^a-z_]", "", name)}"}} {number}')
    lines += ["# TYPE rl_gateway_turn_overhead_ms summary"]
    for quantile in (0.5, 0.99):
        lines.append(f'rl_gateway_turn_overhead_ms{{quantile="{quantile}"}} {service.overhead_ms(quantile):.3f}')
    return "\n".join(lines) + "\n"
