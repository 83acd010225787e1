import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.invented_inputs import InventedPrompts, invented_inputs

from rl_core.errors import SettingsError
from rl_core.images import ImageStore
from rl_trainer_parts.checks.models import check_images, image_problems
from rl_trainer_parts.rollouts import inputs as inputs_of_runs
from rl_trainer_parts.rollouts.setup import canary_prompts, problem_id


class WithImages(InventedPrompts):
    """Prompts of which the third has an image."""

    num_images = 1
    first_with_image = 2
    store: ImageStore | None = None

    def keep_images(self, store: ImageStore) -> None:
        self.store = store


def settings_of(folder: Path, **sections: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8}))
    plain: dict[str, Any] = {
        "policy": SimpleNamespace(path=folder),
        "critic": SimpleNamespace(path=None),
        "rollout": SimpleNamespace(loop="single_turn"),
        "distillation": SimpleNamespace(is_on=False),
        "algorithm": SimpleNamespace(advantage="grpo"),
        "trainer": SimpleNamespace(canary_prompts=2),
        "run_folder": folder,
    }
    return SimpleNamespace(**(plain | sections))


@pytest.fixture
def inputs() -> Any:
    return replace(invented_inputs(train=1), train=WithImages(5))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"rollout": SimpleNamespace(loop="verifiers")},
            'rollout.loop = "verifiers" does not take prompts with images',
        ),
        ({"distillation": SimpleNamespace(is_on=True)}, "distillation does not take prompts with images"),
        (
            {"critic": SimpleNamespace(path=Path("text")), "algorithm": SimpleNamespace(advantage="gae")},
            "critic.path = text takes no images",
        ),
    ],
)
def test_what_does_not_take_images_is_refused_by_name(
    tmp_path: Path, inputs: Any, sections: dict[str, Any], words: str
) -> None:
    check_images(settings_of(tmp_path, **sections), invented_inputs(train=5))
    check_images(settings_of(tmp_path), inputs)
    with pytest.raises(SettingsError, match=words):
        check_images(settings_of(tmp_path, **sections), inputs)


def test_settings_of_images_are_refused_for_a_policy_of_text(tmp_path: Path) -> None:
    prompts = SimpleNamespace(train=tmp_path, max_images=3, image_folders=(), image_urls=())
    given = settings_of(tmp_path, prompts=prompts, vllm=SimpleNamespace(image_folder=tmp_path))
    found = list(image_problems(given))
    assert [line.split(" ")[0] for line in found] == ["vllm.image_folder", "prompts.max_images"]


def test_images_are_kept_in_the_runs_folder_only_if_there_are_any(
    tmp_path: Path, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_of_runs, "read_tokenizer", lambda _settings: "with images")
    plain = invented_inputs(train=5)
    assert inputs_of_runs.with_kept_images(settings_of(tmp_path), plain) is plain
    assert not (tmp_path / "images").exists()
    only = replace(inputs, validation=None, test=None)
    assert inputs_of_runs.with_kept_images(settings_of(tmp_path), only).tokenizer == "with images"
    assert only.train.store.folder == tmp_path / "images"
    assert (tmp_path / "images").is_dir()


@pytest.mark.parametrize(
    ("loop", "sees", "distils", "shown"),
    [
        ("single_turn", True, False, False),
        ("tools", True, False, True),
        ("environment", True, False, True),
        ("tools", False, False, False),
        ("tools", True, True, False),
    ],
)
def test_tools_and_environments_may_show_images_although_no_prompt_has_one(
    tmp_path: Path, loop: str, sees: bool, distils: bool, shown: bool
) -> None:
    settings = settings_of(tmp_path, rollout=SimpleNamespace(loop=loop), distillation=SimpleNamespace(is_on=distils))
    tokenizer: Any = SimpleNamespace(sees_images=sees)
    assert inputs_of_runs.shows_images(settings, replace(invented_inputs(train=5), tokenizer=tokenizer)) == shown


def test_a_canary_has_an_image_if_a_prompt_has_one(tmp_path: Path) -> None:
    prompts: Any = WithImages(5)
    for index in range(5):
        prompts[index] = index
    assert canary_prompts(settings_of(tmp_path), prompts) == [0, 2]


def test_a_problems_id_follows_from_its_images() -> None:
    image: Any = SimpleNamespace(digest="ab" * 32)
    ids: Any = [1, 2]
    assert len({problem_id(ids), problem_id(ids, images=[image]), problem_id(ids, images=[image, image])}) == 3
