"""Sessions of several turns with tool calls."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from rl_core.data import IntArray, Json, Prompt
from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.loops.conversation import Conversation, TurnLimits
from rl_rollout.loops.protocol import LoopContext, SessionLoop, SessionResult, describe_failure
from rl_rollout.loops.turns import Joined, Reply, TurnFormat, Turns, join_turns
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.protocol import RewardInput
from rl_rollout.rewards.scorer import reward_input
from rl_rollout.tools import CallOptions, ToolBox, ToolRunner, resolve_tools
from rl_rollout.tools.mcp_options import McpServerOptions
from rl_rollout.tools.parsers import ParsedTurn, ToolParser, is_of_vllm, parser_for, resolve_parser
from rl_rollout.tools.protocol import Tool, ToolCall, ToolResult
from rl_rollout.user_code import ends_the_run

if TYPE_CHECKING:
    from rl_rollout.tools.mcp import McpServer


@settings_record
class ToolsOptions:
    """Options of the `tools` loop.

    Attributes:
        tools: Registered names, or `path.py:function`.
        mcp_servers: MCP servers by name; the model gets all of their tools.
        parser: Format of calls: hermes, gpt_oss, a name registered by another package, `path.py:Class`, or "vllm:NAME"
            for one of vLLM's parsers, such as vllm:llama3_json and vllm:glm45. qwen3_coder is vllm:qwen3_coder.
        calls: Options of call execution.
        max_calls_per_turn: Maximum number of calls per turn; further calls return an error.
        limits: Limits of a session.
        turns: Format of turns.
    """

    tools: tuple[str, ...] = ()
    mcp_servers: Mapping[str, McpServerOptions] = field(default_factory=dict)
    parser: str = "hermes"
    calls: CallOptions = field(default_factory=CallOptions)
    max_calls_per_turn: int = 16
    limits: TurnLimits = field(default_factory=TurnLimits)
    turns: TurnFormat = field(default_factory=TurnFormat)


class ToolsLoop(SessionLoop):
    """Alternates between generation and tool calls, and appends results as masked tokens.

    A session ends with a turn without calls, or with finish_reason "length" at a limit. The reward judges the last
    turn. A trajectory's extras record how its session ended (`ended_by`), its `num_turns`, and `tool_calls` by outcome.
    """

    Options = ToolsOptions

    def __init__(self, options: ToolsOptions | None = None, *, toolbox: ToolBox | None = None) -> None:
        """Find the parser and tools. `start` starts servers.

        Args:
            options: The loop's options.
            toolbox: Tools in addition to those in the options.

        Raises:
            SettingsError: A tool or the parser does not exist, or two tools have the same name.
        """
        self._options = options or ToolsOptions()
        parser = self._options.parser
        self._parser: ToolParser | None = None if is_of_vllm(parser) else resolve_parser(parser)
        self._given = [] if toolbox is None else toolbox.tools()
        self._own = resolve_tools(self._options.tools)
        self._toolbox = ToolBox([*self._given, *self._own])
        self._servers: dict[str, McpServer] = {}
        self._listed: dict[str, list[Tool]] = {}
        self._runner = ToolRunner(self._toolbox, self._options.calls)
        self._starting = asyncio.Lock()
        self._joined: Joined | None = None

    async def start(self, tokenizer: PromptTokenizer | None) -> None:
        """Start the servers, and check tokenizer and chat template.

        Raises:
            SettingsError: There is no tokenizer, no tool, a stop token is unknown, the chat template cannot join turns,
                or a server does not start.
            MissingExtraError: Servers need the extra `mcp`.
        """
        if tokenizer is None:
            raise SettingsError("the agent loop 'tools' needs a tokenizer. Pass tokenizer=... to Rollout.")
        self.close()
        try:
            self._listed = await self._start_servers()
            self._toolbox = ToolBox([*self._given, *self._own, *chain.from_iterable(self._listed.values())])
            if not self._toolbox.names():
                raise SettingsError("the agent loop 'tools' has no tools. Set tools or mcp_servers.")
            self._runner = ToolRunner(self._toolbox, self._options.calls, images=tokenizer.images)
            parser = self._parser_for(tokenizer)
            self._joined = join_turns(
                tokenizer,
                self._options.turns,
                role="tool",
                tools=self._toolbox.schemas(),
                known_stops=parser.stop_tokens,
            )
        except BaseException:
            self.close()
            raise

    async def check(self, tokenizer: PromptTokenizer | None) -> list[str]:
        """Start everything once, stop it, and list the tools of each server. Raises the same errors as `start`."""
        try:
            await self.start(tokenizer)
            own = [tool.name for tool in (*self._given, *self._own)]
            lines = [f"tools {', '.join(own)}"] if own else []
            for server, tools in self._listed.items():
                lines.append(f"MCP server {server}: {', '.join(tool.name for tool in tools)}")
            return lines
        finally:
            self.close()

    async def _start_servers(self) -> dict[str, list[Tool]]:
        """Start the servers and return their tools."""
        chosen = self._options.mcp_servers
        if chosen:
            from rl_rollout.tools.mcp import McpServer

            self._servers = {name: McpServer(name, options) for name, options in chosen.items()}
        started = (server.start() for server in self._servers.values())
        listed = await asyncio.gather(*started, return_exceptions=True)
        refused = [one for one in listed if isinstance(one, BaseException)]
        if refused:
            raise refused[0] if len(refused) == 1 else SettingsError("\n".join(map(str, refused)))
        return {name: one for name, one in zip(self._servers, listed, strict=True) if isinstance(one, list)}

    @property
    def tool_schemas(self) -> list[dict[str, Json]]:
        """Return all tools as the chat template shows them; those of servers after they start."""
        return self._toolbox.schemas()

    def close(self) -> None:
        """Stop the servers and the tools' threads."""
        while self._servers:
            self._servers.popitem()[1].close()
        self._toolbox.close()
        self._joined = None

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        """See `AgentLoop.run_group`. Starts if not yet started."""
        async with self._starting:
            if self._joined is None:
                await self.start(context.tokenizer)
        return await super().run_group(prompt, num_sessions=num_sessions, context=context)

    async def run_session(self, prompt: Prompt, *, session_index: int, context: LoopContext) -> SessionResult:
        """See `SessionLoop.run_session`."""
        turns, stop_token_ids = self._ready
        conversation = Conversation(
            prompt=prompt,
            prompt_ids=turns.prompt_ids(prompt),
            session_index=session_index,
            context=context,
            limits=self._options.limits,
            stop_token_ids=stop_token_ids,
        )
        try:
            return await self._converse(conversation, turns)
        except BaseException as error:
            if ends_the_run(error):
                raise
            return conversation.failed(describe_failure(self, error))

    def judged(self, prompt: Prompt, session: SessionResult, context: LoopContext) -> RewardInput:
        """Return the session's last turn and the tokens of all its turns, as its reward judges them."""
        last = session.trajectories[-1]
        sampled = np.flatnonzero(last.loss_mask)
        starts = np.flatnonzero(np.diff(sampled, prepend=-2) > 1)
        start = int(sampled[starts[-1]])
        turn_ids = last.input_ids[sampled[starts[-1] :]]
        ids = np.concatenate([row.input_ids[row.loss_mask] for row in session.trajectories])
        (text,) = context.decode([turn_ids])
        answer = self._answer(context, turn_ids)
        text = text if answer is None else answer
        begins_thinking = context.begins_thinking(last.input_ids[:start])
        return reward_input(
            prompt, text=text, ids=ids, finish_reason=last.finish_reason, begins_thinking=begins_thinking
        )

    async def _converse(self, conversation: Conversation, turns: Turns) -> SessionResult:
        outcomes: Counter[str] = Counter()
        while True:
            generation = await conversation.sample()
            if generation.finish_reason == "length":
                ended_by = "length"
                break
            calls = self._parsed(conversation.context, generation.token_ids).calls
            if not calls:
                ended_by = "answer"
                break
            if conversation.is_last_turn:
                ended_by = "max_turns"
                break
            started_at = time.perf_counter()
            results = await self._run(calls)
            conversation.add_tools_time(time.perf_counter() - started_at)
            outcomes.update(result.outcome for result in results)
            replies = [Reply(text=result.text, name=result.call.name, images=result.images) for result in results]
            reply_ids = turns.reply_ids(replies, last_token=int(generation.token_ids[-1]))
            if not conversation.append(reply_ids, images=[digest for one in replies for digest in one.images]):
                ended_by = "context"
                break
        if ended_by in ("max_turns", "context"):
            conversation.mark_cut()
        extras: dict[str, Json] = {
            "ended_by": ended_by,
            "num_turns": conversation.num_turns,
            "tool_calls": dict(sorted(outcomes.items())),
        }
        answer = self._answer(conversation.context, generation.token_ids)
        return await conversation.scored(text=answer, extras=extras)

    async def _run(self, calls: tuple[ToolCall, ...]) -> list[ToolResult]:
        limit = self._options.max_calls_per_turn
        fault = f"more than {limit} calls in one turn. Call it again in the next."
        kept = [call if index < limit else ToolCall(name=call.name, fault=fault) for index, call in enumerate(calls)]
        return await self._runner.run(kept)

    @property
    def _ready(self) -> Joined:
        if self._joined is None:
            raise SettingsError("the agent loop 'tools' was closed while it ran.")
        return self._joined

    def _answer(self, context: LoopContext, ids: IntArray) -> str | None:
        """Return what a turn says outside of its calls, whose arguments are no answer; None if that is all of it."""
        turn = self._parsed(context, ids)
        if turn.answer is not None or not turn.calls:
            return turn.answer
        tokenizer = self._tokenizer(context)
        (text,) = tokenizer.decode([ids], skip_special_tokens=False)
        said = text[: turn.calls_at or 0]
        for token in tokenizer.special_tokens:
            said = said.replace(token, "")
        return said

    def _parsed(self, context: LoopContext, ids: IntArray) -> ParsedTurn:
        tokenizer = self._tokenizer(context)
        (text,) = tokenizer.decode([ids], skip_special_tokens=False)
        return self._parser_for(tokenizer).parse(text, parameters=self._toolbox.parameters())

    def _tokenizer(self, context: LoopContext) -> PromptTokenizer:
        if context.tokenizer is None:
            raise SettingsError("the agent loop 'tools' needs LoopContext.tokenizer.")
        return context.tokenizer

    def _parser_for(self, tokenizer: PromptTokenizer) -> ToolParser:
        if self._parser is None:
            stop_tokens = self._options.turns.stop_tokens
            self._parser = parser_for(self._options.parser, tokenizer, stop_tokens=stop_tokens)
        return self._parser
