"""The lists of verl's and TRL's settings are read from their files."""

from pathlib import Path

from tooling.listed_names import names_of_trl, names_of_verl


def put(site: Path, name: str, text: str) -> None:
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    (site / name).write_text(text)


def test_names_of_verl_are_the_values_of_its_composed_files(tmp_path: Path) -> None:
    put(
        tmp_path, "verl/trainer/config/_generated_ppo_trainer.yaml", "a: {_target_: x, b: 1, c: {}}\nd: {_target_: y}\n"
    )
    put(
        tmp_path,
        "verl/experimental/one/config/one_trainer.yaml",
        "defaults: [ppo]\nhydra: {a: 1}\na: {b: 2, e: null}\n",
    )
    assert list(dict.fromkeys(names_of_verl(tmp_path))) == ["a.b", "a.c", "d", "a.e"]


def test_names_of_trl_are_arguments_and_inherited_fields(tmp_path: Path) -> None:
    trainer = "class GRPOTrainer:\n    def __init__(self, model, args=None, tools=None): ...\n"
    put(tmp_path, "trl/trainer/grpo_trainer.py", trainer)
    put(tmp_path, "trl/trainer/grpo_config.py", "class GRPOConfig(_BaseConfig):\n    beta: float = 0.0\n")
    put(tmp_path, "trl/trainer/base_config.py", "class _BaseConfig:\n    bf16: bool = True\n    plain = 1\n")
    put(tmp_path, "transformers/training_args.py", "class TrainingArguments:\n    seed: int = 1\n")
    assert list(names_of_trl(tmp_path)) == ["model", "tools", "beta", "bf16", "seed"]
