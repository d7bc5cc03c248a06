"""Whether the Hugging Face Hub answers, asked once and briefly: its client tries for most of a minute."""

import os
import socket
import sys
import threading
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 2.0  # seconds
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # where a user has set one of them, it decides


def prepare_hub(*names: str) -> None:
    """Call before something is loaded that may come from the Hub. If one of `names` is no folder here and the Hub does
    not answer within two seconds, the Hub's libraries use their local cache only, for the rest of the process. Where
    the environment variable HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set (0 or 1), nothing is tried."""
    local = all(Path(name).expanduser().exists() for name in names)
    if local or any(variable in os.environ for variable in OFFLINE) or answers(_address()):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that are started from here
    # Loaded libraries have read the variable already.
    for module, constant in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
        loaded: Any = sys.modules.get(module)
        if loaded is not None:
            setattr(loaded, constant, True)


def unreachable() -> str:
    """Why nothing can be fetched from the Hub, as the end of a sentence; empty if it can."""
    switched_off = [name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if not switched_off:
        return ""
    if answers.cache_info().currsize == 0:
        return f"{switched_off[0]} is set, and it is not in the local cache"
    return f"the Hub ({_address()[0]}) cannot be reached, and it is not in the local cache"


@cache
def answers(address: tuple[str, int], seconds: float = PATIENCE) -> bool:
    """Whether something listens at (host, port). In a thread: looking up a name has no time limit of its own."""
    connected: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=seconds).close()
        except OSError:
            return
        connected.append(True)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(connected)


def _address() -> tuple[str, int]:
    """Host and port of the Hub, or of the proxy on the way to it."""
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host = endpoint.hostname or "huggingface.co"
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(endpoint.scheme)
    there = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else endpoint
    return there.hostname or host, there.port or (80 if there.scheme == "http" else 443)
