"""Scenarios for packed models: what other nodes do to them. Each returns facts, judges nothing.

Scheduled LoRA, merges, weight wrappers, LoRA beside the weights, saves, and loading a file again.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from .gguf_in_process import LITTLE, Facts, Host, Pair, relative


def _compared(host: Host, pair: Pair, dense: Any, quant: Any, **options: Any) -> Facts:
    expected, got = host.sample(dense, **options), host.sample(quant, **options)
    return {"distance": relative(got, expected), "moved": relative(expected, pair.plain)}


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
        offloaded = pair.offloaded(adapted=True)
        got = host.sample_as_loaded(hooked_clone, **options, **conditions)
        host.load(quant, share)
        facts[name] = {
            "distance": relative(got, expected),
            "moved": relative(expected, before),
            "equal_after": host.torch.equal(host.sample_as_loaded(quant, **options), before),
            "offloaded": offloaded,
        }

    for name, conditions in cases.items():
        follow(name, *pair.both, conditions, None)
    adapter = host.lora(pair, "lora", "mlp", seed=9)
    with_lora = host.add(pair.dense, adapter), host.add(pair.quant, adapter)
    follow("one each, over a lora", *with_lora, cases["one each"], None)
    host.unload()
    follow("one each, little loaded", *with_lora, cases["one each"], LITTLE)
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
    host.load(pair.quant, LITTLE)
    host.load(quant, LITTLE)
    facts["little_loaded"] = relative(host.sample_as_loaded(quant), with_lora)
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
    """What the host's save nodes call, on a model that is loaded in full and in part."""
    import os
    import tempfile

    import comfy.sd

    facts: Facts = {"refused": [], "files": []}
    with tempfile.TemporaryDirectory() as folder:
        for share in (None, LITTLE):
            host.unload()
            host.load(pair.quant, share)
            try:
                comfy.sd.save_checkpoint(f"{folder}/saved.safetensors", pair.quant)
            except RuntimeError as error:
                facts["refused"].append(str(error))
            facts["files"] += os.listdir(folder)
    facts["equal_after"] = host.torch.equal(host.sample(pair.quant), pair.plain)
    return facts


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
    "hooks": (hook_lora,),
    "others": (merges, weight_wrapper, bypass_lora, saving),
    "file": (rebuild,),
}
