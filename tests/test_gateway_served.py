"""`rl-rollout serve` in a separate process, killed by `kill -9` while agents use it."""

import asyncio
import json
import os
import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from chat_model import make_tokenizer
from gateway_talk import owner, said
from train_process import TrainProcess

from rl_core import Prompt, SharedMemoryQueue, TaskSpec
from rl_rollout.cli import main

ENGINE = Path(__file__).parent / "support" / "speaker_engine"
USER = {"role": "user", "content": "go on"}


class Site(NamedTuple):
    """URL and owner key of the served gateway, which a restart keeps."""

    url: str
    owner_key: str


class Served:
    """A served gateway that restarts with the same folder and port."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self._words = folder, words
        make_tokenizer().wrapped.save_pretrained(folder / "model")
        self.key_file = folder / "owner.key"
        self._number = 0
        self._port = 0
        self.start()
        self.site = Site(self.url, self.key_file.read_text().strip())

    def start(self) -> None:
        self._number += 1
        words = ["--engine", "speaker", "--port", str(self._port), "--owner-key-file", str(self.key_file)]
        self.process = TrainProcess(
            ["serve", str(self.folder / "model"), *words, "--sessions", str(self.folder / "sessions"), *self._words],
            output=self.folder / f"output-{self._number}.txt",
            environment={"PYTHONPATH": f"{ENGINE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            module="rl_rollout",
        )
        self.process.wait_until(lambda: "Connect an SDK" in self.process.text, "a greeting")
        (self.url,) = set(re.findall(r"OPENAI_BASE_URL=(\S+)/v1", self.process.text))
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.leftovers() == []


async def patiently(site: Site, path: str, **body: Any) -> dict[str, Any]:
    """Send a request as the owner; retry while the gateway is down."""
    while True:
        try:
            response = await owner(site, path, **body)
        except httpx.TransportError:
            await asyncio.sleep(0.05)
            continue
        assert response.status_code in (200, 201), response.text
        answer: dict[str, Any] = response.json()
        return answer


async def one_agent(site: Site, index: int, num_turns: int, answered: Counter[str]) -> tuple[dict[str, Any], str]:
    """Run an agent's session; return its result and the concatenated responses of the model."""
    opened = await patiently(site, "/sessions", group=f"p{index}")
    messages, heard = [USER], ""
    for _ in range(num_turns):
        message = await said(site, opened["key"], messages, max_retries=30)
        messages += [message, USER]
        heard += message["content"] + "<|im_end|>"
        answered["turns"] += 1
    return await patiently(site, f"/sessions/{opened['id']}/finish", reward=float(index)), heard


async def agents_and_kills(served: Served, num_agents: int, num_turns: int, kill_at: list[int]) -> list[Any]:
    """Run all agents concurrently; kill and restart the gateway at each number of answered turns in `kill_at`."""
    answered: Counter[str] = Counter()

    async def kills() -> None:
        for number in kill_at:
            while answered["turns"] < number:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(served.kill)
            await asyncio.to_thread(served.start)

    async with asyncio.timeout(540):
        agents = (one_agent(served.site, index, num_turns, answered) for index in range(num_agents))
        *results, _ = await asyncio.gather(*agents, kills())
    return list(results)


def check_kills(folder: Path, *, num_agents: int, num_turns: int, kill_at: list[int]) -> None:
    queue = SharedMemoryQueue([TaskSpec(name="train", needs={"input_ids", "reward"})])
    queue.issue([Prompt(uid=f"p{i}", input_ids=np.array([1], np.int32)) for i in range(num_agents)], num_sessions=1)
    served = Served(folder, "--queue", queue.address)
    try:
        results = asyncio.run(agents_and_kills(served, num_agents, num_turns, kill_at))
        lease = queue.lease("train", groups=num_agents, deadline_s=60)
        served.process.signal(signal.SIGTERM)
        assert served.process.wait() == 0
        assert served.process.leftovers() == []
    finally:
        served.process.end()
        queue.close()
    tokenizer = make_tokenizer()
    for result, heard in results:
        (row,) = result["trajectories"]  # no kill caused a fork or a new root
        trained = np.array(row["input_ids"])[np.array(row["loss_mask"])]
        assert tokenizer.decode([trained], skip_special_tokens=False) == [heard]
    assert sorted(key.prompt_uid for key in lease.batch.keys) == sorted(f"p{index}" for index in range(num_agents))
    assert main(["sessions", "export", str(folder / "sessions"), "--to", str(folder / "out.jsonl")]) == 0
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert Counter(row["prompt_uid"] for row in rows) == {f"p{index}": 1 for index in range(num_agents)}
    assert sorted(row["reward"] for row in rows) == [float(index) for index in range(num_agents)]


@pytest.mark.soak
def test_agents_go_on_after_a_kill_and_every_session_trains_once(tmp_path):
    check_kills(tmp_path, num_agents=6, num_turns=6, kill_at=[15])


@pytest.mark.soak
def test_hundreds_of_sessions_and_several_kills(tmp_path, seed):
    draw = random.Random(seed)
    check_kills(tmp_path, num_agents=200, num_turns=10, kill_at=sorted(draw.sample(range(50, 1950), 4)))
