"""What regional compile needs of torch's compiler: settings, counters, failures.

Dynamo is imported when something is compiled, never before: it loads Inductor and Triton, and
costs every start of the host a second.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules import module as nn_module

from ..env import IMPORT_FAILURES
from ..flags import breaks_compile_commands, cache_variable_kept

log = logging.getLogger("speed_tier.dynamo")

_REASON_LENGTH: Final = 300
# Where attention runs under `sdpa_kernel` (the host's does on NVIDIA, ours too), torch 2.14 puts
# these two calls into the graph and then keeps the graph out of its AOTAutograd cache: every
# restart went through AOTAutograd and Inductor's passes again. What they do is said by their
# arguments, which are in the cache's key, and by the state that goes into the key with the mark.
_SDPA_CHOICE: Final = (
    "torch.nn.attention._backend_from_string",
    "torch.nn.attention._sdpa_kernel",
)
_MARKED: Final = "unsafe_marked_cacheable_functions"
_SDPA: Final = ("flash", "mem_efficient", "math", "cudnn")


_loading: Final[list[threading.Thread]] = []


def load_beside() -> None:
    """Import Inductor in a thread of its own, while the host loads the weights.

    A first step that finds everything in the cache spends much of its time there: the import, and
    two hashes that every cache key holds.
    """
    # Importing Dynamo sets an environment variable for a moment; hosts have it imported already.
    if _loading or "torch._dynamo" not in sys.modules:
        return
    _loading.append(threading.Thread(target=_load_inductor, name="speed_tier_load", daemon=True))
    _loading[0].start()


def _load_inductor() -> None:
    try:
        import torch._inductor.compile_fx  # noqa: F401
        from torch._inductor import codecache

        for name in ("torch_key", "triton_key"):
            getattr(codecache, name, str)()
    except IMPORT_FAILURES:
        log.debug("Inductor does not load", exc_info=True)  # the compile says so itself


def load() -> None:
    """Import Dynamo and leave the environment as it was."""
    for thread in _loading:
        thread.join()
    with cache_variable_kept():
        import torch._dynamo  # noqa: F401


@contextlib.contextmanager
def settings(recompile_limit: int) -> Iterator[None]:
    """Dynamo's and Inductor's settings for the duration of one denoiser call.

    They are context-local in newer torch (a thread or a later prompt does not see what was set
    elsewhere), so they are set where the compiled code is called.
    """
    import torch._dynamo
    import torch.fx.experimental._config

    wanted = {
        "recompile_limit": recompile_limit,
        "accumulated_recompile_limit": max(256, 8 * recompile_limit),
        # Without it the limit turns a kind eager without a word.
        "fail_on_recompile_limit_hit": True,
        # One build of the host switches errors off; then a failed compile would go unseen.
        "suppress_errors": False,
    }
    config = torch._dynamo.config
    known: dict[str, Any] = {name: value for name, value in wanted.items() if hasattr(config, name)}
    shapes = torch.fx.experimental._config
    # Two sizes that happen to be equal (64 text and 64 image tokens) are not the same size.
    duck = {"use_duck_shape": False} if hasattr(shapes, "use_duck_shape") else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(known))
        if duck:
            stack.enter_context(shapes.patch(duck))  # type: ignore[attr-defined]
        stack.enter_context(_inductor_settings())
        yield


def _inductor_settings() -> contextlib.AbstractContextManager[Any]:
    import torch._inductor.config as inductor

    wanted: dict[str, Any] = {}
    # Inductor builds its C++ headers in the temporary folder, wherever its cache is.
    if breaks_compile_commands(tempfile.gettempdir()):
        wanted["cpp_cache_precompile_headers"] = False
    if isinstance(marked := getattr(inductor, _MARKED, None), dict):
        wanted[_MARKED] = {**marked, **dict.fromkeys(_SDPA_CHOICE, _sdpa_state())}
    known: dict[str, Any] = {n: value for n, value in wanted.items() if hasattr(inductor, n)}
    return inductor.patch(known) if known else contextlib.nullcontext()


def _sdpa_state() -> str:
    """What attention is chosen by outside a graph: part of the key of every cached graph."""
    cuda = torch.backends.cuda
    on = [name for name in _SDPA if (read := getattr(cuda, f"{name}_sdp_enabled", None)) and read()]
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    return f"{torch.__version__} {on} {order}"


def graph_count() -> int:
    """How many graphs Dynamo has compiled in this process."""
    return compiled().graphs


class Compiled(NamedTuple):
    """What was compiled in this process: graphs, and how many of them torch's cache had."""

    graphs: int
    hits: int
    misses: int

    def __sub__(self, other: Compiled) -> Compiled:
        return Compiled(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def all_from_cache(self) -> bool:
        return self.hits > 0 and self.misses == 0


def compiled() -> Compiled:
    """By Dynamo's and Inductor's own counters."""
    graphs, inductor = _counters()["stats"]["unique_graphs"], _counters()["inductor"]
    missed = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    return Compiled(int(graphs), int(inductor["fxgraph_cache_hit"]), int(missed))


def constant_floats() -> contextlib.AbstractContextManager[Any]:
    """Numbers that compiled code reads are constants, also where sizes are symbols."""
    import torch._dynamo.config as config

    if not hasattr(config, "specialize_float"):
        return contextlib.nullcontext()
    settings: Any = config
    patched: contextlib.AbstractContextManager[Any] = settings.patch(specialize_float=True)
    return patched


def graph_breaks() -> dict[str, int]:
    """Graph breaks by reason, as Dynamo counts them."""
    return dict(_counters()["graph_break"])


def _counters() -> Any:
    from torch._dynamo.utils import counters

    return counters


def new_graph_breaks(before: dict[str, int]) -> dict[str, int]:
    """Breaks that were counted since `before`, by the first line of their reason."""
    new: Counter[str] = Counter()
    for reason, count in graph_breaks().items():
        if (added := count - before.get(reason, 0)) > 0:
            new[_first_line(reason)] += added
    return dict(new)


def has_global_hooks() -> bool:
    """Whether somebody registered forward hooks on all modules of the process."""
    return bool(nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks)


@functools.cache
def compile_failures() -> tuple[type[BaseException], ...]:
    """Exceptions that say "this could not be compiled", never "the block itself failed"."""
    import torch._dynamo.exc as dynamo_errors
    import torch._inductor.exc as inductor_errors

    names: list[tuple[Any, str]] = [
        (dynamo_errors, "TorchDynamoException"),
        (dynamo_errors, "FailOnRecompileLimitHit"),
        (inductor_errors, "InductorError"),
        (inductor_errors, "CppCompileError"),
        (inductor_errors, "CUDACompileError"),
        (inductor_errors, "MissingOperatorWithoutDecomp"),
    ]
    found = [getattr(owner, name) for owner, name in names if hasattr(owner, name)]
    return (*found, *_triton_failures())


def _triton_failures() -> tuple[type[BaseException], ...]:
    try:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources
    except (ImportError, AttributeError, OSError, RuntimeError):
        return ()
    return (CompilationError, OutOfResources)


def is_recompile_limit(error: BaseException) -> bool:
    return type(error).__name__ == "FailOnRecompileLimitHit"


def plain_reason(error: BaseException) -> str:
    """One line of `error` for the report, the innermost cause first."""
    inner = getattr(error, "inner_exception", None) or error
    if is_recompile_limit(error):
        return f"recompile limit hit ({_first_line(str(error))})"
    return f"compile failed: {type(inner).__name__}: {_telling_line(str(inner))}"


def _telling_line(text: str) -> str:
    """The compiler's own first complaint where there is one, else the first line."""
    complaint = re.search(r"^.*\b(?:fatal )?error: .*$", text, re.MULTILINE)
    return _first_line(complaint.group(0) if complaint else text)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:_REASON_LENGTH]
