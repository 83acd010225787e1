"""Files mutated from valid ones, and what reads them: run as a program, one format in a process of bounded memory."""

import json
import os
import random
import resource
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rl_core.errors import RLError

MOST_CPU_S = 5
MOST_BYTES = 1 << 32
NASTY = ("Infinity", "-Infinity", "NaN", "1e999", "-1", "0", "9" * 400, "9" * 5000, "9223372036854775807", "1e400")
NASTY += ("null", "true", "{}", "[]", '""', '"\\ud800"', '"\\u0000"', "[" * 3000, '{"a":' * 3000, "-0.0", "2.5")
RAW = (b"\0", b"\xff\xfe", b"\n", b"\r", b",", b"'''", b'"', b"..", b"=", b"[[", b"\xed\xa0\x80", b"." * 2000)


class HangError(BaseException):
    """A case took too long."""


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        file: A valid one, which is mutated in place.
        read: Reads it.
        is_others: It is read by somebody else's library.
    """

    file: Path
    read: Callable[[], object]
    is_others: bool = False


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one to four changes; of JSON, half the times in its tree."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = _mutated_json(content, rng) if rng.random() < 0.5 else _mutated_bytes(content, rng)
    return content


def _mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    stop = min(len(content), start + rng.choice((0, 1, 2, 8, 64, 1024)))
    match rng.randrange(6):
        case 0:
            new = bytes([content[start] ^ 1 << rng.randrange(8)]) if start < len(content) else b""
            return content[:start] + new + content[start + 1 :]
        case 1:
            return content[:start] + content[stop:]
        case 2:
            return content[:start] + content[start:stop] * rng.choice((2, 3, 50)) + content[stop:]
        case 3:
            return content[:start] + rng.choice(NASTY).encode() + content[stop:]
        case 4:
            return content[:start] + rng.choice((*RAW, rng.randbytes(8))) + content[stop:]
        case _:
            return content[:start]


def _mutated_json(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n") if content.count(b"\n") and not content.startswith(b"{\n") else [content]
    place = rng.randrange(len(lines))
    try:
        document = json.loads(lines[place])
    except (ValueError, RecursionError):
        return _mutated_bytes(content, rng)
    nodes: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            items = list(node.items() if isinstance(node, dict) else enumerate(node))
            nodes += [(node, key) for key, _ in items]
            waiting += [value for _, value in items]
    if not nodes:
        return _mutated_bytes(content, rng)
    node, key = rng.choice(nodes)
    marker = "@@here@@"
    if rng.random() < 0.2:
        del node[key]
    else:
        node[key] = marker
    lines[place] = json.dumps(document).replace(f'"{marker}"', rng.choice(NASTY)).encode()
    return b"\n".join(lines)


def run_cases(name: str, format_: Format, *, cases: int, seed: int) -> None:
    """Read so many mutations; what is neither read nor refused with an error of ours ends it, and is kept.

    Raises:
        AssertionError: Names the case's file.
    """
    rng = random.Random(f"{name} {seed}")
    valid = format_.file.read_bytes()
    format_.read()
    for case in range(cases):
        content = mutated(valid, rng)
        format_.file.write_bytes(content)
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        try:
            format_.read()
        except RLError:
            pass
        except BaseException as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            kept = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-")) / format_.file.name
            kept.write_bytes(content)
            raise AssertionError(
                f"{name}, case {case} of seed {seed}: {type(error).__name__}: {error}; {kept}"
            ) from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    format_.file.write_bytes(valid)


def _hang(_: int, __: FrameType | None) -> None:
    raise HangError(f"it took {MOST_CPU_S} s")


def watch() -> None:
    """Have what takes too long raise."""
    signal.signal(signal.SIGPROF, _hang)


# -- the formats


def formats(folder: Path) -> Iterator[tuple[str, Callable[[], Format]]]:
    """Every format by name, and what makes a valid file of it."""
    for name, make in MAKERS.items():
        yield name, lambda make=make, name=name: make(_made(folder / name))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _written(file: Path, content: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def _checkpoint(folder: Path) -> Path:
    from rl_distill.checkpoints.plain_files import file_crc32c

    files = {"trainer.json": {"step": 3, "prompts": {"epoch": 0}, "random": [1, 2.5, None]}, "learner.json": LEARNER}
    paths = {name: _written(folder / name, content) for name, content in files.items()}
    listed = {n: {"size_bytes": p.stat().st_size, "crc32c": file_crc32c(p)} for n, p in paths.items()}
    _written(folder / "manifest.json", {"format": 1, "files": listed})
    return folder


LEARNER = {"format_version": 2, "step": 3, "config_digest": "0" * 16, "options": {"dtype": "float32"}}
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "architectures_of": {"tie_word_embeddings": False},
    "eos_token_id": [1, 2],
}


def manifest(folder: Path) -> Format:
    """A checkpoint's manifest.json."""
    from rl_distill.checkpoints.store import verify_checkpoint

    return Format(_checkpoint(folder) / "manifest.json", lambda: verify_checkpoint(folder))


def trainer_state(folder: Path) -> Format:
    """trainer.json."""
    from rl_distill.checkpoints.store import read_state

    return Format(_checkpoint(folder) / "trainer.json", lambda: read_state(folder))


def learner_header(folder: Path) -> Format:
    """learner.json, and the config.json beside it that tells how the models differ."""
    from rl_distill.checkpoints.checkpoint import read_header
    from rl_distill.policy_config import parse_policy_config

    config = parse_policy_config(CONFIG)
    _written(folder / "policy" / "config.json", CONFIG)
    header = {**LEARNER, "config_digest": config.digest}
    file = _written(folder / "learner.json", header)
    return Format(file, lambda: read_header(folder, config=config, dtype="float32"))


def policy_config(folder: Path) -> Format:
    """config.json, as learners, engines and teachers read it."""
    from rl_distill.checkpoints.hf_folder import tensor_shapes
    from rl_distill.policy_config import parse_policy_config, read_policy_config

    def read() -> None:
        config = parse_policy_config(read_policy_config(folder))
        if config.num_experts < 64:
            tensor_shapes(config)

    return Format(_written(folder / "config.json", CONFIG), read)


def engine_config(folder: Path) -> Format:
    """config.json, as an engine reads it."""
    from rl_distill.teacher.model_folder import model_traits
    from rl_rollout.engines.model_folder import end_token_ids, max_positions, require_model_folder

    _written(folder / "model.safetensors", (2).to_bytes(8, "little") + b"{}")

    def read() -> None:
        end_token_ids(folder)
        require_model_folder(folder)
        model_traits(folder)
        max_positions(folder)

    return Format(_written(folder / "config.json", CONFIG), read)


def _tensors(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    from rl_distill.checkpoints.hf_folder import tensor_shapes
    from rl_distill.policy_config import parse_policy_config

    shapes = tensor_shapes(parse_policy_config(CONFIG))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    _written(folder / "config.json", CONFIG)
    return folder / "model.safetensors"


def safetensors_header(folder: Path) -> Format:
    """The header of a safetensors file, as ours reads it."""
    from rl_core.files import read_safetensors_header

    return Format(_tensors(folder), lambda: read_safetensors_header(folder / "model.safetensors"))


def safetensors(folder: Path) -> Format:
    """Weights, read by safetensors."""
    from rl_distill.checkpoints.hf_folder import read_policy_tensors
    from rl_distill.policy_config import parse_policy_config
    from rl_distill.teacher.model_folder import model_fingerprint

    def read() -> None:
        import torch

        model_fingerprint(folder)
        read_policy_tensors(folder, parse_policy_config(CONFIG), dtype=torch.float32)

    return Format(_tensors(folder), read, is_others=True)


def safetensors_index(folder: Path) -> Format:
    """The index of shards."""
    from rl_distill.checkpoints.hf_folder import PolicyTensors, tensor_shapes
    from rl_distill.policy_config import parse_policy_config

    _tensors(folder)
    config = parse_policy_config(CONFIG)
    names = dict.fromkeys(tensor_shapes(config), "model.safetensors")
    file = _written(folder / "model.safetensors.index.json", {"weight_map": names})
    return Format(file, lambda: PolicyTensors(folder, config))


def torch_dist_table(folder: Path) -> Format:
    """.metadata of a torch_dist folder."""
    from tensor_folders import write_example

    from rl_distill.checkpoints.torch_dist import TensorFolder

    return Format(write_example(folder / "state") / ".metadata", lambda: TensorFolder(folder / "state"))


def torch_dist_chunk(folder: Path) -> Format:
    """A file of chunks."""
    from tensor_folders import read_all, write_example

    return Format(write_example(folder / "state") / "__0_0.distcp", lambda: read_all(folder / "state"))


def vocabulary(folder: Path) -> Format:
    """tokenizer.json, as vocabularies are compared."""
    from rl_distill.teacher.vocabulary import read_vocabulary

    return Format(_tokenizer(folder), lambda: read_vocabulary(folder))


def _tokenizer(folder: Path) -> Path:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<unk>": 0} | {letter: i + 1 for i, letter in enumerate("abcdefgh 123")} | {"ab": 20}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+| "), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _written(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    return folder / "tokenizer.json"


def tokenizer(folder: Path) -> Format:
    """tokenizer.json, loaded and used."""
    from rl_rollout.prompts import PromptTokenizer

    def read() -> None:
        loaded = PromptTokenizer.load(folder)
        loaded.decode(loaded.encode(["abc 12", "x" * 50], add_special_tokens=True))

    return Format(_tokenizer(folder), read, is_others=True)


def chat_template(folder: Path) -> Format:
    """chat_template.jinja."""
    from rl_rollout.prompts import PromptTokenizer

    _tokenizer(folder)
    text = b"{% for m in messages %}{% if m.role == 'user' %}[{{ m.content | trim }}]{% endif %}{% endfor %}"

    def read() -> None:
        PromptTokenizer.load(folder).render([{"role": "user", "content": "abc"}])

    return Format(_written(folder / "chat_template.jinja", text), read, is_others=True)


ROW = {"prompt": [{"role": "user", "content": "1+2?"}], "reward_model": {"ground_truth": "3"}, "data_source": "a"}


def prompts_jsonl(folder: Path) -> Format:
    """Prompts as JSON lines."""
    lines = b"\n".join([json.dumps(ROW | {"extra_info": {"index": 1}}).encode()] * 3)
    return Format(_written(folder / "rows.jsonl", lines), lambda: _read_rows(folder / "rows.jsonl"))


def _read_rows(path: Path) -> None:
    from rl_rollout.prompts import open_rows
    from rl_rollout.prompts.schema import read_problem

    rows = open_rows(path)
    for number, row in enumerate(rows):
        read_problem(row, where=rows.locate(number), requires_ground_truth=True)


def prompts_parquet(folder: Path) -> Format:
    """Prompts as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([ROW] * 3), folder / "rows.parquet")
    return Format(folder / "rows.parquet", lambda: _read_rows(folder / "rows.parquet"), is_others=True)


def prompts_arrow(folder: Path) -> Format:
    """Prompts as a saved dataset."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list([ROW] * 3).save_to_disk(folder / "set")
    file = next((folder / "set").glob("*.arrow"))
    return Format(file, lambda: _read_rows(folder / "set"), is_others=True)


def settings_toml(folder: Path) -> Format:
    """A trainer's settings."""
    from rl_trainer_parts.settings.schema import Settings
    from rl_trainer_parts.settings.sources import load_settings

    text = b'[policy]\npath = "p"\n[prompts]\ntrain = "t.jsonl"\n[trainer]\nsteps = 3\n[rollout]\ngroup_size = 4\n'
    text += b'loop_options = { a.b = [1, 2.5, "x"] }\n[reward]\nfunction = "r.py:f"\n'
    return Format(
        _written(folder / "settings.toml", text), lambda: load_settings(folder / "settings.toml", (), {}, kind=Settings)
    )


def workload_toml(folder: Path) -> Format:
    """A simulated workload."""
    from rl_rollout.simulation.reading import BUILT_IN, SHIPPED, read_workload

    text = (SHIPPED / f"{BUILT_IN}.toml").read_bytes()
    return Format(_written(folder / "w.toml", text), lambda: read_workload(folder / "w.toml"))


def hang_report(folder: Path) -> Format:
    """hang.json."""
    from rl_metrics.hang.report import read_hang_report

    return _of_run(folder, "hang.json", lambda _: read_hang_report(folder / "hang.json"), HANG)


HANG = {
    "at": "2026-01-01T00:00:00",
    "run": "r",
    "no_progress_s": 2.5,
    "roles": [{"name": "learner", "rank": 0}],
    "queue": {"rows": 3.0},
    "causes": ["x"],
    "format": "rl-hang-1",
}


def _of_run(folder: Path, name: str, read: Callable[[Any], object], content: object = None) -> Format:
    from invented_runs import InventedRun

    from rl_metrics.run_files import open_run

    InventedRun(steps=2, trajectories=2).write(folder)
    if content is not None or not (folder / name).exists():
        _written(folder / name, content)

    def read_or_refuse() -> None:
        read(open_run(folder))

    return Format(folder / name, read_or_refuse)


def health(folder: Path) -> Format:
    """health.json, as a resumed trainer reads it."""
    from rl_trainer_parts.reporting.health import _findings_before

    finding = {"rule": "a", "severity": "warning", "step": 1, "text": "x"}
    return _of_run(folder, "health.json", lambda run: (run.health, _findings_before(folder)), {"findings": [finding]})


def schedule_record(folder: Path) -> Format:
    """record.jsonl of the asynchronous trainer."""
    from rl_async_trainer.schedule.record import read_history

    lines: list[dict[str, Any]] = [
        {"at": 0, "what": "issued", "uids": ["a", "b"]},
        {"at": 1, "what": "started", "uids": ["a"], "version": 0},
        {"at": 2, "what": "settled", "uid": "a", "oldest": 0, "newest": None, "started": 0},
        {"at": 3, "what": "failed", "uid": "b", "reason": "x"},
        {"at": 4, "what": "step", "step": 1, "uids": ["a"]},
        {"at": 5, "what": "published", "version": 1, "step": 1},
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return Format(_written(folder / "record.jsonl", content), lambda: read_history(folder).steps_after(0))


def trl_state(folder: Path) -> Format:
    """trainer_state.json of TRL."""
    from rl_metrics.importers.trl import import_trl

    rows = [{"step": step, "loss": 0.5, "reward": 1.0} for step in (1, 2)]
    file = _written(folder / "trainer_state.json", {"log_history": rows})
    return Format(file, lambda: import_trl([file], Path(tempfile.mkdtemp(dir=folder)) / "into"))


def verl_log(folder: Path) -> Format:
    """JSON lines of verl's file logger."""
    from rl_metrics.importers.verl import import_verl

    lines = [{"step": step, "data": {"critic/score/mean": 0.5, "timing_s/step": 2.0}} for step in (1, 2)]
    file = _written(folder / "verl.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    return Format(file, lambda: import_verl([file], Path(tempfile.mkdtemp(dir=folder)) / "into"))


def _queue(folder: Path) -> Path:
    from rl_core import InProcessQueue, QueueOptions, TaskSpec
    from rl_core.testing import make_prompts, make_trajectory

    task = TaskSpec(name="train", needs=frozenset({"reward"}))
    queue = InProcessQueue([task], options=QueueOptions(directory=folder / "queue"))
    queue.issue(make_prompts(3), num_sessions=2)
    for session in range(2):
        queue.put("p0", session, [make_trajectory("p0", session, num_response_tokens=20_000)])
    queue.fail("p1", 0, reason="x")
    queue.close()
    return folder / "queue"


def segment(folder: Path) -> Format:
    """A segment of rows."""
    from rl_core.data.segment import decode_segment

    file = next((_queue(folder) / "segments").glob("*"))
    file.write_bytes(file.read_bytes()[:6000])
    whole = next((_queue(folder / "again") / "segments").glob("*"))

    def read() -> None:
        content = bytearray(whole.read_bytes())
        content[: len(head)] = (head := file.read_bytes()[:6000])
        decode_segment(bytes(content))

    return Format(file, read)


def wal(folder: Path) -> Format:
    """A write-ahead log."""
    from rl_core.queue.journal.wal import read_wal

    connection = sqlite3.connect(folder / "db", isolation_level=None)
    connection.execute("PRAGMA page_size = 512")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t (a)")
    connection.execute("INSERT INTO t VALUES (1)")
    file = _written(folder / "log", (folder / "db-wal").read_bytes())
    connection.close()
    return Format(file, lambda: read_wal(file))


def journal_record(folder: Path) -> Format:
    """The record of a group in a queue's journal."""
    from rl_core.queue.journal.records import read_journal

    source = sqlite3.connect(_queue(folder) / "queue.sqlite3")
    connection = sqlite3.connect(":memory:", isolation_level=None)
    source.backup(connection)
    source.close()
    (record,) = connection.execute("SELECT record FROM groups WHERE uid = 'p0'").fetchone()
    file = _written(folder / "record", record)

    def read() -> None:
        connection.execute("UPDATE groups SET record = ? WHERE uid = 'p0'", (file.read_bytes(),))
        groups, _, _ = read_journal(connection)
        assert all(len(group.missing_sessions) <= group.num_sessions for group in groups)

    return Format(file, read)


def journal(folder: Path) -> Format:
    """A queue's database, read by SQLite."""
    import shutil

    from rl_core import InProcessQueue, QueueOptions, TaskSpec
    from rl_core.queue.journal.inspection import inspect_journal

    directory = _queue(folder)
    task = TaskSpec(name="train", needs=frozenset({"reward"}))

    def read() -> None:
        shutil.rmtree(folder / "copy", ignore_errors=True)
        shutil.copytree(directory, folder / "copy")
        inspect_journal(folder / "copy")
        queue = InProcessQueue([task], options=QueueOptions(directory=folder / "copy"))
        queue.ledger()
        queue.close()

    return Format(directory / "queue.sqlite3", read, is_others=True)


MAKERS: dict[str, Callable[[Path], Format]] = {
    make.__name__: make
    for make in (
        *(manifest, trainer_state, learner_header, policy_config, engine_config, safetensors_header, safetensors),
        *(safetensors_index, torch_dist_table, torch_dist_chunk, vocabulary, tokenizer, chat_template, prompts_jsonl),
        *(prompts_parquet, prompts_arrow, settings_toml, workload_toml, hang_report, health, schedule_record),
        *(trl_state, verl_log, segment, wal, journal_record, journal),
    )
}
RUN_FILES: dict[str, Callable[[Any], object]] = {
    "metrics.jsonl": lambda run: [run.history.values[name] for name in run.history.values],
    "events.jsonl": lambda run: run.events,
    "generations.jsonl": lambda run: run.generations,
    "histograms.jsonl": lambda run: run.histograms,
    "probes.jsonl": lambda run: run.probes,
    "rollouts.jsonl": lambda run: list(run.rollouts()),
    "summary.json": lambda run: run.summary,
}
for _name, _read in RUN_FILES.items():
    MAKERS[_name.partition(".")[0]] = lambda folder, name=_name, read=_read: _of_run(folder, name, read)


def main() -> None:
    """Run cases of one format: NAME CASES SEED."""
    name, cases, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    import structlog

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with tempfile.TemporaryDirectory(prefix="file-fuzz-", dir="/dev/shm") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        made = MAKERS[name](_made(Path(folder) / name))
        made.read()
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        watch()
        run_cases(name, made, cases=cases, seed=seed)


if __name__ == "__main__":
    main()
