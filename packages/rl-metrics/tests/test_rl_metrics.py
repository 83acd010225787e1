import subprocess
import sys

HEAVY = (
    "ray",
    "vllm",
    "megatron",
    "transformers",
    "wandb",
    "torch",
    "pandas",
    "matplotlib",
    "tensorboard",
    "mlflow",
    "sqlalchemy",
)


def test_the_import_is_light():
    code = f"import sys, rl_metrics; sys.exit(','.join(m for m in {HEAVY!r} if m in sys.modules) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_module_runs_as_a_command():
    result = subprocess.run(
        [sys.executable, "-m", "rl_metrics", "list", "entropy"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0
    assert "actor/entropy" in result.stdout
