import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError, SettingsError
from rl_metrics.run_files.generations import GenerationSample, draw_generations


def sample(name="a", **changed):
    given = {
        "prompt_uid": f"uid-{name}",
        "input": f"in {name}",
        "output": f"out {name}",
        "score": 1.0,
        "policy_version": (3, 3),
        "source": "rollouter",
    }
    return GenerationSample(**(given | changed))


def contents(samples):
    """Return the samples as JSON, so that NaN equals NaN."""
    return [json.dumps(one.to_json(), sort_keys=True) for one in samples]


SAMPLES = st.builds(
    GenerationSample,
    prompt_uid=st.sampled_from(["p1", "p2", "p3"]),
    input=st.sampled_from(["", "1 + 1", "2 + 2", "\ud800"]),
    output=st.text(max_size=2),
    score=st.floats(),
    ground_truth=st.none() | st.just("2") | st.just({"cases": [["1", 2.5]], "is_fast": True}),
    policy_version=st.tuples(st.integers(0, 2), st.integers(2, 4)),
    source=st.sampled_from(["rollouter", "learner"]),
    failure=st.none() | st.just("timeout"),
    components=st.dictionaries(st.sampled_from(["acc", "format"]), st.floats(), max_size=2),
)


@settings(deadline=None)
@given(
    data=st.data(), samples=st.lists(SAMPLES, max_size=25), count=st.integers(-1, 30), seed=st.integers(0, 2**64 - 1)
)
def test_the_draw_does_not_know_in_which_order_or_parts_samples_came(data, samples, count, seed):
    drawn = draw_generations(samples, count=count, seed=seed)
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(samples), max_size=len(samples)))
    parts = [[one for one, owner in zip(samples, owners, strict=True) if owner == part] for part in range(4)]
    gathered = [one for part in data.draw(st.permutations(parts)) for one in data.draw(st.permutations(part))]
    assert contents(draw_generations(gathered, count=count, seed=seed)) == contents(drawn)
    assert len(drawn) == max(0, min(count, len(samples)))
    left = contents(samples)
    for one in contents(drawn):
        left.remove(one)  # fails if a sample is drawn more often than it occurs


def test_a_draw_is_sorted_by_input_and_then_output():
    samples = [sample(input=i, output=o) for i, o in (("b", "1"), ("a", "2"), ("b", "0"), ("a", "10"))]
    drawn = draw_generations(samples, count=9, seed=0)
    assert [(one.input, one.output) for one in drawn] == [("a", "10"), ("a", "2"), ("b", "0"), ("b", "1")]


def philox_words(seed, *, num_blocks):
    """Philox4x64-10 as defined by Salmon et al. 2011, doi:10.1145/2063384.2063405."""
    words = []
    for block in range(1, num_blocks + 1):
        x, key = [block, 0, 0, 0], [seed, 0]
        for _ in range(10):
            low, high = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [high >> 64 ^ x[1] ^ key[0], high % 2**64, low >> 64 ^ x[3] ^ key[1], low % 2**64]
            key = [(key[0] + 0x9E3779B97F4A7C15) % 2**64, (key[1] + 0xBB67AE8584CAA73B) % 2**64]
        words += x
    return words


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_the_smallest_words_of_philox_are_drawn(seed):
    """No method of numpy's generator decides the draw, so all numpy versions and machines draw the same samples."""
    words = philox_words(seed, num_blocks=3)
    expected = sorted(sorted(range(12), key=words.__getitem__)[:4])
    samples = [sample(f"{index:02}") for index in range(12)]
    assert draw_generations(samples, count=4, seed=seed) == [samples[index] for index in expected]


def test_the_same_prompts_are_drawn_whatever_was_answered():
    before = draw_generations([sample(str(n), output="?") for n in range(30)], count=5, seed=7)
    after = draw_generations([sample(str(n), output=str(-n)) for n in reversed(range(30))], count=5, seed=7)
    assert [one.prompt_uid for one in before] == [one.prompt_uid for one in after]


def test_uneven_batches_all_have_their_chance():
    batches = {size: [sample(f"{size}-{n}") for n in range(size)] for size in (1, 2, 3, 5, 8, 13, 21)}
    everyone = [one for batch in batches.values() for one in batch]
    seen = set()
    for seed in range(40):
        drawn = draw_generations(everyone, count=20, seed=seed)
        assert len({one.prompt_uid for one in drawn}) == 20
        seen |= {one.prompt_uid for one in drawn}
    assert seen == {one.prompt_uid for one in everyone}


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_is_refused(seed):
    with pytest.raises(SettingsError, match=f"found {seed}"):
        draw_generations([], count=1, seed=seed)


@given(one=SAMPLES)
def test_a_sample_goes_through_json(one):
    back = GenerationSample.from_json(json.loads(json.dumps(one.to_json(), allow_nan=False)))
    assert contents([back]) == contents([one])
    assert back.policy_version == one.policy_version


def test_numbers_that_are_not_finite_are_null_in_json():
    row = sample(score=math.nan, components={"acc": math.inf}).to_json()
    assert (row["score"], row["components"]) == (None, {"acc": None})
    back = GenerationSample.from_json({**row, "step": 3})
    assert math.isnan(back.score)
    assert math.isnan(back.components["acc"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_uid", None),
        ("input", 3),
        ("output", ["x"]),
        ("score", "1"),
        ("score", True),
        ("policy_version", [1]),
        ("policy_version", [1, 2.5]),
        ("policy_version", None),
        ("source", None),
        ("failure", 0),
        ("components", {"acc": "high"}),
        ("components", []),
        ("finish", None),
    ],
)
def test_broken_samples_are_refused(name, value):
    with pytest.raises(DataError, match="must have the fields of GenerationSample"):
        GenerationSample.from_json({**sample().to_json(), name: value})


OPTIONAL = ("ground_truth", "failure", "data_source", "finish", "images")


@pytest.mark.parametrize("name", [name for name in sample().to_json() if name not in OPTIONAL])
def test_samples_with_missing_fields_are_refused(name):
    row = sample().to_json()
    del row[name]
    with pytest.raises(DataError, match=name):
        GenerationSample.from_json(row)


def test_samples_of_older_files_have_a_source_and_finish_and_no_images():
    row = {name: value for name, value in sample().to_json().items() if name not in OPTIONAL[2:]}
    assert GenerationSample.from_json(row) == sample()


@given(st.permutations(range(45)), st.integers(7, 45))
def test_every_batch_is_among_the_drawn(order: list[int], count: int):
    pool = [GenerationSample(prompt_uid=f"p{i}", input=f"{i}", output="x", policy_version=(0, 0), source="s")
            for i in range(45)]  # fmt: skip
    batches = [min(i // 7, 6) for i in range(45)]
    drawn = draw_generations([pool[i] for i in order], count=count, seed=0, batches=[batches[i] for i in order])
    assert len(drawn) == count
    assert {batches[int(sample.input)] for sample in drawn} == set(range(7))
    assert drawn == draw_generations(pool, count=count, seed=0, batches=batches)
