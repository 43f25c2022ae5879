"""One call captured in a CUDA graph: what may be captured, the capture, the replay.

Two allocators, two kinds of failure. Under torch's own a failing capture is an exception. Under
`cudaMallocAsync`, which the host starts with on most NVIDIA systems, it ends the process: memory
that was allocated in the capture belongs to the graph, and a destructor throws. So nothing may
fail inside a capture:

    `rehearse` runs the call once with every torch operation looked at (strict under that
    allocator), with synchronisation an error, and with launches by Triton's JIT found out;
    the caller keeps a note on disk of what is being captured (`crash_canary`), for the next process
    to read if this one ended, and holds the host's interrupt off.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import SpeedTierError
from .flags import FLAGS, SYNC_IS_AN_ERROR

log = logging.getLogger("speed_tier.cuda_graph")

# Under cudaMallocAsync only what these namespaces hold is known to launch without looking a
# pointer up: torch's own kernels, and ours, which are launched by raw pointer.
_CAPTURABLE: Final = ("aten", "prim", "prims", "speed_tier")
_READS_DATA: Final = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
# Tagged as random for their dropout, which inference does not use.
_ATTENTION: Final = "scaled_dot_product"
_CONSTANTS: Final = (type(None), bool, int, float, str)


class NotCapturableError(SpeedTierError):
    """A call cannot be captured or replayed: the reason."""


def flatten(value: Any, where: str, tensors: list[Tensor]) -> Hashable:
    """Everything about an argument that a graph is made for, its tensors' contents left out.

    Args:
        value: tensor, constant, or a list or tuple of such.
        where: its name, for the error.
        tensors: gets its tensors, in order.

    Raises:
        NotCapturableError: it holds something else.
    """
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter:
        tensors.append(value)
        shape, strides = value.shape, value.stride()
        if any(step == 0 and size > 1 for size, step in zip(shape, strides, strict=True)):
            raise NotCapturableError(f"{where} is an expanded view")  # cannot be copied into
        return (shape, value.dtype, strides, value.device)
    if kind in _CONSTANTS:
        return (kind, value)
    if kind is list or kind is tuple:
        return (kind, *(flatten(part, where, tensors) for part in value))
    raise NotCapturableError(f"{where} is a {kind.__name__}")


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """`value` with each of its tensors, in `flatten`'s order, replaced by the next of `tensors`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if type(value) in (list, tuple):
        return type(value)(with_tensors(part, tensors) for part in value)
    return value


@dataclass
class Rehearsal:
    """What one looked-at call gave.

    Attributes:
        output: of the call.
        problem: why it cannot be captured, or "".
        external: tensors it read that are neither its arguments nor a weight; a graph holds on to
            them.
    """

    output: Any
    problem: str = ""
    external: list[Tensor] = field(default_factory=list)


class _Watch(TorchDispatchMode):
    """Looks at every operation of one call."""

    def __init__(self, device: torch.device, strict: bool, known: set[int]) -> None:
        super().__init__()
        self.problem = ""
        self.external: dict[int, Tensor] = {}
        self._device = device
        self._strict = strict
        self._known = known  # storages of arguments, weights, and of what was computed
        self._judged: dict[Any, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.problem and not _is_idle_dropout(func, args):
            if func not in self._judged:
                self._judged[func] = self._judge(func)
            self.problem = self._judged[func]
        for tensor in _tensors((*args, *kwargs.values())):
            self._read(func, tensor)
        output = func(*args, **kwargs)
        for tensor in _tensors(output if isinstance(output, (list, tuple)) else (output,)):
            self._on_device(func, tensor)
            self._known.add(tensor.untyped_storage().data_ptr())
        return output

    def _judge(self, func: Any) -> str:
        name = str(func)
        if _ATTENTION not in name and any(tag in func.tags for tag in _READS_DATA):
            return f"{name} needs the values of its input, or random numbers"
        if self._strict and func.namespace not in _CAPTURABLE:
            return f"{name} is not known to capture under cudaMallocAsync"
        return ""

    def _read(self, func: Any, tensor: Tensor) -> None:
        self._on_device(func, tensor)
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._known:
            self.external[storage] = tensor

    def _on_device(self, func: Any, tensor: Tensor) -> None:
        if tensor.device == self._device or self.problem:
            return
        # A number in a CPU tensor is a constant of the kernel that takes it; a copy of it is not.
        if tensor.ndim or "copy" in str(func):
            self.problem = f"{func} works on {tensor.device}"


def _is_idle_dropout(func: Any, args: Any) -> bool:
    return func is torch.ops.aten.dropout.default and len(args) == 3 and not args[2]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _kernel_name(metadata: Any) -> str:
    described = metadata.get() if metadata is not None else {}
    return str(described.get("name", "a Triton kernel"))


@contextlib.contextmanager
def _jit_launches(found: list[str]) -> Iterator[None]:
    """Names Triton kernels that are launched by Triton's own call meanwhile, by anybody."""
    triton = sys.modules.get("triton")
    if triton is None:
        yield
        return

    def hook(metadata: Any) -> None:
        found.append(_kernel_name(metadata))

    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    chain: Any = getattr(runtime, "launch_enter_hook", None)
    if hasattr(chain, "add"):  # Triton 3.5 and newer
        chain.add(hook)
        try:
            yield
        finally:
            chain.remove(hook)
        return
    from triton.compiler import CompiledKernel

    owner: Any = CompiledKernel if runtime is None else runtime
    before = getattr(owner, "launch_enter_hook", None)
    owner.launch_enter_hook = hook
    try:
        yield
    finally:
        owner.launch_enter_hook = before


@contextlib.contextmanager
def _flag(name: str, value: Any) -> Iterator[None]:
    token = FLAGS.acquire({name: value})
    try:
        yield
    finally:
        FLAGS.release(token)


def _no_synchronisation() -> contextlib.AbstractContextManager[None]:
    return _flag("cuda.sync_debug_mode", SYNC_IS_AN_ERROR)


def _no_collection() -> contextlib.AbstractContextManager[None]:
    """Memory that is freed inside a capture would be the graph's trouble."""
    return _flag("gc.enabled", False)


class Captured:
    """A captured call: static inputs, the graph, a static output."""

    def __init__(self, graph: Any, inputs: list[Tensor], output: Any, keep: list[Any]) -> None:
        self._graph = graph
        self._inputs = inputs
        self._leaves, self._form = pytree.tree_flatten(output)
        self._keep = keep
        self.pool_bytes = 0

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """The call's output for `tensors`, copied out of the static buffer."""
        with torch.inference_mode():  # the only mode in which an inference tensor can be written
            for static, tensor in zip(self._inputs, tensors, strict=True):
                if static is not tensor:
                    static.copy_(tensor)
        self._graph.replay()
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in self._leaves]
        return pytree.tree_unflatten(leaves, self._form)

    def release(self) -> None:
        self._graph.reset()
        self._inputs, self._leaves, self._keep = [], [], []


def _copy_into(outputs: list[Any], found: list[Any]) -> None:
    # A function of its own, so that no name holds the captured output when the capture ends.
    for static, value in zip(outputs, found, strict=True):
        if isinstance(static, Tensor):
            static.copy_(value)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


@dataclass(frozen=True)
class Timed:
    """One call measured by itself.

    Attributes:
        output: of the call.
        ms: from an idle device to its end.
        issue_ms: of Python issuing it.
        peak_bytes: device memory it took beyond what was allocated.
    """

    output: Any
    ms: float
    issue_ms: float
    peak_bytes: int = 0


class _Pool:
    """Memory that the graphs of a device share: they run one after another, and nothing but their
    static outputs is alive between them. A new one once the last graph is gone."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class CudaRecorder:
    """Captures on one side stream a device, out of one pool."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pools: weakref.WeakValueDictionary[torch.device, _Pool] = (
            weakref.WeakValueDictionary()
        )

    def refusal(self, device: torch.device) -> str:
        """Why nothing can be captured on `device`, or ""."""
        if device.type != "cuda" or torch.version.hip is not None:
            found = "a ROCm device" if device.type == "cuda" else device.type
            return f"CUDA graphs need an NVIDIA card; found {found}"
        return ""

    def is_strict(self) -> bool:
        """Whether a failing capture would end the process."""
        return bool(torch.cuda.get_allocator_backend() == "cudaMallocAsync")

    def timed(self, call: Callable[[], Any], device: torch.device) -> Timed:
        torch.cuda.synchronize(device)
        allocated = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(device))
        started = time.perf_counter()
        output = call()
        issue_ms = 1000 * (time.perf_counter() - started)
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        peak = torch.cuda.max_memory_allocated(device) - allocated
        return Timed(output, start.elapsed_time(end), issue_ms, peak)

    def peak_bytes(self, device: torch.device) -> int:
        return int(torch.cuda.max_memory_allocated(device))

    def rehearse(
        self, call: Callable[[], Any], device: torch.device, known: Iterable[Tensor], compiled: bool
    ) -> Rehearsal:
        """Run a call as it will be captured, with everything looked at.

        Args:
            known: its arguments and the model's weights.
            compiled: it runs compiled code, whose operations cannot be looked at.
        """
        strict = self.is_strict()
        storages = {tensor.untyped_storage().data_ptr() for tensor in known}
        watch = _Watch(device, strict, storages)
        launches: list[str] = []
        looked_at: Any = contextlib.nullcontext() if compiled else watch
        try:
            with (
                self._side_stream(device),
                _no_synchronisation(),
                _jit_launches(launches),
                looked_at,
            ):
                output = call()
        except RuntimeError as error:
            if "synchroniz" not in str(error).lower():
                raise
            return Rehearsal(None, "it waits for the device (a value is read or copied)")
        problem = watch.problem
        if not problem and strict and launches:
            problem = (
                f"{launches[0]} is launched by Triton, which cannot be captured under "
                "cudaMallocAsync"
            )
        leaves = pytree.tree_leaves(output)
        if not problem and not all(isinstance(x, (*_CONSTANTS, Tensor)) for x in leaves):
            problem = f"the model returns a {type(output).__name__}"
        return Rehearsal(output, problem, list(watch.external.values()))

    def static_copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Where a graph will read its inputs.

        The same kind of tensor as given: compiled code is another for an inference tensor.
        """
        copies = []
        for tensor in tensors:
            with torch.inference_mode(tensor.is_inference()):
                copies.append(_empty_like(tensor))
            with torch.inference_mode():
                copies[-1].copy_(tensor)
        return copies

    def capture(
        self,
        call: Callable[[Sequence[Tensor]], Any],
        inputs: list[Tensor],
        device: torch.device,
        keep: Sequence[Any],
        like: Any,
    ) -> tuple[Captured, Any]:
        """Capture `call(inputs)`, and replay it once for its output.

        Rehearsed before; nothing in it may raise.

        Args:
            inputs: static copies, from now on the graph's.
            keep: what has to live as long as the graph.
            like: an output of the call.
        """
        free_before = torch.cuda.mem_get_info(device)[0]
        leaves, form = pytree.tree_flatten(like)
        # Not the graph's memory: that may not outlive it.
        outputs = [_empty_like(x) if isinstance(x, Tensor) else x for x in leaves]
        graph = torch.cuda.CUDAGraph()
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = _Pool()
        try:
            with torch.cuda.device(device), self._side_stream(device), _no_collection():
                torch.cuda.synchronize(device)
                # Another thread may allocate meanwhile: "global" would fail on that.
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                try:
                    _copy_into(outputs, pytree.tree_leaves(call(inputs)))
                finally:
                    graph.capture_end()
        except RuntimeError:
            self._end_capture(device)
            raise
        captured = Captured(graph, inputs, pytree.tree_unflatten(outputs, form), [*keep, pool])
        # Under cudaMallocAsync the graph takes its memory only now.
        output = captured.replay(inputs)
        torch.cuda.synchronize(device)
        captured.pool_bytes = max(0, free_before - torch.cuda.mem_get_info(device)[0])
        return captured, output

    def _end_capture(self, device: torch.device) -> None:
        """After a failed capture torch's random numbers still think that there is one: an empty
        one that goes well ends it."""
        empty = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), self._side_stream(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "the graph is empty"
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()

    @contextlib.contextmanager
    def _side_stream(self, device: torch.device) -> Iterator[None]:
        """The capture stream, in order with the current one. cuBLAS keeps a workspace a stream:
        the rehearsal makes it here, so that the capture finds it."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)

    def trim(self, device: torch.device) -> None:
        """Give back what dropped graphs held. Graphs keep a pool of their own in the driver."""
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if not self.is_strict():
            return
        try:
            driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
            failed = driver.cuDeviceGraphMemTrim(ctypes.c_int(device.index or 0))
        except (OSError, AttributeError) as error:
            log.info("graph memory could not be trimmed: %s", error)
            return
        if failed:
            log.info("graph memory could not be trimmed: CUDA error %s", failed)
