"""Process-wide flags: every row of the table, the counted lease, the exact way back."""

import gc
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from speed_tier.speed import flags
from speed_tier.speed.flags import (
    FLAG_TABLE,
    FLAGS,
    TF32,
    UNREADABLE,
    Flag,
    FlagLease,
    Precision,
    describe,
    read_flag,
    safe_inductor_cache,
    snapshot,
)
from speed_tier.tests.speed.process import full_state

REPO = Path(__file__).resolve().parents[2]
BY_NAME = {flag.name: flag for flag in FLAG_TABLE}
OTHER_VALUES = {
    "cuda.sync_debug_mode": 2,
    "matmul.tf32": TF32,
    "cudnn.tf32": Precision(False),
    "float32_matmul_precision": "high",
    "env.TORCHINDUCTOR_CACHE_DIR": "/tmp/another",
    "env.TRITON_CACHE_DIR": "/tmp/another/triton",
}


class Box:
    """Settings of a made-up library, with a log of what was written."""

    def __init__(self, **values):
        self.values = values
        self.writes = []

    def flag(self, name, fails_on=None, changes_first=False, readable=True):
        def read():
            if not readable:
                raise AttributeError(name)
            return self.values[name]

        def write(value):
            if value == fails_on and not changes_first:
                raise RuntimeError(f"{name} refuses {value}")
            self.writes.append((name, value))
            self.values[name] = value
            if value == fails_on:
                raise RuntimeError(f"{name} broke half-way")

        return Flag(name, read, write)

    def lease(self, *flags):
        return FlagLease(flags or tuple(self.flag(name) for name in self.values))


@pytest.fixture(autouse=True)
def nothing_leaks():
    before = full_state()
    yield
    FLAGS.restore_all()
    assert full_state() == before
    assert FLAGS.held == ()


def other_value(name):
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    return not read_flag(BY_NAME[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_every_row_changes_in_a_lease_and_comes_back(name):
    before, mine = full_state(), read_flag(BY_NAME[name])
    assert mine != UNREADABLE
    token = FLAGS.acquire({name: other_value(name)})
    during = full_state()
    assert read_flag(BY_NAME[name]) != mine
    assert during != before, "the row writes nothing that torch can see"
    FLAGS.release(token)
    assert read_flag(BY_NAME[name]) == mine
    assert full_state() == before


def test_the_whole_table_at_once_comes_back():
    before = full_state()
    token = FLAGS.acquire({name: other_value(name) for name in BY_NAME})
    assert set(FLAGS.held) == set(BY_NAME)
    FLAGS.release(token)
    assert full_state() == before


def test_a_naive_restore_of_tf32_would_not_be_exact():
    """What the order of writes in flags.py is for: the old switch loses the default "none"."""
    before = full_state()
    token = FLAGS.acquire({"matmul.tf32": TF32})
    torch.backends.cuda.matmul.allow_tf32 = before["matmul.allow_tf32"]
    naive = full_state()
    torch.backends.cuda.matmul.allow_tf32 = True
    FLAGS.release(token)
    if before["matmul.fp32_precision"] == "none":
        assert naive["matmul.fp32_precision"] == "ieee"
    assert full_state() == before


# Every way in which another node may have left TF32. Reading an old switch raises after some.
MIXES = [
    "",
    "m.fp32_precision = 'tf32'",
    "m.fp32_precision = 'ieee'",
    "m.allow_tf32 = True; m.fp32_precision = 'ieee'",
    "m.allow_tf32 = True",
    "m.allow_tf32 = True; m.allow_tf32 = False",
    "c.allow_tf32 = False",
    "c.conv.fp32_precision = 'ieee'",
    "c.rnn.fp32_precision = 'ieee'",
    "c.conv.fp32_precision = 'ieee'; c.rnn.fp32_precision = 'ieee'",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.set_float32_matmul_precision('medium'); m.allow_tf32 = False",
    "torch.backends.fp32_precision = 'ieee'",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.fp32_precision = 'ieee'",
]

MIX_SCRIPT = """
import atexit, json, os, sys, types
package = types.ModuleType("speed_tier"); package.__path__ = [sys.argv[1]]
sys.modules["speed_tier"] = package
import torch
values = [torch.backends.cudnn.benchmark]
atexit.register(lambda: print(*values, torch.backends.cudnn.benchmark))  # the last to run
from speed_tier.speed.flags import FLAGS, TF32, describe, snapshot
from speed_tier.tests.speed.process import full_state
m, c = torch.backends.cuda.matmul, torch.backends.cudnn
results = {}
for mix in json.loads(sys.argv[2]):
    reader, writer = os.pipe()
    if os.fork() == 0:
        exec(mix)
        before = full_state()
        described = json.loads(json.dumps(describe(snapshot())))
        outer = FLAGS.acquire({"matmul.tf32": TF32, "cudnn.tf32": TF32})
        during = full_state()
        inner = FLAGS.acquire({"matmul.tf32": TF32})
        suspended = FLAGS.suspend()
        while_suspended = full_state()
        FLAGS.release(suspended)
        resumed = full_state()
        FLAGS.release(outer)
        FLAGS.release(inner)
        keys = ("matmul.fp32_precision", "cudnn.conv", "cudnn.rnn")
        os.write(writer, json.dumps({
            "during": [during[k] for k in keys],
            "resumed": [resumed[k] for k in keys],
            "suspended": while_suspended == before,
            "after": {k: [v, full_state()[k]] for k, v in before.items() if v != full_state()[k]},
            "described": described,
        }).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        results[mix] = json.loads(stream.read() or "null")
    os.wait()
print(json.dumps(results))
FLAGS.acquire({"cudnn.benchmark": not values[0]})  # and never given back
values.append(torch.backends.cudnn.benchmark)
"""


@pytest.fixture(scope="module")
def mixed_runs():
    command = [sys.executable, "-c", textwrap.dedent(MIX_SCRIPT), str(REPO), json.dumps(MIXES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results, at_exit = done.stdout.splitlines()[-2:]
    return {**json.loads(results), "at exit": at_exit.split()}


@pytest.mark.skipif(os.name != "posix", reason="needs fork; found none")
@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="needs the fp32_precision settings of torch 2.9; found an older torch",
)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix or "untouched")
def test_mixed_tf32_interfaces_survive_and_come_back_exactly(mixed_runs, mix):
    run = mixed_runs[mix]
    assert run is not None, "the lease raised"
    assert run["during"] == ["tf32", "tf32", "tf32"]
    assert run["resumed"] == run["during"]
    assert run["suspended"], "inside suspend() the process is not as it was found"
    assert run["after"] == {}


def test_an_unreadable_part_is_named_in_the_description(mixed_runs):
    described = mixed_runs["m.fp32_precision = 'tf32'"]["described"]
    assert described["matmul.tf32"] == {"allow_tf32": UNREADABLE, "matmul": "tf32"}
    assert described["float32_matmul_precision"] == UNREADABLE


def test_describe_is_plain_data():
    assert json.loads(json.dumps(describe(snapshot()))) == describe(snapshot())


@pytest.mark.parametrize("first", ["outer", "inner"])
def test_overlapping_leases_restore_the_outermost_value(first):
    box = Box(a=0)
    lease = box.lease()
    outer = lease.acquire({"a": 1})
    inner = lease.acquire({"a": 2})
    assert box.values["a"] == 2
    tokens = [outer, inner] if first == "outer" else [inner, outer]
    lease.release(tokens[0])
    assert box.values["a"] == (2 if first == "outer" else 1), "the one still there decides"
    lease.release(tokens[1])
    assert box.values["a"] == 0
    assert lease.held == ()


def test_two_tf32_holders_in_the_other_order():
    """Naive snapshots leave TF32 on after both are gone, or off while one still wants it."""
    first = FLAGS.acquire({"matmul.tf32": TF32})
    second = FLAGS.acquire({"matmul.tf32": TF32})
    FLAGS.release(first)
    assert read_flag(BY_NAME["matmul.tf32"]).is_tf32
    FLAGS.release(second)
    assert not read_flag(BY_NAME["matmul.tf32"]).is_tf32


@pytest.mark.parametrize("changes_first", [False, True], ids=["refused", "broke half-way"])
def test_an_acquire_that_fails_leaves_everything_as_before(changes_first):
    box = Box(a=0, b=0, c=0)
    table = (box.flag("a"), box.flag("b", fails_on=1, changes_first=changes_first), box.flag("c"))
    lease = box.lease(*table)
    with pytest.raises(RuntimeError, match="b"):
        lease.acquire({"a": 1, "b": 1, "c": 1})
    assert box.values == {"a": 0, "b": 0, "c": 0}
    assert ("c", 1) not in box.writes
    assert lease.held == ()


def test_a_failing_acquire_inside_a_lease_keeps_the_lease():
    box = Box(a=0, b=0)
    lease = box.lease(box.flag("a"), box.flag("b", fails_on=2))
    outer = lease.acquire({"a": 1, "b": 1})
    with pytest.raises(RuntimeError, match="refuses 2"):
        lease.acquire({"a": 2, "b": 2})
    assert box.values == {"a": 1, "b": 1}
    lease.release(outer)
    assert box.values == {"a": 0, "b": 0}


def test_a_flag_this_torch_has_not_is_refused_before_anything_changes():
    box = Box(a=0)
    lease = box.lease(box.flag("a"), box.flag("gone", readable=False))
    with pytest.raises(RuntimeError, match="gone cannot be read on this torch"):
        lease.acquire({"a": 1, "gone": 1})
    assert box.values == {"a": 0}
    assert read_flag(box.flag("gone", readable=False)) == UNREADABLE
    with pytest.raises(KeyError):
        lease.acquire({"no such flag": 1})


def test_getters_that_raise_are_unreadable_in_a_snapshot():
    def raises():
        raise RuntimeError("mix of the legacy and new APIs")

    table = (Flag("bad", raises, print), Flag("missing", lambda: torch.nothing_here, print))
    assert snapshot(table) == {"bad": UNREADABLE, "missing": UNREADABLE}


def test_suspend_inside_a_held_lease():
    box = Box(a=0, b=5)
    lease = box.lease()
    token = lease.acquire({"a": 1})
    pause = lease.suspend()
    assert box.values == {"a": 0, "b": 5}
    inner = lease.acquire({"a": 2})
    assert box.values["a"] == 2
    lease.release(inner)
    assert box.values["a"] == 0
    lease.release(pause)
    assert box.values["a"] == 1
    lease.release(token)
    assert box.values["a"] == 0


def test_suspend_with_nothing_held_writes_nothing():
    box = Box(a=0)
    lease = box.lease()
    lease.release(lease.suspend())
    assert box.writes == []


def test_a_suspend_that_outlives_its_lease():
    box = Box(a=0)
    lease = box.lease()
    token = lease.acquire({"a": 1})
    pause = lease.suspend()
    lease.release(token)
    assert box.values["a"] == 0
    lease.release(pause)
    assert box.values["a"] == 0
    assert lease.held == ()


def test_a_foreign_change_during_a_hold_is_theirs(caplog):
    box = Box(a=0)
    lease = box.lease()
    token = lease.acquire({"a": 1})
    box.values["a"] = 7
    with caplog.at_level(logging.WARNING, "speed_tier.flags"):
        lease.release(token)
    assert box.values["a"] == 7
    assert "flag a was changed to 7 by something else" in caplog.text
    assert lease.held == ()


def test_a_foreign_change_becomes_the_value_to_come_back_to():
    box = Box(a=0)
    lease = box.lease()
    outer = lease.acquire({"a": 1})
    box.values["a"] = 7
    inner = lease.acquire({"a": 2})
    lease.release(inner)
    lease.release(outer)
    assert box.values["a"] == 7


def test_a_value_that_is_there_already_is_not_written():
    box = Box(a=1)
    lease = box.lease()
    lease.release(lease.acquire({"a": 1}))
    assert box.writes == []


def test_release_twice_and_of_an_unknown_token():
    box = Box(a=0)
    lease = box.lease()
    token = lease.acquire({"a": 1})
    lease.release(token)
    box.values["a"] = 3
    lease.release(token)
    lease.release(10_000)
    assert box.values["a"] == 3


def test_restore_all_lets_every_holder_go():
    box = Box(a=0, b=0)
    lease = box.lease()
    lease.acquire({"a": 1})
    lease.acquire({"a": 2, "b": 1})
    lease.restore_all()
    assert box.values == {"a": 0, "b": 0}
    assert lease.held == ()


def test_a_restore_that_fails_is_logged_and_the_others_go_on(caplog):
    box = Box(a=0, b=0)
    lease = box.lease(box.flag("a", fails_on=0), box.flag("b"))
    token = lease.acquire({"a": 1, "b": 1})
    lease.release(token)
    assert box.values["b"] == 0
    assert "flag a could not be restored to 0" in caplog.text


def test_many_threads_leave_the_value_they_found():
    box = Box(a=0)
    lease = box.lease()
    start = threading.Barrier(8)
    wrong = []

    def work(number):
        start.wait()
        for _ in range(200):
            token = lease.acquire({"a": number})
            if box.values["a"] == 0:
                wrong.append(number)
            lease.release(token)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, "a value was given back while somebody still held it"
    assert box.values["a"] == 0
    assert lease.held == ()


def test_the_process_gives_everything_back_when_it_ends(mixed_runs):
    assert mixed_runs["at exit"] == ["False", "True", "False"]


def test_flags_go_when_a_tiered_model_is_dropped_in_mid_run():
    from speed_tier.speed import Tier, TieredModel, TierRequest, resolve_tier

    tiered = TieredModel(TierRequest(resolve_tier(Tier.MAX.value, is_gguf=False)))
    before = read_flag(BY_NAME["cudnn.benchmark"])
    run = tiered.begin(tiered.new_report(), torch.device("cpu"))
    run._hold(FLAGS.acquire({"cudnn.benchmark": not before}))
    assert read_flag(BY_NAME["cudnn.benchmark"]) != before
    del run, tiered
    gc.collect()
    assert read_flag(BY_NAME["cudnn.benchmark"]) == before


@pytest.mark.parametrize(
    ("folder", "is_replaced"),
    [("/tmp/plain", False), ("/tmp/with blank", True), ("/tmp/o'brien", True), ("/tmp/äö", False)],
)
def test_a_cache_folder_that_breaks_compile_commands_is_replaced(monkeypatch, folder, is_replaced):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    wanted = safe_inductor_cache()
    assert bool(wanted) is is_replaced
    for value in wanted.values():
        assert not set(value) & set(" '\"")


@pytest.mark.parametrize("temporary", ["/tmp", "/tmp/with blank"])
def test_an_unset_cache_folder_is_held_so_that_it_goes_with_the_run(monkeypatch, temporary):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(flags.tempfile, "tempdir", temporary)
    (value,) = safe_inductor_cache().values()
    assert not set(value) & set(" '\"")
    token = FLAGS.acquire(safe_inductor_cache())
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == value  # Inductor takes it, and does not set another
    FLAGS.release(token)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
