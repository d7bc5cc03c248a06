"""A vLLM server of a model's folder, from an environment that has vLLM, for as long as a block lasts."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": "",
}
SECONDS = 300  # until it answers


@contextmanager
def served(python: Path, model: Path, log: Path, *more: object) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and the process of a server in fp32; `more` are words of its command line. What it says goes to
    `log`, and ends the program if no server comes.

    Example: with served(Path("venv/bin/python"), Path("model"), Path("log.txt")) as (address, process): ...
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", model, "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", port]
    words += ["--max-model-len", 512, "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    words += ["--no-enable-chunked-prefill", *more]  # vLLM 0.32 ends if a prompt with a seed is cut on a processor
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *map(str, words)]
    with log.open("w") as file:
        environment = os.environ | ENVIRONMENT
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if "--enable-lora" in more else {}
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process, log)
        yield address, process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(SECONDS):
        time.sleep(1)
        if process.poll() is not None:
            sys.exit(f"no vLLM server: {log.read_text(encoding='utf-8')[-3000:]}")
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            continue
    sys.exit(f"no vLLM server within {SECONDS} s; {log} says what it did")
