"""Tensors of a GPU that is not there: they lie on the CPU, and each storage that was asked for on cuda has a label.

What is computed lies where its operands lie, and `.to("cuda")` of a tensor of the CPU gives a labelled copy. So each
operation sees whether its operands lie together, and what a GPU would refuse is refused here: operands of both devices,
a generator of the other one, the numpy array of a GPU's tensor, and within the capture of a CUDA graph whatever waits
for the GPU or moves data. Not seen: what a kernel in C++ of lmgym's own reads, and devices but cuda:0 and cpu."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# Operations that may read another device than they write to, or that only look at their operand.
MOVES = {"copy_", "_to_copy", "_copy_from", "_foreach_copy_", "set_", "detach", "alias", "lift_fresh", "resize_"}
# Operations that take no number of the CPU (a tensor without dimensions) beside a tensor of the GPU.
STRICT = (
    *("cat", "stack", "index_select", "gather", "scatter", "embedding", "index_add", "index_copy", "index_fill"),
    *("mm", "bmm", "addmm", "baddbmm", "dot", "mv", "searchsorted", "bucketize", "equal"),
)
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}
WAITS |= {"_unique2", "unique_dim", "unique_consecutive"}


class Labels:
    """Which tensors lie on the pretended GPU, and what has been refused.

    Example: labels.put(tensor); labels.holds(tensor[0])  # True: the same storage"""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being given again
        self.refused: list[str] = []  # also what the code that was refused has caught
        self.wanted = CPU  # where tensors without operands are made
        self.capturing = False

    def holds(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self.storages

    def put(self, tensor: torch.Tensor, there: bool = True) -> None:
        """From now on the tensor's storage lies on the GPU, or not `there` but on the CPU."""
        address = storage_of(tensor)
        if not there:
            self.storages.pop(address, None)
        elif address and address not in self.storages:
            with torch._C.DisableTorchFunction():
                self.storages[address] = StorageWeakRef(tensor.untyped_storage())
            if len(self.storages) % 20_000 == 0:
                self.storages = {key: one for key, one in self.storages.items() if not one.expired()}

    def refuse(self, what: str) -> None:
        own = [f for f in traceback.extract_stack() if "/lmgym/" in f.filename and "site-packages" not in f.filename]
        self.refused.append(f"{what}, at {own[-1].filename}:{own[-1].lineno}" if own else what)
        raise RuntimeError(self.refused[-1])

    def describe(self, tensors: Sequence[torch.Tensor]) -> str:
        return ", ".join(f"{list(one.shape)} on {'cuda:0' if self.holds(one) else 'cpu'}" for one in tensors)


labels = Labels()


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 for one that has none here (on meta, or within vmap)."""
    with torch._C.DisableTorchFunction():
        try:
            return int(tensor.untyped_storage()._cdata) if tensor.device == CPU else 0
        except NotImplementedError:  # torch's batched and functional tensors have no storage of their own
            return 0


def leaves_in(values: Any) -> Iterator[Any]:
    """What lists, tuples and dicts hold. (torch's own pytree is much slower.)"""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, (list, tuple, dict)):
            yield from leaves_in(value)
        else:
            yield value


def tensors_in(*values: Any) -> list[torch.Tensor]:
    return [one for one in leaves_in(values) if isinstance(one, torch.Tensor)]


class Checked(TorchDispatchMode):
    """Refuses operations as a GPU would, and labels what the others give."""

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, operands = function.overloadpacket.__name__, tensors_in(args, kwargs)
        there = any(map(labels.holds, operands)) if operands else labels.wanted == CUDA
        if there:
            _check_devices(name, args, operands)
            if any(isinstance(one, torch.Generator) for one in leaves_in([args, kwargs])):
                labels.refuse(f"a generator of cpu for {name} on cuda:0")
            if labels.capturing:
                _check_capture(name, args, operands)
        result = function(*args, **kwargs)
        if there:
            given = set(map(storage_of, operands))
            for tensor in tensors_in(result):
                if storage_of(tensor) not in given:  # no view, and nothing that was written in place
                    labels.put(tensor)
        return result


def _check_devices(name: str, args: Any, operands: list[torch.Tensor]) -> None:
    apart = [one for one in operands if storage_of(one) and not labels.holds(one)]
    if not apart or name in MOVES:
        return
    if name in INDEXING:  # an index may lie on the CPU; what is indexed and what is written may not
        wrong = apart[0] is args[0] or ("put" in name and args[2].dim() > 0 and not labels.holds(args[2]))
    elif name.endswith("_") and operands[0] is apart[0]:
        wrong = True  # a number of the CPU cannot become one of the GPU in place
    else:
        wrong = any(one.dim() > 0 for one in apart) or any(name.strip("_").startswith(strict) for strict in STRICT)
    if wrong:
        labels.refuse(f"operands of {name} on both devices ({labels.describe(operands)})")


def _check_capture(name: str, args: Any, operands: list[torch.Tensor]) -> None:
    """Refuse what waits for the GPU or moves data to it; `args` are those of an operation on the GPU."""
    masks = name in INDEXING and any(one.dtype == torch.bool for one in tensors_in(args[1]))
    moves = name == "copy_" and labels.holds(args[0]) != labels.holds(args[1])
    moves = moves or (name in INDEXING and not all(map(labels.holds, tensors_in(args[1]))))
    if name in WAITS or masks or moves:
        labels.refuse(f"{name} while a CUDA graph is captured ({labels.describe(operands)})")


class PretendedDevices(TorchFunctionMode):
    """Tensors say where they lie, and what is asked for on cuda is made on the CPU and labelled."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # 1. Questions.
        attribute = getattr(function, "__self__", None)  # of a property's __get__
        if attribute is torch.Tensor.device:
            return CUDA if labels.holds(args[0]) else function(*args)
        if attribute is torch.Tensor.is_cuda:
            return labels.holds(args[0])
        if function is torch.Tensor.get_device:
            return 0 if labels.holds(args[0]) else -1
        if function is torch.device or getattr(function, "__name__", "") == "_parse_to":
            return function(*args, **kwargs)
        if function in (torch.Tensor.numpy, torch.Tensor.__array__) and labels.holds(args[0]):
            labels.refuse(f"the numpy array of a tensor ({labels.describe(args[:1])})")
        # 2. Compute on the CPU; what has no operand lies where it is asked for.
        asked, operands = _asked(function, args, kwargs), tensors_in(args, kwargs)
        before = labels.wanted
        there = any(map(labels.holds, operands)) and function not in (torch.tensor, torch.as_tensor)
        labels.wanted = asked or (CUDA if there else CPU)
        given = set(map(storage_of, operands))
        try:
            result = on_cpu(function)(*args, **kwargs)
        finally:
            labels.wanted = before
        # 3. Label it, or a copy of what lies on the other device.
        if asked is None or not isinstance(result, torch.Tensor) or not storage_of(result):
            return result
        if labels.holds(result) != (asked == CUDA):
            if labels.capturing and operands:
                labels.refuse(f"a copy to {asked} while a CUDA graph is captured ({labels.describe([result])})")
            result = result.clone() if storage_of(result) in given else result
            labels.put(result, asked == CUDA)
        return result


def _asked(function: Any, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call asks for, if it asks for one."""
    if function in (torch.Tensor.cuda, torch.Tensor.cpu):
        return CUDA if function is torch.Tensor.cuda else CPU
    if function is torch.Tensor.to and (other := tensors_in(args[1:], kwargs)):  # as another tensor
        return CUDA if labels.holds(other[0]) else CPU
    if function in (torch.Tensor.new_tensor, torch.Tensor.__deepcopy__) and "device" not in kwargs:
        return CUDA if labels.holds(args[0]) else CPU
    for value in [*args[:4], *kwargs.values()]:
        name = str(value) if isinstance(value, (str, torch.device)) else ""
        if name.partition(":")[0] in ("cuda", "cpu"):
            return CUDA if name.startswith("cuda") else CPU
    return None


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with "cpu" in place of any name of a CUDA device among its arguments."""

    def name(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return CPU
        return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value

    def called(*args: Any, **kwargs: Any) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*map(name, args), **{key: name(value) for key, value in kwargs.items()})

    return called


@contextmanager
def pretended_devices() -> Iterator[Labels]:
    """Within this context there is a GPU. What was refused is in `refused`, also if the code has caught it."""
    labels.__init__()  # type: ignore[misc]
    mode, engine = PretendedDevices(), torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        """Backward passes in Python see the mode too, which is away while one of torch's own functions runs."""
        before, labels.wanted = labels.wanted, CUDA if any(map(labels.holds, tensors_in(roots))) else CPU
        try:
            with mode:
                return engine(roots, *args, **kwargs)
        finally:
            labels.wanted = before

    torch.autograd._engine_run_backward = backward  # type: ignore[attr-defined]
    try:
        with Checked(), mode:
            yield labels
    finally:
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]
