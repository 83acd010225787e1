import rl_rollout


def test_public_names():
    assert rl_rollout.__all__ == [
        "AgentLoop",
        "EngineTraits",
        "GenerateRequest",
        "Generation",
        "GroupResult",
        "LoopContext",
        "MathVerify",
        "PromptOptions",
        "PromptSet",
        "PromptSource",
        "PromptTokenizer",
        "RewardFunction",
        "RewardInput",
        "RewardResult",
        "RewardScorer",
        "Rollout",
        "RolloutEngine",
        "SamplingParams",
        "Scored",
        "SessionLoop",
        "SessionResult",
        "SingleTurnLoop",
        "audit_trajectory",
        "load_prompts",
        "quick",
        "require_some_success",
        "resolve_loop",
        "resolve_reward",
    ]
    assert all(hasattr(rl_rollout, name) for name in rl_rollout.__all__)
