"""A model under the host's dynamic VRAM: max asks for a static copy, the other tiers never do.

The patchers here are stand-ins with the few members that the decision reads; the host's modules
that it asks are stubs.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from speed_tier.speed import TierRequest, resolve_tier
from speed_tier.speed.hosts.comfy import KEY, tier_clone

GIB = 2**30


class Hook:
    """Names of the host's hook kinds; the decision does not depend on what they stand for."""

    OUTER_SAMPLE, SAMPLER_SAMPLE, APPLY_MODEL = "outer_sample", "sampler_sample", "apply_model"
    ON_PRE_RUN, ON_DETACH = "on_pre_run", "on_detach"


class Patcher:
    """A ModelPatcher as far as a tier is concerned. Static clones get a second module."""

    load_device = torch.device("cpu")
    offload_device = torch.device("cpu")

    def __init__(self, model, dynamic, size=GIB, rebuild=None):
        self.model, self.dynamic, self.size = model, dynamic, size
        self.cached_patcher_init = rebuild
        self.clones = []
        self.wrappers, self.callbacks = defaultdict(dict), defaultdict(dict)

    def is_dynamic(self):
        return self.dynamic

    def model_size(self):
        return self.size

    def get_clone_model_override(self):
        return (self.model, "backup", "pins")

    def clone(self, disable_dynamic=False, model_override=None):
        self.clones.append((disable_dynamic, model_override))
        model = self.model
        if model_override is not None:
            model = model_override[0]
        elif disable_dynamic:
            if self.cached_patcher_init is None:
                raise RuntimeError("cannot create non-dynamic delegate")  # as the host does
            model = self.cached_patcher_init()
        twin = Patcher(
            model, self.dynamic and not disable_dynamic, self.size, self.cached_patcher_init
        )
        for mine, theirs in ((self.wrappers, twin.wrappers), (self.callbacks, twin.callbacks)):
            theirs.update({kind: dict(keyed) for kind, keyed in mine.items()})
        return twin

    def add_wrapper_with_key(self, kind, key, function):
        self.wrappers[kind][key] = function

    def add_callback_with_key(self, kind, key, function):
        self.callbacks[kind][key] = function

    def remove_wrappers_with_key(self, kind, key):
        self.wrappers[kind].pop(key, None)

    def remove_callbacks_with_key(self, kind, key):
        self.callbacks[kind].pop(key, None)


@pytest.fixture
def memory(monkeypatch):
    """What the stub of comfy.model_management says of this machine."""
    figures = SimpleNamespace(total=8 * GIB, free=8 * GIB, reserve=GIB)
    management = types.ModuleType("comfy.model_management")
    management.get_total_memory = lambda device: figures.total
    management.get_free_memory = lambda device: figures.free
    management.minimum_inference_memory = lambda: figures.reserve
    extension = types.ModuleType("comfy.patcher_extension")
    extension.WrappersMP = extension.CallbacksMP = Hook
    comfy = types.ModuleType("comfy")
    comfy.__path__ = []
    comfy.model_management, comfy.patcher_extension = management, extension
    for module in (comfy, management, extension):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return figures


@pytest.fixture
def rebuilds():
    """Modules that were loaded a second time."""
    return []


@pytest.fixture
def dynamic(rebuilds):
    def rebuild():
        rebuilds.append(torch.nn.Module())
        return rebuilds[-1]

    return Patcher(torch.nn.Module(), dynamic=True, rebuild=rebuild)


class Started(Exception):  # noqa: N818
    """A run has started: as far as these tests go."""


def opener(report):
    raise Started(" ".join(report.notes))


def tiered(patcher, tier):
    return tier_clone(patcher, TierRequest(resolve_tier(tier, is_gguf=False)), opener)


def note(clone):
    """The sentence that the report of every run of `clone` will carry."""
    executor = SimpleNamespace(class_obj=SimpleNamespace(model_patcher=clone))
    outer_sample = clone.wrappers[Hook.OUTER_SAMPLE][KEY]
    with pytest.raises(Started) as started:
        outer_sample(executor, torch.zeros(1), torch.zeros(1), None, torch.zeros(2))
    return str(started.value)


def test_max_stays_dynamic_where_the_loader_left_no_way_to_load_again(memory):
    patcher = Patcher(torch.nn.Module(), dynamic=True, rebuild=None)
    clone = tiered(patcher, "max")
    assert patcher.clones == [(False, None)], "the host raises on any other clone"
    assert clone.is_dynamic()
    assert clone.model is patcher.model
    assert "max runs as default does" in note(clone)
    assert "its loader left no way to load it again" in note(clone)
    assert "--disable-dynamic-vram" in note(clone)


def test_max_loads_one_static_copy_and_uses_it_again(memory, dynamic, rebuilds):
    first = tiered(dynamic, "max")
    assert dynamic.clones == [(True, None)]
    assert not first.is_dynamic()
    assert first.model is rebuilds[0] is not dynamic.model
    assert "max loaded a static copy of this model: 1.0 GiB in" in note(first)

    second = tiered(dynamic, "max")
    assert dynamic.clones[1:] == [(True, (rebuilds[0], "backup", "pins"))]
    assert len(rebuilds) == 1, "the file was read twice"
    assert not second.is_dynamic()
    assert second.model is first.model
    assert "static copy of this model, loaded earlier" in note(second)


def test_another_clone_of_the_same_model_shares_the_static_copy(memory, dynamic, rebuilds):
    """A LoRA loader before Speed Tier hands over a new clone whenever its strength changes."""
    first = tiered(dynamic, "max")
    with_lora = dynamic.clone()
    second = tiered(with_lora, "max")
    assert second.model is first.model
    assert len(rebuilds) == 1


def test_the_copy_is_kept_by_its_users_alone(memory, dynamic, rebuilds):
    clone = tiered(dynamic, "max")
    copy = weakref.ref(rebuilds.pop())
    assert copy() is clone.model
    del clone
    gc.collect()
    assert copy() is None
    again = tiered(dynamic, "max")
    assert dynamic.clones[-1] == (True, None)
    assert again.model is rebuilds[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"total": 4 * GIB}, "a static copy needs 6.0 GiB on cpu; it has 4.0"),
        ({"free": 2 * GIB}, "a static copy needs 5.0 GiB of cpu memory; 2.0 are free"),
    ],
)
def test_max_stays_dynamic_where_a_copy_does_not_fit(memory, dynamic, rebuilds, change, said):
    dynamic.size = 5 * GIB
    vars(memory).update(change)
    clone = tiered(dynamic, "max")
    assert dynamic.clones == [(False, None)]
    assert clone.is_dynamic()
    assert rebuilds == []
    assert f"max runs as default does: {said}" in note(clone)


@pytest.mark.parametrize("tier", ["off", "default"])
def test_off_and_default_never_demote(memory, dynamic, rebuilds, tier):
    clone = tiered(dynamic, tier)
    assert dynamic.clones == [(False, None)]
    assert clone.is_dynamic()
    assert clone.model is dynamic.model
    assert rebuilds == []
    assert note(clone) == ""


def test_a_static_model_is_cloned_as_it_is(memory):
    patcher = Patcher(torch.nn.Module(), dynamic=False)
    clone = tiered(patcher, "max")
    assert patcher.clones == [(False, None)]
    assert clone.model is patcher.model
    assert note(clone) == ""


def test_a_patcher_of_an_older_host_is_not_dynamic(memory, monkeypatch):
    monkeypatch.delattr(Patcher, "is_dynamic")
    patcher = Patcher(torch.nn.Module(), dynamic=False)
    tiered(patcher, "max")
    assert patcher.clones == [(False, None)]
