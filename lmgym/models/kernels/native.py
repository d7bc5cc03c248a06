"""decoding.cpp, compiled once for this processor and called through ctypes.

The library lies below $XDG_CACHE_HOME (~/.cache), named by all that its bits depend on: the source, the compiler, its
flags and the processor. It knows nothing of torch, so another torch needs no other library. All functions are for CPUs
and have no gradient; what is not named otherwise is bf16 and contiguous."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lmgym.core.errors import LmgymError
from lmgym.core.progress import doing
from lmgym.models import lora
from lmgym.models.kernels import onednn_linear

SOURCE = Path(__file__).with_name("decoding.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
FOLDER = "lmgym/kernels"  # below $XDG_CACHE_HOME
SECONDS = 600  # for the compiler, which takes some ten
LANES = 16  # numbers of a vector; sizes are multiples of it
SIZES = (32, 48, 64, 80, 96, 128, 256)  # of heads
MOST_QUERIES = 32  # per key head
TILE_OUTPUTS, TILE_INPUTS = 32, 32  # of a product's steps
POINTER, NUMBER, REAL, FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
POINTERS = "query key value cosines sines query_norm key_norm keys values prompt_keys prompt_values out lengths order"
NUMBERS = "stride slots heads key_heads size capacity prompt_capacity window from_one"


class Attention(ctypes.Structure):
    """The struct of this name in decoding.cpp."""

    _fields_ = [
        *((name, POINTER) for name in f"{POINTERS} prompt_of_slot prompt_lengths".split()),
        *((name, NUMBER) for name in NUMBERS.split()),
        ("scale", REAL),
        ("epsilon", REAL),
    ]


class Multiplication(ctypes.Structure):
    """The struct of this name in decoding.cpp."""

    _fields_ = [
        *((name, POINTER) for name in ["hidden", "weights", "bias", "down", "low", "out", "first"]),
        *((name, NUMBER) for name in ["rows", "inputs", "outputs", "width", "rank"]),
        ("adds", FLAG),
    ]


@cache
def library() -> ctypes.CDLL:
    """The compiled functions. Raises LmgymError, with a sentence's end, if they cannot be had here."""
    found = compiled(SOURCE)
    found.attend.argtypes = [POINTER]
    found.norm.argtypes = [POINTER, POINTER, POINTER, NUMBER, NUMBER, REAL, FLAG]
    found.gated.argtypes = [POINTER, POINTER, NUMBER, NUMBER, FLAG]
    found.draw.argtypes = [POINTER, NUMBER, NUMBER, REAL, POINTER, POINTER, POINTER, FLAG]
    found.product.argtypes = [POINTER]
    found.lay_out_transposed.argtypes = [POINTER, POINTER, NUMBER, NUMBER]
    return found


@cache
def has_products() -> bool:
    """True if this processor multiplies in tiles (AMX), and the system lets it."""
    return bool(library().products())


class Product:
    """Linear layers with one input, as one product with weights that are laid out: the bits are those of oneDNN's.
    With adapters it is W x + s B (A x), where A x is rounded to bf16, and in tiles nothing else before the sum is.

    Example: Product(gate, up)(hidden)  # [R 2*I]"""

    def __init__(self, *layers: nn.Module) -> None:
        linear = [lora.base_of(layer) for layer in layers]
        weight, self.bias = torch.cat([layer.weight.detach() for layer in linear]), None
        if linear[0].bias is not None:
            self.bias = torch.cat([layer.bias.detach() for layer in linear])
        self.outputs, self.inputs = weight.shape
        whole = self.inputs % TILE_INPUTS == 0 and all(len(layer.weight) % TILE_OUTPUTS == 0 for layer in linear)
        self.own, self.low = has_products() and whole, None
        if any(lora.adapter_of(layer) is not None for layer in layers):
            self.low = LowRank(layers)
        if self.own and self.low is not None:
            weight = torch.cat([weight, self.low.up], 1)
        self.weight = _tiles(weight) if self.own else onednn_linear.pack(weight)
        if self.own:
            bias = None if self.bias is None else self.bias.data_ptr()
            sizes = {"inputs": self.inputs, "outputs": self.outputs}
            self.asked = Multiplication(weights=self.weight.data_ptr(), bias=bias, **sizes)
        if self.own and self.low is not None:
            self.first, self.down = self.low.first, _tiles(self.low.down)
            self.asked.down, self.asked.first = self.down.data_ptr(), self.first.data_ptr()
            self.asked.width, self.asked.rank = len(self.low.down), self.low.rank

    def __call__(self, hidden: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        hidden = hidden.contiguous()
        if not self.own:
            out = onednn_linear.product(hidden, self.weight, self.bias)
            return out if self.low is None else self.low.add_to(out, hidden)
        out = hidden.new_empty(hidden.shape[0], self.outputs)
        self._compute(hidden, out, adds=False)
        return out

    def add_to(self, total: Float[Tensor, "R O"], hidden: Float[Tensor, "R I"]) -> None:
        """total += the product."""
        if self.own:
            self._compute(hidden.contiguous(), total, adds=True)
        else:
            total += self(hidden)

    def _compute(self, hidden: Tensor, out: Tensor, adds: bool) -> None:
        asked, rows = self.asked, hidden.shape[0]  # len() of a tensor takes longer
        asked.hidden, asked.out, asked.rows, asked.adds = hidden.data_ptr(), out.data_ptr(), rows, adds
        if self.low is not None:
            low = hidden.new_empty(rows, asked.width)
            asked.low = low.data_ptr()
        library().product(ctypes.byref(asked))


class LowRank:
    """The adapters of linear layers with one input, ranks filled up with zeros: all A's together, `down` [W I]; s B of
    each layer, `up` [O K]; and each layer's outputs with the K columns of A x [R W] that they read."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        shapes = [lora.base_of(layer).weight.shape for layer in layers]
        adapters = [lora.adapter_of(layer) for layer in layers]
        rank = max(0 if adapter is None else len(adapter.down) for adapter in adapters)
        self.rank, ends = -(-rank // TILE_INPUTS) * TILE_INPUTS, [0, *accumulate(shape[0] for shape in shapes)]
        self.spans = [
            (slice(*rows), slice(self.rank * place, self.rank * (place + 1)))
            for place, rows in enumerate(pairwise(ends))
        ]
        self.down = torch.zeros(self.rank * len(layers), shapes[0][1], dtype=torch.bfloat16)
        self.up = torch.zeros(ends[-1], self.rank, dtype=torch.bfloat16)
        for adapter, (rows, columns) in zip(adapters, self.spans, strict=True):
            if adapter is not None:
                rank = len(adapter.down)
                self.down[columns][:rank], self.up[rows, :rank] = adapter.down, adapter.scale * adapter.up

    @property
    def first(self) -> Int[Tensor, " O/32"]:
        """The first column that each 32 outputs read."""
        return torch.tensor([columns.start for rows, columns in self.spans for _ in range(rows.start, rows.stop, 32)])

    def add_to(self, total: Float[Tensor, "R O"], hidden: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        """total += s B (A x), without tiles."""
        low = hidden @ self.down.T
        for rows, columns in self.spans:
            total[:, rows].addmm_(low[:, columns], self.up[rows].T)
        return total


def _tiles(weight: Float[Tensor, "O I"]) -> Tensor:
    """Weights in the order of decoding.cpp."""
    tiles = torch.empty_like(weight, memory_format=torch.contiguous_format)
    library().lay_out_transposed(weight.contiguous().data_ptr(), tiles.data_ptr(), *weight.shape)
    return tiles


def norm(
    hidden: Float[Tensor, "R H"], weight: Float[Tensor, " H"], epsilon: float, from_one: bool = False
) -> Float[Tensor, "R H"]:
    """The RMS norm of each row (arXiv 1910.07467), rounded as in transformers' Llama; or with `from_one` as in Gemma,
    whose norms multiply by one plus the weights."""
    out, (rows, size) = torch.empty_like(hidden), hidden.shape
    library().norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, epsilon, from_one)
    return out


def gated(gate_up: Float[Tensor, "R 2*I"], gelu: bool = False) -> Float[Tensor, "R I"]:
    """SiLU of the first half of each row (with `gelu` GELU, by a tanh), times the second half (arXiv 2002.05202)."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    library().gated(gate_up.data_ptr(), out.data_ptr(), rows, size, gelu)
    return out


def draw(
    logits: Float[Tensor, "R V"], temperature: float, uniform: Float[Tensor, " R"]
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """`lmgym.functional.sampling.draw` at a temperature above 0, of logits in bf16 or fp32."""
    rows, vocabulary = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.long), torch.empty(rows)
    logits, uniform = logits.contiguous(), uniform.double().contiguous()
    places = uniform.data_ptr(), tokens.data_ptr(), logprobs.data_ptr()
    library().draw(logits.data_ptr(), rows, vocabulary, temperature, *places, logits.dtype == torch.bfloat16)
    return tokens, logprobs


def compiler_here() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX") or "g++")


def compiled(source: Path) -> ctypes.CDLL:
    """The functions of a source file beside this one. Raises LmgymError, with a sentence's end, if they cannot be had
    here."""
    compiler = compiler_here()
    if compiler is None:
        raise LmgymError("there is no C++ compiler (g++)")
    version, texts = _output([compiler, "--version"], source), [source, *sorted(source.parent.glob("*.h"))]
    written = (path.read_text(encoding="utf-8") for path in texts)
    depends = (*written, version, " ".join(FLAGS), platform.machine(), processor())
    name = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:24] + ".so"
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / FOLDER / name
    try:
        if not path.is_file():
            _compile(compiler, source, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LmgymError(f"{path} cannot be written or loaded ({error.strerror or error})") from error


@doing("compiling kernels for this processor, once")
def _compile(compiler: str, source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # several processes may do it at once
        _output([compiler, *FLAGS, str(source), "-o", str(Path(folder) / path.name)], source)
        os.replace(Path(folder) / path.name, path)


def _output(command: list[str], source: Path) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split())[:200]
        raise LmgymError(f"{command[0]} does not compile {source.name} ({reason})") from error
    except subprocess.TimeoutExpired as error:
        raise LmgymError(f"{command[0]} takes more than {SECONDS} seconds") from error


def processor() -> str:
    """What -march=native depends on: the processor's name and its flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
