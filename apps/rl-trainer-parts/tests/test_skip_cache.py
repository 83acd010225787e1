"""The sampling parameters in a skip cache's fingerprint."""

from rl_rollout.engines import SamplingParams
from rl_rollout.engines.protocol import Structure
from rl_rollout.skip.fingerprint import compare
from rl_trainer_parts.rollouts.skip_cache import drawn_by


def test_every_way_to_draw_counts_and_entries_from_before_stop_strings_still_match() -> None:
    before = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": None, "seed": None, "stop_token_ids": []}
    plain = SamplingParams(max_tokens=4, seed=3)
    assert compare({"sampling": before}, {"sampling": drawn_by(plain)}) == []
    for other in (
        SamplingParams(max_tokens=4, stop=("a",)),
        SamplingParams(max_tokens=4, structure=Structure(regex="a")),
        SamplingParams(max_tokens=4, top_p=0.5),
        SamplingParams(max_tokens=4, max_nucleus=8),
    ):
        assert len(compare({"sampling": drawn_by(plain)}, {"sampling": drawn_by(other)})) == 1
