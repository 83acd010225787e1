"""`check-model` from config.json alone: the table, JSON, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from image_families import make_image_family
from invented_inputs import TINY_SIZES

from rl_rollout.engines import EngineChoice
from rl_trainer_parts.commands import check_model
from rl_trainer_parts.commands.command_line import run_program

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **TINY_SIZES}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **TINY_SIZES}


def check(config: dict[str, Any] | str, folder: Path, *options: str) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return run([str(folder), *options])


def run(words: list[str]) -> int:
    def settings() -> Any:
        raise AssertionError("check-model needs no settings")

    return run_program(
        ["check-model", *words], name="rl-sync-trainer", usage="", commands={"train": run}, settings=settings
    )


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    def read() -> list[str]:
        return capsys.readouterr().out.replace(str(tmp_path), "DIR").splitlines()

    return read


def test_a_model_that_transformers_computes(tmp_path: Path, printed: Any, monkeypatch: pytest.MonkeyPatch):
    choice = EngineChoice(name="transformers", reason="vLLM is not installed")
    monkeypatch.setattr(check_model, "choose_engine", lambda _: choice)

    assert check(MISTRAL, tmp_path) == 0

    assert printed() == [
        "model        MistralForCausalLM in DIR",
        "trained by   transformers (policy.backend)",
        "             its own class, whole on each rank, because our layers do not compute MistralForCausalLM",
        "rows         packed with shared prefixes, if this gives the class's logprobs at the start; else padded",
        "served by    transformers (rollout.engine)",
        "             vLLM is not installed",
        "parameters   78,144",
        "memory       of each rank in bfloat16 (weights, gradients, optimizer), without activations",
        "             ranks                     1          2          4          8   fits 80 GB",
        "             all weights          1.4 MB   937.7 kB   703.3 kB   586.1 kB   from 1 rank",
        "             shard_weights        1.3 MB   625.2 kB   312.6 kB   156.3 kB   from 1 rank",
        "             LoRA of 16         690.8 kB   512.6 kB   423.6 kB   379.0 kB   from 1 rank",
        "proven       at the start, the learner's logprobs against transformers' class; no way that differs is used",
        "             at each update, each tensor's checksum and its product in live layers, and logprobs of a canary",
        "adapters     on 14 matrices: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        "refused      parallel.tensor, parallel.pipeline, parallel.context, parallel.expert above 1: ranks divide"
        " only our layers",
        '             optimizer.recompute = "selective" chooses among our layers\' modules',
    ]


@pytest.fixture
def model_with_images(tmp_path: Path) -> Path:
    pytest.importorskip("PIL")
    make_image_family("llava", tmp_path / "model")
    return tmp_path / "model"


def test_a_model_with_images_tells_their_tokens(model_with_images: Path, printed: Any):
    assert run([str(model_with_images)]) == 0
    lines = printed()
    assert lines[lines.index("images       4 tokens for 224 x 224 pixels") + 1].split()[:2] == ["4", "tokens"]
    assert "             parallel.shard_weights, which does not divide a policy with images" in lines
    assert not [line for line in lines if line.split()[0] == "shard_weights"]

    assert run([str(model_with_images), "--json"]) == 0
    assert json.loads("\n".join(printed()))["images"] == {"tokens": {"224 x 224": 4, "896 x 672": 4}}


NEXT = {"model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"]}
PARTS = {
    "image_processor_type": "LlavaNextImageProcessor",
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "image_grid_pinpoints": [[224, 448], [448, 448]],
}


@pytest.mark.parametrize(
    ("config", "images", "reason"),
    [
        ({}, None, "need preprocessor_config.json or processor_config.json, and the tokenizer's files"),
        ({}, {"image_processor_type": "Lfm2VlImageProcessor"}, "their processor needs torchvision, which is not"),
        (
            {},
            {"image_processor_type": "NoProcessor"},
            "DIR/model: transformers cannot load the processor of its",
        ),
        (NEXT, PARTS, "a processor that cuts images into different numbers of parts is not supported"),
    ],
)
def test_why_images_cannot_be_used(
    model_with_images: Path, printed: Any, config: dict[str, Any], images: dict[str, Any] | None, reason: str
):
    for name, changes in (("config.json", config), ("preprocessor_config.json", images)):
        file = model_with_images / name
        file.write_text(json.dumps(json.loads(file.read_text()) | (changes or {})))
    if images is None:
        for file in model_with_images.iterdir():
            if file.name != "config.json":
                file.unlink()

    assert run([str(model_with_images)]) == 0
    assert f"images       not usable: {reason}" in "\n".join(printed())


def test_a_model_of_our_layers_needs_no_torch(tmp_path: Path, printed: Any):
    assert check(QWEN3, tmp_path, "--json") == 0

    found = json.loads("\n".join(printed()))

    assert (found["backend"], found["trains"], found["refused"]) == ("megatron", True, [])
    assert found["backend_why"] == "our layers compute Qwen3ForCausalLM, and ranks can divide it"
    memory = {way["name"]: way for way in found["memory"]}
    assert list(memory["tensor = ranks"]["bytes_by_ranks"]) == ["1", "2"]  # two key-value heads
    one, parameters = memory["all weights"]["bytes_by_ranks"]["1"], found["parameters"]
    assert one == 18 * parameters
    assert memory["all weights"]["bytes_by_ranks"]["4"] == 6 * parameters + 3 * parameters
    assert found["adapters"] == dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2
    )


def test_an_option_that_our_layers_lack_is_the_reason(tmp_path: Path, printed: Any):
    assert check(QWEN3 | {"hidden_act": "gelu"}, tmp_path) == 0

    assert "because hidden_act must be 'silu' for the learners; config.json has 'gelu'" in "\n".join(printed())


def test_layers_with_a_state_are_padded(tmp_path: Path, printed: Any):
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 128, "hidden_size": 64}

    assert check(config | {"num_hidden_layers": 2, "state_size": 8}, tmp_path) == 0

    assert "rows         padded, because layers keep a state from token to token; no shared prefixes" in printed()


def test_fields_that_the_class_does_not_have_are_ignored(tmp_path: Path, printed: Any):
    config = {name: value for name, value in MISTRAL.items() if name != "architectures"}
    assert check(config | {"my_layers": 5000, "my_experts": 10**6}, tmp_path) == 0
    assert printed()[0] == "model        MistralForCausalLM in DIR"


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (
            {"architectures": ["MistralForCausalLM"], **TINY_SIZES},
            "config.json must have a model_type, the architecture's name",
        ),
        (
            QWEN3 | {"model_type": "llama"},
            "architecture Qwen3ForCausalLM is not supported: the causal language model of",
        ),
        ({**MISTRAL, "model_type": "no_such"}, "model_type must be one of transformers"),
        ({**MISTRAL, "quantization_config": {"bits": 4}}, "config.json has quantization_config, and quantized weights"),
        ({**MISTRAL, "num_hidden_layers": 10**9}, "config.json must have num_hidden_layers <= 1024; found 1000000000."),
        ({**MISTRAL, "hidden_size": "x"}, "config.json does not describe a mistral model: "),
        ({**MISTRAL, "rope_scaling": {"rope_type": "longrope"}}, "config.json does not describe a mistral model: "),
        (
            {**MISTRAL, "model_type": "mixtral", "num_local_experts": 16384, "num_hidden_layers": 1000},
            "config.json must have at most 262144 experts in all layers together.",
        ),
        (
            {**QWEN3, "hidden_act": "gelu", "layer_types": ["full_attention"] * 2}
            | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "transformers cannot build the model that config.json describes: KeyError: 'rope_type'",
        ),
    ],
)
def test_a_model_that_does_not_train_is_refused_with_its_field(
    config: dict[str, Any], refused: str, tmp_path: Path, printed: Any
):
    assert check(config, tmp_path) == 1
    model, line, *_ = printed()
    assert model == "model        DIR"
    assert line.startswith(f"refused      {refused}")
    assert check(config, tmp_path, "--json") == 1
    found = json.loads("\n".join(printed()))
    assert not found["trains"]
    assert found["refused"][0].startswith(refused)


def test_mistakes_are_short_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    calls = {
        (str(tmp_path / "none"),): "does not exist",
        (str(tmp_path / "file"),): "file is not a folder.",
        (str(tmp_path / "empty"),): "config.json does not exist. Pass a Hugging Face model folder.",
        (): "check-model needs one model folder: rl-sync-trainer check-model DIR",
        (str(tmp_path), "b"): "check-model needs one model folder",
        (str(tmp_path), "--jsno"): "unknown option --jsno; known: --json.",
    }
    for words, message in calls.items():
        assert run(list(words)) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert message in said
    for content, message in (('{"a": "b', "must be JSON"), ("[]", "must contain a JSON object"), ("[" * 10**5, "JSON")):
        assert check(content, tmp_path / "torn") == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


def test_help_says_what_is_shown(capsys: pytest.CaptureFixture[str]):
    assert run(["--help"]) == 0
    assert "rl-sync-trainer check-model DIR [--json]" in capsys.readouterr().out
