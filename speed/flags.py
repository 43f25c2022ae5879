"""Process-wide torch settings: one table, one counted lease, exact restore.

A run asks for values through `FLAGS.acquire` and gives them back through `FLAGS.release`. The
first holder of a flag fixes what "before" means; whoever lets go last restores exactly that. With
several holders the most recent one that is still there decides. A flag that somebody else changed
in the meantime is theirs: it is left alone and logged.

TF32 needs care (seen on torch 2.9 to 2.14): the old switches and the newer `fp32_precision`
settings share state, and reading the old one raises once the newer one was set alone. Both are
therefore one flag here, read part by part and written back in an order that leaves each part as
it was found.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

log = logging.getLogger("speed_tier.flags")

UNREADABLE: Final = "unreadable"


@dataclass(frozen=True)
class Flag:
    """One process-wide setting.

    Attributes:
        name: Its name in reports.
        read: Current value, a plain comparable value. Raises where this build has no such setting.
        write: Sets a value that `read` gave, or the value an optimization asks for.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


@dataclass(frozen=True)
class Precision:
    """State of one TF32 switch.

    Attributes:
        allow_tf32: The old switch; None where reading it raises because both interfaces were mixed.
        fp32_precision: The newer settings as ((owner, value), ...); empty before torch 2.9.
    """

    allow_tf32: bool | None
    fp32_precision: tuple[tuple[str, str], ...] = ()

    @property
    def is_tf32(self) -> bool:
        if self.fp32_precision:
            return all(value == "tf32" for _, value in self.fp32_precision)
        return bool(self.allow_tf32)


TF32: Final = Precision(allow_tf32=True)


def _read_precision(legacy_owner: Any, owners: Mapping[str, Any]) -> Precision:
    try:
        allow = bool(legacy_owner.allow_tf32)
    except RuntimeError:  # torch: "mix of the legacy and new APIs"
        allow = None
    found = [
        (name, str(owner.fp32_precision))
        for name, owner in owners.items()
        if hasattr(owner, "fp32_precision")
    ]
    return Precision(allow, tuple(found))


def _write_precision(legacy_owner: Any, owners: Mapping[str, Any], value: Precision) -> None:
    # The old switch first: writing it sets every newer setting of its group too, which are then
    # put back one by one. The other order would lose "none" (the default) for "ieee".
    if value.allow_tf32 is not None:
        legacy_owner.allow_tf32 = value.allow_tf32
    for name, setting in value.fp32_precision:
        if str(owners[name].fp32_precision) != setting:
            owners[name].fp32_precision = setting


def _precision_flag(name: str, group: Callable[[], tuple[Any, Mapping[str, Any]]]) -> Flag:
    return Flag(
        name,
        read=lambda: _read_precision(*group()),
        write=lambda value: _write_precision(*group(), value),
    )


def _matmul_group() -> tuple[Any, Mapping[str, Any]]:
    matmul = torch.backends.cuda.matmul
    return matmul, {"matmul": matmul}


def _cudnn_group() -> tuple[Any, Mapping[str, Any]]:
    cudnn = torch.backends.cudnn
    parts = {name: getattr(cudnn, name) for name in ("conv", "rnn") if hasattr(cudnn, name)}
    return cudnn, parts


@dataclass(frozen=True)
class MatmulPrecision:
    """`torch.get_float32_matmul_precision()`, and the newer settings that setting it overwrites."""

    setting: str
    fp32_precision: tuple[tuple[str, str], ...] = ()


def _matmul_precision_owners() -> dict[str, Any]:
    owners = {
        "cuda": torch.backends.cuda.matmul,
        "mkldnn": getattr(torch.backends.mkldnn, "matmul", None),
    }
    return {name: owner for name, owner in owners.items() if hasattr(owner, "fp32_precision")}


def _read_matmul_precision() -> MatmulPrecision:
    found = [(name, str(o.fp32_precision)) for name, o in _matmul_precision_owners().items()]
    return MatmulPrecision(torch.get_float32_matmul_precision(), tuple(found))


def _write_matmul_precision(value: MatmulPrecision | str) -> None:
    if isinstance(value, str):
        torch.set_float32_matmul_precision(value)
        return
    torch.set_float32_matmul_precision(value.setting)
    for name, setting in value.fp32_precision:
        if str(_matmul_precision_owners()[name].fp32_precision) != setting:
            _matmul_precision_owners()[name].fp32_precision = setting


def _attribute_flag(name: str, owner: Callable[[], Any], attribute: str) -> Flag:
    return Flag(
        name,
        read=lambda: getattr(owner(), attribute),
        write=lambda value: setattr(owner(), attribute, value),
    )


_CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"


def _write_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _environment_flag(name: str) -> Flag:
    return Flag(
        f"env.{name}",
        read=lambda: os.environ.get(name),
        write=lambda value: _write_environment(name, value),
    )


def _sdp_flag(name: str) -> Flag:
    cuda = torch.backends.cuda
    return Flag(
        f"sdp.{name}",
        read=lambda: getattr(cuda, f"{name}_sdp_enabled")(),
        write=lambda value: getattr(cuda, f"enable_{name}_sdp")(value),
    )


# Not through torch.cuda, which starts CUDA.
def _read_sync_debug_mode() -> int:
    return int(torch._C._cuda_get_sync_debug_mode())


def _write_sync_debug_mode(value: int) -> None:
    with warnings.catch_warnings():  # "a prototype feature"
        warnings.simplefilter("ignore")
        torch._C._cuda_set_sync_debug_mode(value)


SYNC_IS_AN_ERROR: Final = 2

FLAG_TABLE: Final[tuple[Flag, ...]] = (
    _precision_flag("matmul.tf32", _matmul_group),
    _precision_flag("cudnn.tf32", _cudnn_group),
    Flag("float32_matmul_precision", _read_matmul_precision, _write_matmul_precision),
    _attribute_flag("cudnn.benchmark", lambda: torch.backends.cudnn, "benchmark"),
    _attribute_flag(
        "matmul.fp16_reduced_precision",
        lambda: torch.backends.cuda.matmul,
        "allow_fp16_reduced_precision_reduction",
    ),
    _attribute_flag(
        "matmul.bf16_reduced_precision",
        lambda: torch.backends.cuda.matmul,
        "allow_bf16_reduced_precision_reduction",
    ),
    _attribute_flag(
        "matmul.fp16_accumulation", lambda: torch.backends.cuda.matmul, "allow_fp16_accumulation"
    ),
    _sdp_flag("flash"),
    _sdp_flag("mem_efficient"),
    _sdp_flag("math"),
    _sdp_flag("cudnn"),
    Flag("cuda.sync_debug_mode", _read_sync_debug_mode, _write_sync_debug_mode),
    Flag("gc.enabled", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    _environment_flag(_CACHE_VARIABLE),
    _environment_flag("TRITON_CACHE_DIR"),
)


def safe_inductor_cache() -> dict[str, Any]:
    """A cache folder for Inductor where the usual one breaks its compile commands.

    Inductor leaves paths unquoted: a blank or an apostrophe in the folder makes every build fail
    (torch 2.14.1, CPU). Where none is set, Inductor sets its default at its first compile and
    leaves it set; held as a flag, it goes with the run.
    """
    asked = os.environ.get(_CACHE_VARIABLE)
    folder = asked or default_inductor_cache()
    if not breaks_compile_commands(folder):
        return {} if asked else {"env.TORCHINDUCTOR_CACHE_DIR": folder}
    root = "/tmp" if os.name == "posix" else os.path.join(os.environ.get("SYSTEMDRIVE", "C:"), "\\")
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    return {"env.TORCHINDUCTOR_CACHE_DIR": os.path.join(root, f"speed_tier_inductor_{owner}")}


def breaks_compile_commands(folder: str) -> bool:
    """Whether Inductor's compile commands, unquoted as they are, would take `folder` apart."""
    return any(character in folder for character in " '\"")


def default_inductor_cache() -> str:
    """The folder that Inductor uses where none is named."""
    with cache_variable_kept():
        try:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir
        except ImportError:  # a torch that keeps it elsewhere
            return os.path.join(tempfile.gettempdir(), "torchinductor")
        return str(default_cache_dir())


@contextlib.contextmanager
def cache_variable_kept() -> Iterator[None]:
    """For an import of torch's compiler, which sets the variable where it is not set."""
    before = os.environ.get(_CACHE_VARIABLE)
    try:
        yield
    finally:
        _write_environment(_CACHE_VARIABLE, before)


def read_flag(flag: Flag) -> Any:
    """Value of `flag`, or UNREADABLE where this torch has no such setting or mixed interfaces."""
    try:
        return flag.read()
    except (AttributeError, RuntimeError, AssertionError) as error:
        log.debug("flag %s cannot be read: %s", flag.name, error)
        return UNREADABLE


def snapshot(table: tuple[Flag, ...] = FLAG_TABLE) -> dict[str, Any]:
    """Every flag of `table` by name, read one by one."""
    return {flag.name: read_flag(flag) for flag in table}


def describe(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as JSON-able data."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Precision):
            parts = dict(value.fp32_precision)
            legacy = UNREADABLE if value.allow_tf32 is None else value.allow_tf32
            plain[name] = {"allow_tf32": legacy, **parts}
        elif isinstance(value, MatmulPrecision):
            plain[name] = value.setting
        else:
            plain[name] = value
    return plain


@dataclass
class _Slot:
    """One flag while somebody holds it: what it was, what we wrote last, and who wants what."""

    before: Any
    written: Any
    wanted: dict[int, Any] = field(default_factory=dict)


class FlagLease:
    """The one owner of the process-wide flags."""

    def __init__(self, table: tuple[Flag, ...] = FLAG_TABLE) -> None:
        self._flags = {flag.name: flag for flag in table}
        self._slots: dict[str, _Slot] = {}
        self._tokens = itertools.count(1)
        self._lock = threading.RLock()

    def acquire(self, values: Mapping[str, Any]) -> int:
        """Set `values` until the returned token is released.

        Raises:
            KeyError: A name that is not in the table.
            RuntimeError: torch refused a value; the flags set so far are back as they were.
        """
        token = next(self._tokens)
        with self._lock:
            try:
                for name, value in values.items():
                    self._acquire_one(token, name, value)
            except BaseException:
                self.release(token)
                raise
        return token

    def _acquire_one(self, token: int, name: str, value: Any) -> None:
        flag = self._flags[name]
        slot = self._slots.get(name)
        if slot is None:
            found = read_flag(flag)
            if found == UNREADABLE:
                raise RuntimeError(f"process flag {name} cannot be read on this torch")
            slot = self._slots[name] = _Slot(before=found, written=found)
        elif (found := read_flag(flag)) != slot.written:
            slot.before = slot.written = found  # changed by somebody else: now that is "before"
        slot.wanted[token] = value
        self._write(flag, slot, value)

    def _write(self, flag: Flag, slot: _Slot, value: Any) -> None:
        if not _holds(slot.written, value):
            try:
                flag.write(value)
            finally:  # a write that failed half-way is ours to undo as well
                slot.written = read_flag(flag)

    def suspend(self) -> int:
        """Put every held flag back to its "before" value until the returned token is released.

        An untiered run inside a tiered one must see the process as it was found.
        """
        with self._lock:
            return self.acquire({name: slot.before for name, slot in self._slots.items()})

    def release(self, token: int) -> None:
        """Give back what `token` held; unknown or already released tokens are no error."""
        with self._lock:
            for name in [n for n, slot in self._slots.items() if token in slot.wanted]:
                slot = self._slots[name]
                del slot.wanted[token]
                self._settle(name, slot)

    def _settle(self, name: str, slot: _Slot) -> None:
        flag = self._flags[name]
        found = read_flag(flag)
        if found != slot.written:
            log.warning(
                "flag %s was changed to %s by something else during a run; left as it is",
                name,
                found,
            )
            if not slot.wanted:
                del self._slots[name]
            return
        if slot.wanted:
            self._write(flag, slot, next(reversed(slot.wanted.values())))
            return
        del self._slots[name]
        if found != slot.before:
            try:
                flag.write(slot.before)
            except RuntimeError:
                log.exception("flag %s could not be restored to %s", name, slot.before)

    def restore_all(self) -> None:
        """Backstop: release every holder there is."""
        with self._lock:
            tokens = {token for slot in self._slots.values() for token in slot.wanted}
            for token in tokens:
                self.release(token)

    @property
    def held(self) -> tuple[str, ...]:
        """Names that somebody holds now."""
        with self._lock:
            return tuple(self._slots)


def _holds(found: Any, wanted: Any) -> bool:
    """Whether a flag that reads `found` already is what was asked for."""
    if isinstance(found, Precision) and wanted is TF32:
        return found.is_tf32
    if isinstance(found, MatmulPrecision) and isinstance(wanted, str):
        return found.setting == wanted
    return bool(found == wanted)


FLAGS: Final = FlagLease()
atexit.register(FLAGS.restore_all)
