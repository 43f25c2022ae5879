"""Writes small GGUF files: every quant type, the real mixes of each family, and damaged headers.

The gguf package quantises only some types. K-quants, IQ4 and NVFP4 go through the small absmax
quantisers below (worse than llama-quantize's search, but valid); the other IQ types are random
codes with a calibrated block scale, so that the weights have a sane size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import GGMLQuantizationType as Q

STD = 0.02
PLAIN = (Q.F32, Q.F16, Q.BF16)
IQ4_VALUES = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
E2M1_VALUES = np.array(gguf.quants.MXFP4.kvalues, np.float32) / 2


# ---- quantisers: (n, block) float32 -> (n, bytes) uint8 ----


def _half(a):
    return np.ascontiguousarray(a.astype(np.float16)).view(np.uint8).reshape(a.shape[0], -1)


def _divide(a, b):
    return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape, np.float32), where=b != 0)


def _crumbs(codes):
    c = codes.reshape(-1, 2, 4, 32).astype(np.uint8)
    return (c[:, :, 0] | c[:, :, 1] << 2 | c[:, :, 2] << 4 | c[:, :, 3] << 6).reshape(-1, 64)


def _nibbles(codes, half):
    c = codes.reshape(codes.shape[0], -1, 2, half).astype(np.uint8)
    return (c[:, :, 0] | c[:, :, 1] << 4).reshape(codes.shape[0], -1)


def _bit_planes(bits):
    planes = bits.reshape(-1, 8, 32).astype(np.uint8)
    return np.bitwise_or.reduce(planes << np.arange(8, dtype=np.uint8)[None, :, None], 1)


def _six_bit_scales(scales, minima):
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    low = s[:, :4] | (s[:, 4:] >> 4) << 6
    mid = m[:, :4] | (m[:, 4:] >> 4) << 6
    return np.concatenate([low, mid, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4], 1)


def _affine(x, sub, top, scale_top):
    s = x.reshape(len(x), -1, sub)
    low = np.maximum(-s.min(2), 0)
    step = (np.maximum(s.max(2), 0) + low) / top
    d, m = step.max(1, keepdims=True) / scale_top, low.max(1, keepdims=True) / scale_top
    d, m = (v.astype(np.float16).astype(np.float32) for v in (d, m))
    scales = np.clip(np.rint(_divide(step, d)), 0, scale_top)
    minima = np.clip(np.rint(_divide(low, m)), 0, scale_top)
    codes = np.rint(_divide(s + (m * minima)[..., None], (d * scales)[..., None]))
    return d, m, scales, minima, np.clip(codes, 0, top).reshape(len(x), -1)


def _symmetric(x, sub, top, scale_top):
    s = x.reshape(len(x), -1, sub)
    step = np.abs(s).max(2) / top
    d = (step.max(1, keepdims=True) / scale_top).astype(np.float16).astype(np.float32)
    scales = np.clip(np.rint(_divide(step, d)), 0, scale_top)
    return d, scales, _divide(s, (d * scales)[..., None])


def _nearest(values, table):
    order = np.argsort(table, kind="stable")
    ordered = table[order]
    return order[np.searchsorted((ordered[1:] + ordered[:-1]) / 2, values)].astype(np.uint8)


def _q2_k(x):
    d, m, scales, minima, codes = _affine(x, 16, 3, 15)
    pairs = scales.astype(np.uint8) | minima.astype(np.uint8) << 4
    return np.concatenate([pairs, _crumbs(codes), _half(d), _half(m)], 1)


def _q4_k(x):
    d, m, scales, minima, codes = _affine(x, 32, 15, 63)
    six = _six_bit_scales(scales, minima)
    return np.concatenate([_half(d), _half(m), six, _nibbles(codes, 32)], 1)


def _q5_k(x):
    d, m, scales, minima, codes = _affine(x, 32, 31, 63)
    codes = codes.astype(np.uint8)
    six = _six_bit_scales(scales, minima)
    fifth = _bit_planes(codes >> 4)
    return np.concatenate([_half(d), _half(m), six, fifth, _nibbles(codes & 15, 32)], 1)


def _q3_k(x):
    d, scales, v = _symmetric(x, 16, 3.5, 31)
    codes = (np.clip(np.rint(v), -4, 3) + 4).reshape(len(x), 256).astype(np.uint8)
    six = (scales + 32).astype(np.uint8)
    low = (six[:, :8] & 15) | (six[:, 8:] & 15) << 4
    high = (six >> 4).reshape(-1, 4, 4)
    high = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    return np.concatenate([_bit_planes(codes >> 2), _crumbs(codes & 3), low, high, _half(d)], 1)


def _q6_k(x):
    d, scales, v = _symmetric(x, 16, 31.5, 127)
    codes = (np.clip(np.rint(v), -32, 31) + 32).reshape(len(x), 256).astype(np.uint8)
    scales = scales.astype(np.int8).view(np.uint8)
    return np.concatenate([_nibbles(codes & 15, 64), _crumbs(codes >> 4), scales, _half(d)], 1)


def _iq4_nl(x):
    d = (np.abs(x).max(1, keepdims=True) / 120).astype(np.float16).astype(np.float32)
    return np.concatenate([_half(d), _nibbles(_nearest(_divide(x, d), IQ4_VALUES), 16)], 1)


def _iq4_xs(x):
    d, scales, v = _symmetric(x, 32, 120, 31)
    six = (scales + 32).astype(np.uint8)
    low = (six[:, 0::2] & 15) | (six[:, 1::2] & 15) << 4
    shifts = 2 * np.arange(8, dtype=np.uint16)
    high = np.bitwise_or.reduce((six >> 4).astype(np.uint16) << shifts, 1)
    high = np.ascontiguousarray(high).view(np.uint8).reshape(-1, 2)
    codes = _nibbles(_nearest(v, IQ4_VALUES).reshape(len(x), 256), 16)
    return np.concatenate([_half(d), high, low, codes], 1)


def _nvfp4(x):
    s = x.reshape(len(x), 4, 16)
    cls = gguf.quants.NVFP4
    exponents = cls.fp32_to_ue4m3(np.abs(s).max(2) / 6)
    step = (cls.ue4m3_to_fp32(exponents) * 2).astype(np.float32)
    codes = _nearest(_divide(s, step[..., None]), E2M1_VALUES)
    codes = (codes[:, :, :8] | codes[:, :, 8:] << 4).reshape(len(x), 32)
    return np.concatenate([exponents.astype(np.uint8), codes], 1)


OWN: dict[GGMLQuantizationType, Callable] = {
    Q.Q2_K: _q2_k,
    Q.Q3_K: _q3_k,
    Q.Q4_K: _q4_k,
    Q.Q5_K: _q5_k,
    Q.Q6_K: _q6_k,
    Q.IQ4_NL: _iq4_nl,
    Q.IQ4_XS: _iq4_xs,
    Q.NVFP4: _nvfp4,
}
RANDOM_CODES = (Q.IQ1_S, Q.IQ1_M, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S)


def _random_codes(count, qtype, rng):
    def make(n, d, generator):
        blocks = generator.integers(0, 256, (n, GGML_QUANT_SIZES[qtype][1]), dtype=np.uint8)
        bits = int(np.float16(d).view(np.uint16))
        if qtype is Q.IQ1_M:  # the scale stands in the top nibbles of the last four words
            words = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
            for i in range(4):
                words[:, i] = (words[:, i] & 0x0FFF) | ((bits >> 4 * i & 15) << 12)
            blocks[:, 48:] = words.view(np.uint8)
        else:
            blocks[:, 0], blocks[:, 1] = bits & 255, bits >> 8
        return blocks

    unit = gguf.quants.dequantize(make(256, 1.0, np.random.default_rng(7)), qtype).std()
    return make(count, STD / float(unit), rng)


def encode(x: np.ndarray, qtype: GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """`(..., cols) float32` to `(..., bytes) uint8`."""
    block_size, type_size = GGML_QUANT_SIZES[qtype]
    count = x.size // block_size
    if qtype in OWN:
        blocks = OWN[qtype](x.reshape(count, block_size).astype(np.float32))
    elif qtype in RANDOM_CODES:
        blocks = _random_codes(count, qtype, rng)
    else:
        blocks = gguf.quants.quantize(np.ascontiguousarray(x), qtype)
    data = np.ascontiguousarray(blocks).view(np.uint8)
    return data.reshape(*x.shape[:-1], x.shape[-1] // block_size * type_size)


# ---- tensor tables: (name, shape) in file order ----

DIM, FFN, CAPTION, TEXT, HEAD = 256, 512, 256, 3584, 64


def z_image(layers: int = 2, split: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    """Z-Image at tiny width, native or diffusers (`split`) names."""
    embed, final = "x_embedder.", "final_layer."
    if split:
        embed, final = "all_x_embedder.2-1.", "all_final_layer.2-1."
    table = [("x_pad_token", (1, DIM)), ("cap_pad_token", (1, DIM))]
    table += [(embed + "weight", (DIM, 64)), (embed + "bias", (DIM,))]

    def block(stem, modulated):
        a, f = stem + "attention.", stem + "feed_forward."
        if split:
            rows = [(a + f"to_{c}.weight", (DIM, DIM)) for c in "qkv"]
            rows += [(a + "to_out.0.weight", (DIM, DIM))]
            rows += [(a + "norm_q.weight", (HEAD,)), (a + "norm_k.weight", (HEAD,))]
        else:
            rows = [(a + "qkv.weight", (3 * DIM, DIM)), (a + "out.weight", (DIM, DIM))]
            rows += [(a + "q_norm.weight", (HEAD,)), (a + "k_norm.weight", (HEAD,))]
        rows += [(f + "w1.weight", (FFN, DIM)), (f + "w2.weight", (DIM, FFN))]
        rows += [(f + "w3.weight", (FFN, DIM))]
        norms = ("attention_norm1", "ffn_norm1", "attention_norm2", "ffn_norm2")
        rows += [(f"{stem}{n}.weight", (DIM,)) for n in norms]
        if modulated:
            rows += [(stem + "adaLN_modulation.0.weight", (4 * DIM, 256))]
            rows += [(stem + "adaLN_modulation.0.bias", (4 * DIM,))]
        return rows

    table += block("noise_refiner.0.", True) + block("context_refiner.0.", False)
    table += [("t_embedder.mlp.0.weight", (1024, 256)), ("t_embedder.mlp.0.bias", (1024,))]
    table += [("t_embedder.mlp.2.weight", (256, 1024)), ("t_embedder.mlp.2.bias", (256,))]
    table += [("cap_embedder.0.weight", (CAPTION,)), ("cap_embedder.1.weight", (DIM, CAPTION))]
    table += [("cap_embedder.1.bias", (DIM,))]
    for i in range(layers):
        table += block(f"layers.{i}.", True)
    table += [(final + "linear.weight", (64, DIM)), (final + "linear.bias", (64,))]
    table += [(final + "adaLN_modulation.1.weight", (DIM, 256))]
    return [*table, (final + "adaLN_modulation.1.bias", (DIM,))]


def qwen_image(layers: int = 3, variant: str = "base") -> list[tuple[str, tuple[int, ...]]]:
    """Qwen-Image at tiny width; `variant` base, edit_2511 or layered."""
    e = "time_text_embed."
    table = [(e + "timestep_embedder.linear_1.weight", (DIM, 256))]
    table += [(e + "timestep_embedder.linear_1.bias", (DIM,))]
    table += [(e + "timestep_embedder.linear_2.weight", (DIM, DIM))]
    table += [(e + "timestep_embedder.linear_2.bias", (DIM,))]
    if variant == "layered":
        table += [(e + "addition_t_embedding.weight", (2, DIM))]
    if variant == "edit_2511":
        table += [("__index_timestep_zero__", (0,))]
    table += [("txt_norm.weight", (TEXT,)), ("img_in.weight", (DIM, 64)), ("img_in.bias", (DIM,))]
    table += [("txt_in.weight", (DIM, TEXT)), ("txt_in.bias", (DIM,))]
    attention = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    for i in range(layers):
        p = f"transformer_blocks.{i}."
        for s in ("img", "txt"):
            table += [(f"{p}{s}_mod.1.weight", (6 * DIM, DIM)), (f"{p}{s}_mod.1.bias", (6 * DIM,))]
            table += [(f"{p}{s}_mlp.net.0.proj.weight", (4 * DIM, DIM))]
            table += [(f"{p}{s}_mlp.net.0.proj.bias", (4 * DIM,))]
            table += [(f"{p}{s}_mlp.net.2.weight", (DIM, 4 * DIM))]
            table += [(f"{p}{s}_mlp.net.2.bias", (DIM,))]
        for s in (*attention, "to_out.0", "to_add_out"):
            table += [(f"{p}attn.{s}.weight", (DIM, DIM)), (f"{p}attn.{s}.bias", (DIM,))]
        for s in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            table += [(f"{p}attn.{s}.weight", (HEAD,))]
    table += [("norm_out.linear.weight", (2 * DIM, DIM)), ("norm_out.linear.bias", (2 * DIM,))]
    return [*table, ("proj_out.weight", (64, DIM)), ("proj_out.bias", (64,))]


# ---- which type each tensor has in the files people use ----

# Role -> recipe -> type, checked against the byte sizes of public files.
BUMPS = {
    "v": {"Q2_K": Q.Q3_K, "Q4_K_M": Q.Q6_K, "Q5_K_M": Q.Q6_K},
    "qkv": {"Q3_K_M": Q.Q4_K, "Q4_K_M": Q.Q5_K, "Q5_K_M": Q.Q6_K},
    "down": {
        "Q3_K_M": Q.Q4_K,
        "Q4_K_S": Q.Q5_K,
        "Q4_K_M": Q.Q6_K,
        "Q5_K_M": Q.Q6_K,
        "Q4_0": Q.Q4_1,
        "Q5_0": Q.Q5_1,
    },
    "edge": {"Q2_K": Q.Q4_K, "Q3_K_M": Q.Q4_K, "Q4_K_M": Q.Q5_K, "Q5_K_M": Q.Q6_K},
}
KEPT = ("embedder", "final_layer.", "refiner.", "img_in.", "txt_in.", "time_text_embed.")
KEPT += ("proj_out.", "norm_out.")


def base_type(recipe: str) -> GGMLQuantizationType:
    return Q[recipe] if recipe in Q.__members__ else Q[recipe.rsplit("_", 1)[0]]


def mixed(
    table, recipe: str, layers: int
) -> list[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """The common converters' choice of types: plain edges, roles one or two steps up."""
    base, plan = base_type(recipe), []
    for name, shape in table:
        qtype = base
        if len(shape) == 1 or name.endswith("pad_token"):
            qtype = Q.F32
        elif any(k in name for k in KEPT) or base in PLAIN:
            qtype = base if base in PLAIN else Q.BF16
        else:
            role = None
            if name.endswith((".to_v.weight", ".add_v_proj.weight")):
                role = "v"
            elif ".attention.qkv." in name:
                role = "qkv"
            elif ".feed_forward.w2." in name or "_mlp.net.2." in name:
                role = "down"
            qtype = BUMPS.get(role, {}).get(recipe, base)
            if name.startswith("transformer_blocks.") and name.split(".")[1] in (
                "0",
                str(layers - 1),
            ):
                qtype = BUMPS["edge"].get(recipe, qtype)
        if shape[-1] % GGML_QUANT_SIZES[qtype][0]:
            qtype = Q.F16
        plan.append((name, shape, qtype))
    return plan


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's float32 source, the same whatever the file."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    x = rng.standard_normal(shape, dtype=np.float32) * STD
    return x + 1 if "norm" in name and len(shape) == 1 else x


def write(
    path: Path,
    plan: list[tuple[str, tuple[int, ...], GGMLQuantizationType]],
    arch: str | None = "lumina2",
    metadata: dict[str, object] | None = None,
) -> dict[str, np.ndarray]:
    """Write the file; returns each tensor's stored bytes. `arch=None` writes no metadata at all."""
    writer = gguf.GGUFWriter(path, arch or "none")
    if arch is None:
        writer.kv_data[0].clear()
    else:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in (metadata or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    stored = {}
    rng = np.random.default_rng(0)
    for name, shape, qtype in plan:
        block_size, type_size = GGML_QUANT_SIZES[qtype]
        data = encode(values(name, shape), qtype, rng) if np.prod(shape) else np.empty(0, np.uint8)
        byte_shape = (*shape[:-1], shape[-1] // block_size * type_size)
        writer.add_tensor_info(name, byte_shape, np.dtype(np.uint8), data.nbytes, qtype)
        stored[name] = data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in stored.values():
        writer.write_tensor_data(data.reshape(-1))
    writer.close()
    return stored
