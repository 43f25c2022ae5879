"""Scenarios for packed models in the host: each returns facts and judges nothing.

A distance is that of the packed model's latents to the dense model's under the same treatment; what
moved is how far the treatment itself goes.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from .gguf_in_process import Facts, Host, Pair, relative


def _addresses(pair: Pair) -> list[int]:
    return [layer.weight.data_ptr() for layer in pair.packed.values()]


def _offloaded(pair: Pair) -> int:
    """Packed layers that the host counts as not on the card."""
    layers = pair.packed.values()
    return sum(getattr(layer, "comfy_patched_weights", False) is not True for layer in layers)


def _weight_functions(pair: Pair) -> int:
    return sum(len(layer.weight_function) for layer in pair.packed.values())


def _compared(host: Host, pair: Pair, dense: Any, quant: Any, **options: Any) -> Facts:
    expected, got = host.sample(dense, **options), host.sample(quant, **options)
    return {"distance": relative(got, expected), "moved": relative(expected, pair.plain)}


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
        "offloaded": _offloaded(pair),
        "model_size": quant.model_size(),
        "expected_size": dense.model_size() - as_dense + sum(x.weight.nbytes for x in layers),
        "loaded_size": quant.loaded_size(),
        "dense_size": dense.model_size(),
    }


def partial_load(host: Host, pair: Pair) -> Facts:
    quant = pair.quant.clone()
    host.load(quant, 0.5)
    facts = {
        "offloaded": _offloaded(pair),
        "lowvram": quant.model.model_lowvram,
        "loaded_share": quant.loaded_size() / quant.model_size(),
        "equal": host.torch.equal(host.sample_as_loaded(quant), pair.plain),
    }
    host.load(quant)
    facts["offloaded_after"] = _offloaded(pair)
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
        "offloaded": _offloaded(pair),
        "host_functions": _weight_functions(pair),
        "distance": relative(host.sample_as_loaded(quant), expected),
    }
    # What the host does next: it loads what is missing.
    facts["distance_after"] = relative(host.sample(quant), expected)
    facts["offloaded_after"] = _offloaded(pair)
    facts["equal_without"] = host.torch.equal(host.sample(pair.quant), pair.plain)
    return facts


def lora_while_offloaded(host: Host, pair: Pair) -> Facts:
    """LoRAs change, and go, on a model that stays half loaded."""
    adapter = {**host.lora(pair, target="all"), **host.plain_lora(pair)}
    facts: Facts = {"distances": [], "moved": [], "offloaded": [], "host_functions": []}
    clones = []  # a model in a graph stays
    for strength in (1.0, 0.5, -0.7):
        expected = host.sample(host.add(pair.dense, adapter, strength))
        quant = host.add(pair.quant, adapter, strength)
        clones.append(quant)
        host.load(quant, 0.5)
        got = host.sample_as_loaded(quant)
        facts["distances"].append(relative(got, expected))
        facts["moved"].append(relative(expected, pair.plain))
        facts["offloaded"].append(_offloaded(pair))
        facts["host_functions"].append(_weight_functions(pair))
    host.load(pair.quant, 0.5)
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
    """Each kind on packed and plain weights together, loaded in full and in half."""
    facts: Facts = {}
    for kind in ("lora", "lokr", "loha", "dora", "diff"):
        adapter = {**host.lora(pair, kind, "all"), **host.plain_lora(pair)}
        expected = host.sample(host.add(pair.dense, adapter, 0.8))
        quant = host.add(pair.quant, adapter, 0.8)
        got = host.sample(quant)
        at_run_time = sum(bool(x.adapters and x.adapters.terms) for x in pair.packed.values())
        rewritten = sum(bool(x.adapters and x.adapters.rewrite) for x in pair.packed.values())
        host.unload()
        host.load(quant, 0.5)
        half = host.sample_as_loaded(quant)
        facts[kind] = {
            "distance": relative(got, expected),
            "half_loaded": relative(half, expected),
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
    before, memory = _addresses(pair), pair.quant.loaded_size()
    loads.clear()
    turns = ["a", "b", "a", "bare", "b", "b", "bare"]
    distances = [relative(host.sample(clones[name]), expected[name]) for name in turns]
    return {
        "turns": turns,
        "loads": loads,
        "distances": distances,
        "bare_equal": distances[3] == distances[6] == 0.0,
        "apart": relative(expected["a"], expected["b"]),
        "moved_weights": sum(a != b for a, b in zip(before, _addresses(pair), strict=True)),
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


# ---- hooks, merges, wrappers ----


def hook_lora(host: Host, pair: Pair) -> Facts:
    """Scheduled LoRA: on the prompt alone, on both, two in turns, with strengths over time."""
    import comfy.hooks

    def group(seed: int, *keyframes: tuple[float, float], kind: str = "lora") -> Any:
        adapter = {**host.lora(pair, kind, "all", seed=seed), **host.plain_lora(pair, seed=seed)}
        hooks = comfy.hooks.create_hook_lora(adapter, 1.0, 0.0)
        if keyframes:
            schedule = comfy.hooks.HookKeyframeGroup()
            for strength, start in keyframes:
                schedule.add(comfy.hooks.HookKeyframe(strength, start))
            hooks.set_keyframes_on_hooks(schedule)
        return hooks

    def hooked(one: Any, two: Any = None) -> Facts:
        return {
            "positive": {"hooks": one} if one else {},
            "negative": {"hooks": two} if two else {},
        }

    same = group(1)
    cases = {
        "prompt alone": hooked(group(1)),
        "both prompts": hooked(same, same),
        "one each": hooked(group(1), group(2, kind="lokr")),
        "over time": hooked(group(1, (0.3, 0.0), (1.0, 0.4), (0.0, 0.7))),
        "over time, one each": hooked(group(1, (0.0, 0.0), (1.0, 0.5)), group(2, (1.0, 0.0))),
    }
    options = {"steps": 4, "cfg": 3.0}
    facts: Facts = {}

    def follow(name: str, dense: Any, quant: Any, conditions: Facts, share: float | None) -> None:
        host.load(quant, share)
        before = host.sample_as_loaded(quant, **options)
        expected = host.sample(dense.clone(), **options, **conditions)
        hooked_clone = quant.clone()
        host.load(hooked_clone, share)
        got = host.sample_as_loaded(hooked_clone, **options, **conditions)
        host.load(quant, share)
        facts[name] = {
            "distance": relative(got, expected),
            "moved": relative(expected, before),
            "equal_after": host.torch.equal(host.sample_as_loaded(quant, **options), before),
            "offloaded": _offloaded(pair),
        }

    for name, conditions in cases.items():
        follow(name, *pair.both, conditions, None)
    adapter = host.lora(pair, "lora", "mlp", seed=9)
    with_lora = host.add(pair.dense, adapter), host.add(pair.quant, adapter)
    follow("one each, over a lora", *with_lora, cases["one each"], None)
    host.unload()
    follow("one each, half loaded", *with_lora, cases["one each"], 0.5)
    with_lora[1].detach()
    return facts


def _turned(host: Host, arch: str) -> Pair:
    """Another pair of models: every weight with its rows the other way round."""
    other = host.pair(arch)
    for model in (other.dense.model, other.quant.model):
        for name, weight in model.named_parameters():
            if "norm" not in name:
                dimension = weight.ndim - 1 if name.endswith("pad_token") else 0
                weight.data = weight.data.flip(dimension).contiguous()
    return other


def merges(host: Host, pair: Pair) -> Facts:
    """The host's merge nodes, with a packed model on either side."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple, ModelSubtract

    other = _turned(host, pair.arch)
    adapter = host.lora(pair, target="all")

    def merged(first: Any, second: Any) -> Any:
        return host.sample(ModelMergeSimple().merge(first, second, 0.4)[0])

    expected = merged(pair.dense, other.dense)
    facts: Facts = {
        "moved": relative(expected, pair.plain),
        "packed into dense": relative(merged(pair.dense, other.quant), expected),
        "dense into packed": relative(merged(pair.quant, other.dense), expected),
        "packed into packed": relative(merged(pair.quant, other.quant), expected),
    }
    with_lora = merged(pair.dense, host.add(other.dense, adapter))
    quant = merged(pair.quant, host.add(other.quant, adapter))
    facts["second has a lora"] = relative(quant, with_lora)
    facts["lora moved"] = relative(with_lora, expected)
    models = zip(pair.both, other.both, strict=True)
    dense, quant = (ModelSubtract().merge(*two, 0.1)[0] for two in models)
    facts["subtracted"] = relative(host.sample(quant), host.sample(dense))
    facts["equal_after"] = host.torch.equal(host.sample(pair.quant), pair.plain)
    return facts


def weight_wrapper(host: Host, pair: Pair) -> Facts:
    """A function that another pack puts on a weight, as the host calls it at every forward."""
    part = {"zimage": "layers.1.feed_forward.w1", "qwen": "transformer_blocks.1.img_mlp.net.2"}
    key = f"diffusion_model.{part[pair.arch]}.weight"
    seen: set[tuple[str, tuple[int, ...]]] = set()

    def turned(weight: Any) -> Any:
        seen.add((str(weight.dtype), tuple(weight.shape)))
        return weight.flip(1)

    def wrapped(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.add_weight_wrapper(key, turned)
        return clone

    adapter = host.lora(pair, target="all")
    expected = host.sample(wrapped(pair.dense))
    with_lora = host.sample(wrapped(host.add(pair.dense, adapter)))
    seen.clear()
    facts: Facts = {"moved": relative(expected, pair.plain)}
    facts["fresh"] = relative(host.sample(wrapped(pair.quant)), expected)
    facts["equal_without"] = host.torch.equal(host.sample(pair.quant), pair.plain)
    # The model is loaded now, and only its patches change.
    facts["later"] = relative(host.sample(wrapped(pair.quant)), expected)
    facts["with_lora"] = relative(host.sample(wrapped(host.add(pair.quant, adapter))), with_lora)
    quant = wrapped(host.add(pair.quant, adapter))
    host.load(pair.quant, 0.5)
    host.load(quant, 0.5)
    facts["half_loaded"] = relative(host.sample_as_loaded(quant), with_lora)
    facts["equal_after"] = host.torch.equal(host.sample(pair.quant), pair.plain)
    layer = pair.packed[key]
    facts["seen"] = sorted([dtype, list(shape)] for dtype, shape in seen)
    facts["shape"] = [layer.out_features, layer.in_features]
    return facts


def bypass_lora(host: Host, pair: Pair) -> Facts:
    """Newer hosts' LoRA beside the weights, by replacing forwards."""
    import comfy.sd

    load = getattr(comfy.sd, "load_bypass_lora_for_models", None)
    if load is None:
        return {"supported": False}
    adapter = host.lora(pair, "lora", "mlp")
    dense, quant = (load(patcher, None, dict(adapter), 0.8, 0)[0] for patcher in pair.both)
    facts = {"supported": True, **_compared(host, pair, dense, quant)}
    merged = host.sample(host.add(pair.dense, adapter, 0.8))
    facts["as_merged"] = relative(host.sample(quant), merged)
    both = host.lora(pair, "lora", "attention")
    facts["beside_lora"] = _compared(host, pair, host.add(dense, both), host.add(quant, both))
    facts["equal_after"] = host.torch.equal(host.sample(pair.quant), pair.plain)
    return facts


def saving(host: Host, pair: Pair) -> Facts:
    """What the host's save nodes call, on a model that is loaded in full and in half."""
    import os
    import tempfile

    import comfy.sd

    facts: Facts = {"refused": [], "files": []}
    with tempfile.TemporaryDirectory() as folder:
        for share in (None, 0.5):
            host.unload()
            host.load(pair.quant, share)
            try:
                comfy.sd.save_checkpoint(f"{folder}/saved.safetensors", pair.quant)
            except RuntimeError as error:
                facts["refused"].append(str(error))
            facts["files"] += os.listdir(folder)
    facts["equal_after"] = host.torch.equal(host.sample(pair.quant), pair.plain)
    return facts


# ---- a file, and loading it again ----


def rebuild(host: Host, pair: Pair) -> Facts:
    """A model from a real file, and the ways in which newer hosts load one again."""
    import inspect

    from speed_tier.speed.hosts.comfy_loader import load_gguf_model
    from speed_tier.speed.hosts.comfy_quant import packed_layers

    torch = host.torch
    patcher = load_gguf_model(pair.files["gguf"])
    stem = "transformer_blocks.1.attn.to_q"
    key = f"diffusion_model.{stem}.weight"
    rank = 4
    adapter = {
        f"diffusion_model.{stem}.lora_up.weight": torch.ones(3072, rank),
        f"diffusion_model.{stem}.lora_down.weight": torch.ones(rank, 3072) / 3072,
    }
    patched = host.add(patcher, adapter)
    first = packed_layers(patcher.model)
    x = torch.randn(2, 3072, generator=torch.Generator().manual_seed(0))
    facts: Facts = {
        "packed": len(first),
        "in_file": sum(layer.weight.nbytes for layer in first.values()),
        "model_size": patcher.model_size(),
        "is_dynamic": getattr(patcher, "is_dynamic", bool)(),
    }
    factory, arguments = patcher.cached_patcher_init
    copies = {"factory": factory(*arguments)}
    parameters = inspect.signature(patched.clone).parameters
    facts["supported"] = "force_deepcopy" in parameters
    if facts["supported"]:
        copies["static"] = patched.clone(disable_dynamic=True)
        copies["deep"] = patched.clone(force_deepcopy=True)
        copies["another card"] = patched.deepclone_multigpu(new_load_device=host.device)
    expected = first[key](x)
    host.load(patched)
    adapted = first[key](x)
    patched.detach()
    facts["moved"] = relative(adapted, expected)
    for name, copy in copies.items():
        layers = packed_layers(copy.model)
        same = [torch.equal(layers[k].weight, layer.weight) for k, layer in first.items()]
        bare = torch.equal(layers[key](x), expected)
        host.load(copy)
        facts[name] = {
            "class": type(copy).__name__,
            "own_module": copy.model is not patcher.model,
            "equal_weights": all(same) and len(layers) == len(first),
            "equal_bare": bare,
            "patched": sorted(copy.patches),
            "equal_adapted": torch.equal(layers[key](x), adapted),
            "rebuildable": copy.cached_patcher_init == patcher.cached_patcher_init,
        }
        copy.detach()
    alive = weakref.ref(patcher.model)
    del patcher, patched, first, layers, copies, copy
    gc.collect()
    facts["freed"] = alive() is None
    return facts


PARTS = {
    "loads": (full_load, partial_load, partial_unload, lora_while_offloaded, cast_path),
    "adapters": (adapter_kinds, lora_order, strength_zero, alternating_clones, adapter_memory),
    "hooks": (hook_lora,),
    "others": (merges, weight_wrapper, bypass_lora, saving),
    "file": (rebuild,),
}
