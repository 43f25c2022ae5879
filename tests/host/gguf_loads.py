"""Scenarios for packed models: loads and adapters. Each returns facts and judges nothing.

A distance is that of the packed model's latents to the dense model's under the same treatment; what
moved is how far the treatment itself goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .gguf_in_process import LITTLE, Facts, Host, Pair, relative

# ---- loads ----


def full_load(host: Host, pair: Pair) -> Facts:
    quant, dense = pair.quant, pair.dense
    got = host.sample(quant)
    layers = pair.packed.values()
    as_dense = sum(4 * layer.in_features * layer.out_features for layer in layers)
    return {
        "equal": host.torch.equal(got, pair.plain),
        "packed": len(layers),
        "types": sorted({layer.qtype for layer in layers}),
        "all_uint8": all(layer.weight.dtype is host.torch.uint8 for layer in layers),
        "offloaded": pair.offloaded(),
        "model_size": quant.model_size(),
        "expected_size": dense.model_size() - as_dense + sum(x.weight.nbytes for x in layers),
        "loaded_size": quant.loaded_size(),
        "dense_size": dense.model_size(),
    }


def partial_load(host: Host, pair: Pair) -> Facts:
    quant = pair.quant.clone()
    host.load(quant, 0.5)
    facts = {
        "offloaded": pair.offloaded(),
        "lowvram": quant.model.model_lowvram,
        "loaded_share": quant.loaded_size() / quant.model_size(),
        "equal": host.torch.equal(host.sample_as_loaded(quant), pair.plain),
    }
    host.load(quant)
    facts["offloaded_after"] = pair.offloaded()
    facts["equal_after"] = host.torch.equal(host.sample_as_loaded(quant), pair.plain)
    quant.detach()
    return facts


def partial_unload(host: Host, pair: Pair) -> Facts:
    adapter = host.lora(pair)
    expected = host.sample(host.add(pair.dense, adapter))
    quant = host.add(pair.quant, adapter)
    host.load(quant)
    loaded = quant.loaded_size()
    freed = quant.partially_unload(host.offload, loaded // 3)
    facts = {
        "wanted": loaded // 3,
        "freed": freed,
        "accounted": loaded - quant.loaded_size(),
        "offloaded": pair.offloaded(),
        "host_functions": pair.host_functions(),
        "distance": relative(host.sample_as_loaded(quant), expected),
    }
    # What the host does next: it loads what is missing.
    facts["distance_after"] = relative(host.sample(quant), expected)
    facts["offloaded_after"] = pair.offloaded()
    facts["equal_without"] = host.torch.equal(host.sample(pair.quant), pair.plain)
    return facts


def lora_while_offloaded(host: Host, pair: Pair) -> Facts:
    """LoRAs change, and go, on a model of which little is loaded."""
    adapter = {**host.lora(pair, target="all"), **host.plain_lora(pair)}
    facts: Facts = {"distances": [], "moved": [], "offloaded": [], "host_functions": []}
    clones = []  # a model in a graph stays
    for strength in (1.0, 0.5, -0.7):
        expected = host.sample(host.add(pair.dense, adapter, strength))
        quant = host.add(pair.quant, adapter, strength)
        clones.append(quant)
        host.load(quant, LITTLE)
        got = host.sample_as_loaded(quant)
        facts["distances"].append(relative(got, expected))
        facts["moved"].append(relative(expected, pair.plain))
        facts["offloaded"].append(pair.offloaded(adapted=True))
        facts["host_functions"].append(pair.host_functions())
    host.load(pair.quant, LITTLE)
    facts["equal_without"] = host.torch.equal(host.sample_as_loaded(pair.quant), pair.plain)
    pair.quant.detach()
    return facts


def cast_path(host: Host, pair: Pair) -> Facts:
    """The host's casting of an offloaded layer, which a CPU never needs by itself."""
    import torch.nn.functional as functional

    torch = host.torch
    key, layer = next(item for item in pair.packed.items() if item[1].bias is not None)
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    adapter = host.lora(pair, target="all")
    quant = host.add(pair.quant, adapter)
    host.load(quant)
    direct = layer(x)
    cast = layer.forward_comfy_cast_weights(x)
    half = layer.forward_comfy_cast_weights(x.bfloat16())
    dense_weight = layer.dense_weight(torch.float32)
    layer.bias_function = [lambda bias: bias * 3]
    tripled = layer(x)
    layer.bias_function = []
    layer.weight_function = [lambda weight: weight * 2]
    doubled = layer(x)
    layer.weight_function = []
    adapted = layer.adapters.merge_into(dense_weight.clone()) if layer.adapters else dense_weight
    return {
        "key": key,
        "equal": torch.equal(direct, cast),
        "half": relative(half.float(), direct),
        "half_dtype": str(half.dtype),
        "bias": relative(tripled, functional.linear(x, adapted, layer.bias * 3)),
        "weight": relative(doubled, functional.linear(x, adapted * 2, layer.bias)),
    }


# ---- adapters ----


def adapter_kinds(host: Host, pair: Pair) -> Facts:
    """Each kind on packed and plain weights together, loaded in full and in little."""
    facts: Facts = {}
    for kind in ("lora", "lokr", "loha", "dora", "diff"):
        adapter = {**host.lora(pair, kind, "all"), **host.plain_lora(pair)}
        expected = host.sample(host.add(pair.dense, adapter, 0.8))
        quant = host.add(pair.quant, adapter, 0.8)
        got = host.sample(quant)
        at_run_time = sum(bool(x.adapters and x.adapters.terms) for x in pair.packed.values())
        rewritten = sum(bool(x.adapters and x.adapters.rewrite) for x in pair.packed.values())
        host.unload()
        host.load(quant, LITTLE)
        little = host.sample_as_loaded(quant)
        facts[kind] = {
            "distance": relative(got, expected),
            "little_loaded": relative(little, expected),
            "offloaded": pair.offloaded(adapted=True),
            "moved": relative(expected, pair.plain),
            "at_run_time": at_run_time,
            "rewritten": rewritten,
        }
        quant.detach()
    facts["equal_without"] = host.torch.equal(host.sample(pair.quant), pair.plain)
    return facts


def lora_order(host: Host, pair: Pair) -> Facts:
    """Two adapters whose order matters: one replaces the weight, the other adds to it."""
    adapters = host.lora(pair, "set"), host.lora(pair, "lora", rank=8)
    pictures = []
    facts: Facts = {"distances": []}
    for order in (adapters, adapters[::-1]):
        dense, quant = pair.both
        for adapter in order:
            dense, quant = host.add(dense, adapter), host.add(quant, adapter)
        pictures.append(host.sample(dense))
        facts["distances"].append(relative(host.sample(quant), pictures[-1]))
    facts["apart"] = relative(*pictures)
    return facts


def strength_zero(host: Host, pair: Pair) -> Facts:
    facts = {}
    for kind in ("lora", "lokr", "diff"):
        adapter = host.lora(pair, kind, "all")
        facts[kind] = host.torch.equal(host.sample(host.add(pair.quant, adapter, 0.0)), pair.plain)
    return facts


@contextlib.contextmanager
def _counted_loads(patcher_class: Any) -> Iterator[list[bool]]:
    """Each walk of the host's over all of a model's weights, which a card would see moved."""
    original, calls = patcher_class.load, []

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return original(self, *args, **kwargs)

    patcher_class.load = load
    try:
        yield calls
    finally:
        patcher_class.load = original


def alternating_clones(host: Host, pair: Pair) -> Facts:
    """Two clones of one model in turns, each with adapters of its own, and the bare one between."""
    from comfy.patcher_extension import CallbacksMP

    loads: list[str] = []
    clones, expected = {}, {"bare": pair.plain}
    clones["bare"] = pair.quant.clone()
    for name, kind, target in (("a", "lora", "attention"), ("b", "lokr", "mlp")):
        adapter = {**host.lora(pair, kind, target, seed=ord(name)), **host.plain_lora(pair)}
        expected[name] = host.sample(host.add(pair.dense, adapter))
        clones[name] = host.add(pair.quant, adapter)
    for name, clone in clones.items():
        clone.add_callback(CallbacksMP.ON_LOAD, lambda *_, name=name: loads.append(name))
    host.sample(clones["bare"])
    before, memory = pair.addresses(), pair.quant.loaded_size()
    loads.clear()
    turns = ["a", "b", "a", "bare", "b", "b", "bare"]
    with _counted_loads(type(pair.quant)) as host_loads:
        distances = [relative(host.sample(clones[name]), expected[name]) for name in turns]
    return {
        "turns": turns,
        "loads": loads,
        "host_loads": len(host_loads),
        "distances": distances,
        "bare_equal": distances[3] == distances[6] == 0.0,
        "apart": relative(expected["a"], expected["b"]),
        "moved_weights": sum(a != b for a, b in zip(before, pair.addresses(), strict=True)),
        "memory_changed": pair.quant.loaded_size() - memory,
    }


def adapter_memory(host: Host, pair: Pair) -> Facts:
    """Factors lie on the card beside the weights, and the host is told."""
    shape = [1, 16, 8, 8]
    adapter = host.lora(pair, target="all", rank=32)
    quant = host.add(pair.quant, adapter)
    host.sample(pair.quant)
    bare = pair.quant.memory_required(shape)
    host.sample(quant)
    # A time embedder is plain: the host merges into it.
    on_packed = [t for k, t in adapter.items() if ".lora_" in k and "t_embedder" not in k]
    factors = sum(2 * tensor.numel() for tensor in on_packed)
    facts = {"extra": quant.memory_required(shape) - bare, "factors": factors}
    host.sample(pair.quant)
    facts["extra_without"] = pair.quant.memory_required(shape) - bare
    facts["model_size_changed"] = quant.model_size() - pair.quant.model_size()
    return facts


PARTS = {
    "loads": (full_load, partial_load, partial_unload, lora_while_offloaded, cast_path),
    "adapters": (adapter_kinds, lora_order, strength_zero, alternating_clones, adapter_memory),
}
