"""Formats of models, checkpoints and prompts for the fuzz test: a valid file of each, and its reader."""

import json
from pathlib import Path

from file_mutation import Format


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def written(file: Path, content: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def _checkpoint(folder: Path) -> Path:
    from rl_distill.checkpoints.store import file_crc32c

    files = {"trainer.json": {"step": 3, "prompts": {"epoch": 0}, "random": [1, 2.5, None]}, "learner.json": LEARNER}
    paths = {name: written(folder / name, content) for name, content in files.items()}
    listed = {n: {"size_bytes": p.stat().st_size, "crc32c": file_crc32c(p)} for n, p in paths.items()}
    written(folder / "manifest.json", {"format": 1, "files": listed})
    return folder


LEARNER = {"format_version": 3, "step": 3, "config_digest": "0" * 16, "options": {"dtype": "float32"}}
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
    """learner.json, checked against the policy's config.json."""
    from rl_distill.architecture.policy_config import parse_policy_config
    from rl_distill.checkpoints.checkpoint import read_header

    config = parse_policy_config(CONFIG)
    written(folder / "policy" / "config.json", CONFIG)
    header = {**LEARNER, "config_digest": config.digest}
    file = written(folder / "learner.json", header)
    return Format(file, lambda: read_header(folder, config=config, dtype="float32"))


MODULE = "model.layers.0.self_attn.q_proj"


def adapter_header(folder: Path) -> Format:
    """learner.json of an adapter's learner."""
    from rl_distill.architecture.policy_config import parse_policy_config
    from rl_distill.checkpoints.checkpoint import TrainedAdapter, read_header
    from rl_distill.options import LoraOptions

    config = parse_policy_config(CONFIG)
    adapter = TrainedAdapter(options=LoraOptions(rank=2), modules=(MODULE,), base=folder, base_digest="0" * 32)
    header = {**LEARNER, "config_digest": config.digest, "adapter": adapter.record()}
    file = written(folder / "learner.json", header)
    return Format(file, lambda: read_header(folder, config=config, dtype="float32", adapter=adapter))


def _adapter(folder: Path) -> Path:
    import torch

    from rl_distill.checkpoints.peft_folder import write_adapter
    from rl_distill.options import LoraOptions

    tensors = {f"{MODULE}.lora_A.weight": torch.zeros(2, 8), f"{MODULE}.lora_B.weight": torch.zeros(8, 2)}
    write_adapter(folder, tensors, options=LoraOptions(rank=2), matrices=[f"{MODULE}.weight"], base=folder)
    return folder


def adapter_config(folder: Path) -> Format:
    """adapter_config.json."""
    from rl_distill.checkpoints.peft_folder import AdapterFolder

    return Format(_adapter(folder) / "adapter_config.json", lambda: AdapterFolder(folder).read(MODULE))


def adapter_tensors(folder: Path) -> Format:
    """adapter_model.safetensors."""
    from rl_distill.checkpoints.peft_folder import AdapterFolder

    def read() -> None:
        found = AdapterFolder(folder)
        for module in found.modules:
            found.read(module)

    return Format(_adapter(folder) / "adapter_model.safetensors", read)


def policy_config(folder: Path) -> Format:
    """config.json, as learners, engines and teachers read it."""
    from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
    from rl_distill.architecture.tensor_shapes import tensor_shapes

    def read() -> None:
        config = parse_policy_config(read_policy_config(folder))
        if config.num_experts < 64:
            tensor_shapes(config)

    return Format(written(folder / "config.json", CONFIG), read)


def engine_config(folder: Path) -> Format:
    """config.json, as an engine reads it."""
    from rl_distill.teacher.model_folder import model_traits
    from rl_rollout.engines.model_folder import end_token_ids, max_positions, require_model_folder

    written(folder / "model.safetensors", (2).to_bytes(8, "little") + b"{}")

    def read() -> None:
        end_token_ids(folder)
        require_model_folder(folder)
        model_traits(folder)
        max_positions(folder)

    return Format(written(folder / "config.json", CONFIG), read)


def _tensors(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    from rl_distill.architecture.policy_config import parse_policy_config
    from rl_distill.architecture.tensor_shapes import tensor_shapes

    shapes = tensor_shapes(parse_policy_config(CONFIG))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    written(folder / "config.json", CONFIG)
    return folder / "model.safetensors"


def safetensors_header(folder: Path) -> Format:
    """The header of a safetensors file, read by our own reader."""
    from rl_core.files import read_safetensors_header

    return Format(_tensors(folder), lambda: read_safetensors_header(folder / "model.safetensors"))


def safetensors(folder: Path) -> Format:
    """Weights, read by safetensors."""
    from rl_distill.architecture.policy_config import parse_policy_config
    from rl_distill.checkpoints.hf_folder import PolicyTensors
    from rl_distill.teacher.model_folder import model_fingerprint

    def read() -> None:
        import torch

        model_fingerprint(folder)
        dict(PolicyTensors(folder, parse_policy_config(CONFIG)).whole(torch.float32))

    return Format(_tensors(folder), read, is_others=True)


def safetensors_index(folder: Path) -> Format:
    """The index of shards."""
    from rl_distill.architecture.policy_config import parse_policy_config
    from rl_distill.architecture.tensor_shapes import tensor_shapes
    from rl_distill.checkpoints.hf_folder import PolicyTensors

    _tensors(folder)
    config = parse_policy_config(CONFIG)
    names = dict.fromkeys(tensor_shapes(config), "model.safetensors")
    file = written(folder / "model.safetensors.index.json", {"weight_map": names})
    return Format(file, lambda: PolicyTensors(folder, config))


def tensor_index(folder: Path) -> Format:
    """The index of a checkpoint's tensors."""
    from tensor_folders import write_example

    from rl_distill.checkpoints.pieces import TensorFolder

    return Format(write_example(folder / "state") / "pieces.json", lambda: TensorFolder(folder / "state"))


def tensor_file(folder: Path) -> Format:
    """A rank's tensors of a checkpoint."""
    from tensor_folders import read_all, write_example

    return Format(write_example(folder / "state") / "rank-00000.safetensors", lambda: read_all(folder / "state"))


def vocabulary(folder: Path) -> Format:
    """tokenizer.json, read for the comparison of vocabularies."""
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
    written(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
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

    return Format(written(folder / "chat_template.jinja", text), read, is_others=True)


ROW = {"prompt": [{"role": "user", "content": "1+2?"}], "reward_model": {"ground_truth": "3"}, "data_source": "a"}


def prompts_jsonl(folder: Path) -> Format:
    """Prompts as JSON lines."""
    lines = b"\n".join([json.dumps(ROW | {"extra_info": {"index": 1}}).encode()] * 3)
    return Format(written(folder / "rows.jsonl", lines), lambda: _read_rows(folder / "rows.jsonl"))


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
