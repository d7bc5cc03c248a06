"""vLLM in the training process: weights go over as tensors, without a file (docs/engines.md).

Tried with vLLM 0.32 on a processor. It moves torch's random numbers when it starts and when it samples, and on a
processor it replaces `torch.set_num_threads` by a function that does nothing; both are put back."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.inference.vllm.engine import Query, Sampled, weights_of
from lmgym.inference.vllm.servers import write_weights
from lmgym.models.policy import Policy

ENVIRONMENT = {  # read by vLLM when it starts; what the user has set stays
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that tensors can be handed over
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads belong to training too
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
AS_THEY_ARE = {"mm_device_do_normalize": False}  # else vLLM folds pixels' mean into weights that a push replaces


class Here:
    """vLLM in this process, with `rows` answers at a time and so many bytes (`cache`) for keys and values.

    Example: VLLM(policy, Here(rows=256, cache=4 * 2**30))"""

    remedy = "write engine.name: sampler, or give the addresses of servers"

    def __init__(self, rows: int = 256, cache: int = 2**30) -> None:
        self.rows, self.cache = rows, cache
        self._llm: Any = None

    def reach(self, policy: Policy) -> int:
        """Start vLLM with the policy's model. Raises LmgymError if that fails, with the first words of its reason."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
        except ImportError as error:
            raise LmgymError(f"engine.name: vLLM cannot be imported ({error}); see docs/engines.md") from error
        precision = str(policy.compute).removeprefix("torch.")
        set_threads, threads = torch.set_num_threads, torch.get_num_threads()
        with tempfile.TemporaryDirectory() as folder, seeds.GLOBAL, torch.random.fork_rng():
            model = Path(folder) / "model"
            write_weights(policy, model)
            policy.save_words(model)  # for stop strings and pictures
            try:
                self._llm = vllm.LLM(
                    model=str(model),
                    dtype=precision,
                    enforce_eager=policy.device.type == "cpu",
                    max_model_len=policy.context or -1,  # -1: what the cache has room for
                    max_num_seqs=self.rows,
                    kv_cache_memory_bytes=self.cache,
                    **_room(policy.device),
                    logprobs_mode="processed_logprobs",
                    max_logprobs=-1,  # no limit
                    enable_chunked_prefill=False,  # with a seed of its own a prompt cannot be cut on a processor
                    use_tqdm_on_load=False,
                    **({} if policy.vision is None else AS_THEY_ARE),
                )
            except (RuntimeError, ValueError, OSError, NotImplementedError, AssertionError) as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
                raise LmgymError(
                    f"engine.name: vLLM does not start in this process ({reason}); mend that (engine.cache_gib is the "
                    "memory of its cache), give the addresses of servers, or write sampler"
                ) from error
            finally:
                torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        return int(self._llm.llm_engine.model_config.max_model_len)

    def sample(self, queries: Sequence[Query], first: int) -> Iterator[Sampled]:
        import vllm

        prompts = [_prompt(one) for one in queries]
        settings = [vllm.SamplingParams(**one.settings) for one in queries]
        with seeds.GLOBAL, torch.random.fork_rng():
            answers = self._llm.generate(prompts, settings, use_tqdm=False)
        return (_sampled(answer, bool(one.pictures)) for one, answer in zip(queries, answers, strict=True))

    def push(self, policy: Policy, version: int) -> None:
        """Hand over the weights, and forget what was cached with the old ones."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights_of(policy).items())})
        self._llm.reset_prefix_cache()
        if policy.vision is not None:
            self._llm.llm_engine.reset_encoder_cache()  # features of pictures
        self._llm.llm_engine.set_weight_version(str(version))

    def instead_of_rounding(self, policy: Policy) -> str:
        return "" if policy.compute == torch.float32 else "write policy.compute: float32"

    def apart(self) -> Sequence[tuple[str, "Here"]]:
        return [("vLLM in this process", self)]

    def close(self) -> None:
        """End it, and free its memory."""
        if self._llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        cleanup_dist_env_and_memory()


def _room(device: torch.device) -> dict[str, float]:
    """The share of a GPU's memory that vLLM may take. It does not start where less is free than its usual 0.9 (beside
    the model that trains, for instance), although the size of its cache is given."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"gpu_memory_utilization": 0.95 * free / total}


def _prompt(query: Query) -> dict[str, Any]:
    """A prompt as vLLM takes it."""
    pictures = {"multi_modal_data": {"image": list(query.pictures)}} if query.pictures else {}
    return {"prompt_token_ids": query.ids, **pictures}


def _sampled(answer: Any, pictures: bool) -> Sampled:
    """What vLLM has sampled."""
    output, read = answer.outputs[0], [*answer.prompt_token_ids] if pictures else []
    ids = [int(token) for token in output.token_ids]
    pairs = [[(int(token), float(entry.logprob)) for token, entry in table.items()] for table in output.logprobs]
    logprobs = [dict(table)[token] for token, table in zip(ids, pairs, strict=True)]
    return Sampled(ids, logprobs, pairs, {str(span.version) for span in output.weight_versions}, read)
