"""Write an invented run's folder as a trainer does: a policy learns sums, with every file that a report reads."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.events import EventLog
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import JsonLinesWriter
from rl_metrics.run_files.rollout_log import RolloutLog, RolloutRow
from rl_metrics.trackers.jsonl import JsonlTracker

START = 1_800_000_000.0
SOURCES = ("sums", "differences")
FILLER = ("so", " we", " add", " the", " tens", ",", " carry", " one", " and", "\n", " then", " write", " it", " down")
THOUSANDTH = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class InventedRun:
    """The run to write.

    Attributes:
        steps: Steps of the run.
        trajectories: Trajectories per step.
        tokens: Approximate tokens per response.
        seed: Seed of the content.
        skill: Share of right answers at the end.
        is_finished: False leaves the run unfinished.
    """

    steps: int = 40
    trajectories: int = 16
    tokens: int = 12
    seed: int = 0
    skill: float = 0.9
    is_finished: bool = True

    def write(self, folder: Path, *, texts: Sequence[str] = ()) -> None:
        """Write all files; equal runs have equal bytes.

        Args:
            folder: Folder of the run; created if missing.
            texts: Special texts, such as hostile ones: each becomes the prompt, response, problem, source and more of
                one trajectory in the first step.
        """
        self.write_records(folder)
        self.write_rollouts(folder, texts=texts)

    def write_rollouts(self, folder: Path, *, texts: Sequence[str] = ()) -> None:
        """Write rollouts.jsonl alone."""
        log = RolloutLog(folder / "rollouts.jsonl", clock=lambda: START)
        random = np.random.default_rng(self.seed)
        for step in range(1, self.steps + 1):
            rows = [self._trajectory(step, index, random) for index in range(self.trajectories)]
            log.write([*rows, *(map(_strange, texts) if step == 1 else ())])
        log.close()

    def write_records(self, folder: Path) -> None:
        """Write everything else."""
        random = np.random.default_rng(self.seed + 1)
        clock = iter(START + 2.0 * tick for tick in range(100 * self.steps + 100))
        tracker = JsonlTracker(folder / "metrics.jsonl", clock=lambda: next(clock))
        events = EventLog(folder / "events.jsonl", clock=lambda: next(clock))
        histograms = JsonLinesWriter(folder / "histograms.jsonl")
        probes = JsonLinesWriter(folder / "probes.jsonl")
        events.write("run_started", settings="settings.toml")
        for step in range(1, self.steps + 1):
            events.write("slowest_session", **_slowest(step, random))
            tracker.log(step, self._metrics(step, random))
            histograms.append(
                {"step": step, "time": START + step, "histograms": _histograms(self._skill(step), random)}
            )
            if step % 5 == 0 or step == 1:
                probes.append(_probe(step, self._skill(step)))
            if step % 5 == 0:
                tracker.log_generations(step, "validation/generations", _samples(step, self._skill(step)))
        events.structlog_processor(None, "warning", {"event": "slow_tracker", "tracker": "wandb"})
        if self.is_finished:
            events.write("run_finished", steps=self.steps)
        for file in (tracker, events, histograms, probes):
            file.close()
        (folder / "settings.toml").write_text(f"[trainer]\nsteps = {self.steps}\nseed = {self.seed}\n")

    def _skill(self, step: int) -> float:
        return self.skill * (1 - math.exp(-3 * step / self.steps))

    def _metrics(self, step: int, random: np.random.Generator) -> dict[str, float]:
        skill, noise = self._skill(step), random.normal(0, 0.02, 8).tolist()
        generate, update = 1.0 + noise[0], 0.8 + noise[1]
        return {
            "critic/score/mean": skill + noise[2],
            "rollout/positive_reward_ratio": skill + noise[2],
            "actor/entropy": 1.1 - 0.8 * skill + noise[3],
            "actor/ppo_kl": 0.004 + noise[4] / 10,
            "actor/pg_loss": noise[5] / 4,
            "actor/grad_norm": 0.4 + noise[6],
            "response_length/mean": self.tokens + 10 * noise[7],
            "training/rollout_probs_diff_mean": 0.001 + abs(noise[0]) / 100,
            "timing_s/gen": generate,
            "timing_s/old_log_prob": 0.3,
            "timing_s/update_actor": update,
            "timing_s/update_weights": 0.1,
            "timing_s/step": generate + update + 0.42,
            **({"val-core/sums/acc/mean@1": skill} if step % 5 == 0 else {}),
        }

    def _trajectory(self, step: int, index: int, random: np.random.Generator) -> RolloutRow:
        group, session = divmod(index, 8)
        problem = (self.seed * 7 + (step * max(1, self.trajectories // 8) + group) * 13) % 97
        first, second = 10 + problem % 89, 10 + problem * 7 % 83
        is_right = random.random() < self._skill(step)
        answer = first + second + (0 if is_right else int(random.integers(1, 9)))
        length = max(4, round(self.tokens * (0.6 + 0.8 * random.random())))
        tokens = (
            *(FILLER[place % len(FILLER)] for place in range(length - 3)),
            f" {answer // 10}",
            str(answer % 10),
            "<|im_end|>",
        )
        is_cut, is_failed = random.random() < 0.03, random.random() < 0.01
        policy = -random.exponential(0.25, length)
        reward = math.nan if is_failed else float(is_right and not is_cut)
        versions = np.full(length, step - 1.0)
        versions[: length // 3] -= random.random() < 0.4
        return RolloutRow(
            step=step,
            time=START + step,
            prompt_uid=f"{problem:05d}-{step}",
            problem=f"sum-{first}+{second}",
            session=session,
            source=SOURCES[problem % 2],
            prompt=f"What is {first} + {second}?",
            response="".join(tokens),
            ground_truth=str(first + second),
            reward=reward,
            components={}
            if is_failed
            else {"acc": float(is_right), "brevity": round(1 - length / (3 * self.tokens), 3)},
            finish="length" if is_cut else "stop",
            timings={
                "generate_s": round(random.exponential(0.4), 4),
                "tools_s": 0.0,
                "reward_s": 0.0002,
                "preemptions": 0.0,
            },
            failure="the reward function timed out" if is_failed else None,
            policy_version=step - 1,
            tokens=tokens,
            mask=tuple(place != 2 for place in range(length)),
            columns={
                "token_ids": tuple(float(hash_ % 32000) for hash_ in range(5, 5 + length)),
                "versions": tuple(versions.tolist()),
                "rollout_logprobs": tuple(np.minimum(policy + random.normal(0, 0.01, length), 0).tolist()),
                "policy_logprobs": tuple(policy.tolist()),
                "entropy": tuple(random.exponential(0.3, length).tolist()),
                "advantages": (float(random.normal()),) * length,
                "correction_weights": tuple(np.exp(random.normal(0, 0.01, length)).tolist()),
            },
        )


def _strange(text: str) -> RolloutRow:
    """Return a trajectory with this text in every field."""
    return RolloutRow(
        step=1,
        time=START,
        prompt_uid=text,
        problem=text,
        source=text,
        prompt=text,
        response=text,
        ground_truth=text,
        reward=0.25,
        components={text: 0.25},
        finish=text,
        failure=text,
        tokens=(text, text),
        mask=(True, True),
        columns={"policy_logprobs": (-0.5, math.nan)},
    )


def _slowest(step: int, random: np.random.Generator) -> dict[str, float | str]:
    return {
        "prompt_uid": f"group-{step}",
        "session_index": 0,
        "prompt_tokens": 9,
        "response_tokens": 12,
        "generate_s": round(float(1 + random.exponential()), 4),
        "tools_s": 0.0,
        "reward_s": 0.0001,
        "preemptions": 0,
    }


def _histograms(skill: float, random: np.random.Generator) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, values in _distributions(skill, random):
        histogram = Histogram()
        histogram.add(values)
        found[name] = histogram.to_json()
    return found


def _distributions(skill: float, random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    yield "distribution/reward", (random.random(200) < skill).astype(float)
    yield "distribution/response_length", random.integers(4, 30, 200).astype(float)


def _samples(step: int, skill: float) -> list[GenerationSample]:
    """Return the samples of a validation; the first problems are learned first."""
    return [
        GenerationSample(
            prompt_uid=f"validation-{problem}",
            input=f"What is {10 + problem} + {20 + problem}?",
            output=str(30 + 2 * problem + (problem >= 10 * skill)),
            score=float(problem < 10 * skill),
            ground_truth=str(30 + 2 * problem),
            policy_version=(step, step),
            source="trainer",
            components={"acc": float(problem < 10 * skill)},
        )
        for problem in range(10)
    ]


def _probe(step: int, skill: float) -> dict[str, object]:
    right, wrong = math.log(0.1 + 0.89 * skill), math.log(max(0.6 * (1 - skill), THOUSANDTH))
    return {
        "step": step,
        "time": START + step,
        "policy_version": step,
        "probe": "carry",
        "prompt": "What is 37 + 58?",
        "response": "95",
        "position": 1,
        "token": "5",
        "logprob": right,
        "candidates": [["5", right], ["4", wrong], ["6", wrong - 1]],
    }
