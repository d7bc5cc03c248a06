"""Settings of the whole process that results depend on, and that user code may change: torch's, and the directory."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console

VARIABLES = (  # of the environment: which kernels the libraries of products choose, and how they round
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


@dataclass(frozen=True)
class ProcessSettings:
    """CPU threads, the type of new tensors and their device, whether gradients are kept, the precision of fp32
    products, and what relative paths begin at.
    Example: settings = ProcessSettings.now(); ...; settings.hold(console)"""

    threads: int
    dtype: torch.dtype
    device: torch.device
    gradients: bool
    products: str
    directory: str = field(compare=False)

    def __str__(self) -> str:
        kept = "on" if self.gradients else "off"
        tensors = f"default type {self.dtype}, default device {self.device}, gradients {kept}"
        return f"{self.threads} threads, {tensors}, float32_matmul_precision {self.products}"

    @staticmethod
    def now() -> "ProcessSettings":
        """As they are."""
        tensors = (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
        products = torch.get_float32_matmul_precision()
        return ProcessSettings(torch.get_num_threads(), *tensors, products, os.getcwd())

    def hold(self, console: Console) -> None:
        """Set them again if somebody has changed them, and say so."""
        if (found := ProcessSettings.now()).directory != self.directory:
            os.chdir(self.directory)
            console.warn(
                f"some code has changed the directory of the process from {self.directory} to {found.directory}; it is "
                "set back, because the relative paths of the recipe begin there"
            )
        if found == self:
            return
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.dtype)
        if found.device != self.device:
            torch.set_default_device(None if self.device.type == "cpu" else self.device)
        torch.set_grad_enabled(self.gradients)
        torch.set_float32_matmul_precision(self.products)
        console.warn(
            f"some code has changed torch's settings from {self} to {found}; they are set back, but what was computed "
            "meanwhile is not bit for bit what it would have been"
        )


def check_process() -> None:
    """Raise LmgymError if torch is set in a way that nothing can be trained in."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise LmgymError("gradients are switched off (torch.no_grad or torch.inference_mode); train outside of it")
    if torch.get_default_dtype() != torch.float32:
        kind = str(torch.get_default_dtype()).removeprefix("torch.")
        raise LmgymError(
            f"torch's default type is {kind}, and lmgym keeps weights in float32; call "
            "torch.set_default_dtype(torch.float32) first (policy.compute is the precision of forward passes)"
        )
    if (device := torch.get_default_device()).type != "cpu":
        raise LmgymError(
            f"torch's default device is {device}, where batches would be made too; call torch.set_default_device(None) "
            "first (policy.device is where the model goes)"
        )


def unusual_settings() -> dict[str, Any]:
    """Settings of torch and of its libraries that move bits, where they are not as usual: for the fingerprint."""
    found: dict[str, Any] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    usual = {
        "float32_matmul_precision": (torch.get_float32_matmul_precision(), "highest"),
        "deterministic algorithms": (torch.are_deterministic_algorithms_enabled(), False),
        "mkldnn": (torch.backends.mkldnn.enabled, True),
        "TF32 in convolutions": (torch.backends.cudnn.allow_tf32, True),
    }
    return found | {name: now for name, (now, before) in usual.items() if now != before}
