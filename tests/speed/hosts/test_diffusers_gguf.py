"""GGUF files in bare diffusers transformers: the weights of the file, in every tier."""

import copy
import gc
import weakref

import gguf
import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel, ZImageTransformer2DModel
from gguf import GGMLQuantizationType as Q
from speed_tier.speed.bounds import allowed_error
from speed_tier.speed.errors import GGUFFileError, UnsupportedModelError
from speed_tier.speed.gguf import names
from speed_tier.speed.gguf.linear import QuantLinear
from speed_tier.speed.hosts.diffusers import apply_tier
from speed_tier.speed.hosts.diffusers_gguf import load_gguf_transformer
from speed_tier.speed.optimizations import OPTIMIZATIONS
from speed_tier.speed.optimizations.regional_compile import CompileConfig, RegionalCompile
from speed_tier.speed.patching import active_patches
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.gguf import packer
from speed_tier.tests.speed.gguf.layers import Random, counted_fast_calls, quantised
from speed_tier.tests.speed.process import full_state
from speed_tier.tests.speed.tiny import output, relative_error
from torch import nn

pytestmark = pytest.mark.slow  # compiled blocks of both families, by Inductor too

# The K-quants need rows of 256; Z-Image's feed-forward is 8/3 of its width, so that a tiny one has
# no such rows elsewhere. There these stand for them.
COUSINS = {Q.Q4_K: Q.Q4_0, Q.Q5_K: Q.Q5_0, Q.Q6_K: Q.Q8_0}
COMPILED = tuple(
    RegionalCompile(CompileConfig(backend="eager")) if row.name == "regional_compile" else row
    for row in OPTIMIZATIONS
)


def z_image(**more):
    config = {
        **{"in_channels": 16, "dim": 96, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2},
        **{"n_kv_heads": 2, "cap_feat_dim": 64, "axes_dims": [16, 16, 16]},
        **{"axes_lens": [512, 128, 128], **more},
    }
    return ZImageTransformer2DModel(**config).eval()


def qwen_image(**more):
    config = {
        **{"in_channels": 64, "out_channels": 16, "num_layers": 3, "attention_head_dim": 64},
        **{"num_attention_heads": packer.DIM // 64, "joint_attention_dim": packer.TEXT},
        **{"axes_dims_rope": (16, 24, 24), **more},
    }
    return QwenImageTransformer2DModel(**config).eval()


def z_image_inputs(dtype=torch.float32):
    inputs = tiny.z_image_inputs(dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    return inputs | {
        "x": [torch.randn(16, 1, 8, 8, generator=generator).to(dtype)],
        "cap_feats": [torch.randn(5, 64, generator=generator).to(dtype)],
    }


def qwen_image_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return tiny.qwen_image_inputs(dtype=dtype) | {
        "hidden_states": torch.randn(1, 16, 64, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(1, 5, packer.TEXT, generator=generator).to(dtype),
    }


def native_table(model):
    """Native names and shapes, in file order: q, k, v fused."""
    table = []
    for name, value in model.state_dict().items():
        if name.endswith(names.SPLIT[0]):
            rows, cols = value.shape
            table.append((name.removesuffix(names.SPLIT[0]) + names.FUSED, (3 * rows, cols)))
        elif not name.endswith(names.SPLIT[1:]):
            table.append((names.z_image_name(name, names.NATIVE), tuple(value.shape)))
    return table


def diffusers_table(model):
    return [(name, tuple(value.shape)) for name, value in model.state_dict().items()]


# family, table of the file, class, inputs
CASES = {
    "z_image native": (z_image, z_image_inputs, native_table),
    "z_image diffusers": (z_image, z_image_inputs, diffusers_table),
    "qwen_image": (qwen_image, qwen_image_inputs, diffusers_table),
}


def recipe(table, name="Q4_K_M", layers=3):
    """The usual mix of types, each where the rows allow it."""
    shapes = dict(table)
    plan = packer.mixed([(n, (*shape[:-1], 256)) for n, shape in table], name, layers)
    fitted = []
    for tensor, _, qtype in plan:
        shape = shapes[tensor]
        whole = shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0] == 0
        fitted.append((tensor, shape, qtype if whole else COUSINS[qtype]))
    return fitted


def dense_state(model, plan, stored):
    """The gguf package's value of every tensor, under the model's names."""
    state = {}
    for name, shape, qtype in plan:
        data = np.ascontiguousarray(stored[name])
        value = torch.from_numpy(np.array(gguf.quants.dequantize(data, qtype))).reshape(shape)
        if name.endswith(names.FUSED):
            stem = name.removesuffix(names.FUSED)
            state |= {stem + s: v for s, v in zip(names.SPLIT, value.chunk(3), strict=True)}
        elif isinstance(model, ZImageTransformer2DModel):
            state[names.z_image_name(name, names.DIFFUSERS)] = value
        else:
            state[name] = value
    return state


class Case:
    """A file, and the same model with dense weights."""

    def __init__(self, path, make, inputs, table):
        self.path, self.make, self.inputs = path, make, inputs
        self.dense = make()
        self.plan = recipe(table(self.dense))
        stored = packer.write(path, self.plan)
        self.dense.load_state_dict(dense_state(self.dense, self.plan, stored))
        self.exact = output(copy.deepcopy(self.dense).double(), inputs(torch.float64))

    def loaded(self, dtype=torch.float32):
        with torch.device("meta"):
            transformer = self.make()
        return load_gguf_transformer(self.path, transformer, dtype)

    def packed_names(self):
        """Names in the file of what stays packed."""
        block = ("layers.", "noise_refiner.", "context_refiner.", "transformer_blocks.")
        return {n for n, _, q in self.plan if q not in packer.PLAIN and n.startswith(block)}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp("gguf") / "m.gguf", *CASES[request.param])


@pytest.fixture(autouse=True)
def fast_calls():
    before = full_state()
    with counted_fast_calls() as calls:
        yield calls
    assert full_state() == before
    assert active_patches() == 0


def packed_layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}


def test_the_files_mix_several_types(case):
    types = {qtype for name, _, qtype in case.plan if name in case.packed_names()}
    assert len(types) >= 3
    assert {q for _, _, q in case.plan} >= {Q.F32, Q.BF16, Q.Q6_K}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("on_meta", [True, False])
def test_the_output_is_that_of_the_dense_weights(case, fast_calls, on_meta, dtype):
    with torch.device("meta" if on_meta else "cpu"):
        transformer = case.make()
    assert load_gguf_transformer(case.path, transformer, dtype) is transformer
    expected = output(copy.deepcopy(case.dense).to(dtype), case.inputs(dtype))
    got = output(transformer, case.inputs(dtype))
    assert got.dtype is dtype
    assert torch.equal(got, expected)
    assert fast_calls == {}, "no tier, no fast path"


def test_packed_weights_stay_packed_and_the_rest_is_of_the_dtype(case):
    transformer = case.loaded(torch.bfloat16)
    layers = packed_layers(transformer)
    thirds = 2 * sum(name.endswith(names.FUSED) for name in case.packed_names())
    assert len(layers) == len(case.packed_names()) + thirds
    packed = {f"{name}.weight" for name in layers}
    held = dict(transformer.named_parameters())
    assert list(held) == list(dict(case.dense.named_parameters()))
    for name, parameter in held.items():
        assert parameter.dtype is (torch.uint8 if name in packed else torch.bfloat16), name
    stored = dict.fromkeys(packed, case.path)
    dense_bytes = sum(case.dense.get_parameter(name).numel() for name in stored) * 2
    assert sum(held[name].nbytes for name in packed) < 0.5 * dense_bytes
    assert transformer.dtype is torch.bfloat16
    assert len({id(layer.state) for layer in layers.values()}) == 1


def test_every_layer_has_its_own_type(case):
    transformer = case.loaded()
    found = {}
    for name, _, qtype in case.plan:
        if name not in case.packed_names():
            continue
        stems = [name.removesuffix(".weight")]
        if name.endswith(names.FUSED):
            stem = name.removesuffix(names.FUSED)
            stems = [(stem + part).removesuffix(".weight") for part in names.SPLIT]
        found |= {names.z_image_name(f"{s}.", names.DIFFUSERS)[:-1]: qtype for s in stems}
    assert {n: layer.qtype for n, layer in packed_layers(transformer).items()} == found


def check_tier(case, fast_calls, tier, dtype):
    """Two forwards in a tier: within the bound, by the fast path, and nothing left. The report."""
    model = case.loaded(dtype)
    layers = packed_layers(model)
    off = output(model, case.inputs(dtype))
    before = [dict(vars(module)) for module in model.modules()]
    handle = apply_tier(model, tier, optimizations=COMPILED)
    got = [output(model, case.inputs(dtype)) for _ in range(2)]
    report = handle.finish_run()
    handle.remove()
    bound = allowed_error(relative_error(off, case.exact), dtype)
    for one in got:
        assert relative_error(one, case.exact) <= bound
    assert sum(fast_calls.values()) == 3 * len(layers)  # two calls, and the self-check of the first
    note = report.feature("gguf_dequant").note
    for qtype in {Q(layer.qtype) for layer in layers.values()}:
        assert f"{sum(one.qtype == qtype for one in layers.values())} {qtype.name} (" in note
    assert [dict(vars(module)) for module in model.modules()] == before
    fast_calls.clear()
    assert torch.equal(output(model, case.inputs(dtype)), off)
    assert fast_calls == {}, "off goes by the reference"
    return report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_default_engages_and_stays_within_the_bound(case, fast_calls, dtype):
    report = check_tier(case, fast_calls, "default", dtype)
    assert "gguf_dequant" in report.engaged()
    assert "regional_compile" not in report.engaged()


@pytest.mark.parametrize("case", ["z_image native", "qwen_image"], indirect=True)
def test_max_engages_and_stays_within_the_bound(case, fast_calls):
    report = check_tier(case, fast_calls, "max", torch.bfloat16)
    assert {"gguf_dequant", "regional_compile"} <= set(report.engaged())
    # A kind for each mix of types in a list of blocks: Qwen-Image's first and last have another.
    kinds = [(kind.name, kind.blocks) for kind in report.compile.kinds]
    if case.make is qwen_image:
        assert kinds == [("transformer_blocks", 2), ("transformer_blocks#2", 1)]
    else:
        assert kinds == [("context_refiner", 1), ("noise_refiner", 1), ("layers", 2)]
    compiled = report.compile
    assert (compiled.graphs, compiled.recompiles, compiled.graph_breaks) == (len(kinds), 0, {})


def test_a_tier_left_unset_is_default_for_gguf_and_off_for_dense_weights(case, fast_calls):
    packed = case.loaded()
    for model, asked, tier in (
        (packed, None, "default"),
        (case.dense, None, "off"),
        (packed, "off", "off"),
    ):
        handle = apply_tier(model, asked)
        output(model, case.inputs())
        report = handle.finish_run()
        handle.remove()
        assert report.tier == tier
        assert ("gguf_dequant" in report.engaged()) is (tier == "default")


def test_a_tier_left_unset_is_default_for_layers_of_another_loader(fast_calls):
    model = quantised("qwen_image", Random(0), another_packs=True)
    handle = apply_tier(model)
    output(model, tiny.qwen_image_inputs())
    report = handle.finish_run()
    handle.remove()
    assert (report.tier, report.engaged()) == ("default", ["gguf_dequant"])


def test_nothing_keeps_the_model_alive(case):
    model = case.loaded()
    handle = apply_tier(model, "default")
    output(model, case.inputs())
    handle.remove()
    dying = [weakref.ref(model), *map(weakref.ref, packed_layers(model).values())]
    del model, handle
    gc.collect()
    assert not any(reference() for reference in dying)


# ---- built on the meta device ----


def test_rotary_tables_that_were_on_the_meta_device_are_made_again(tmp_path):
    with torch.device("meta"):
        transformer = qwen_image()
    assert transformer.pos_embed.pos_freqs.is_meta
    packer.write(tmp_path / "m.gguf", recipe(diffusers_table(transformer)))
    with torch.device("meta"):  # as a caller may, around everything
        load_gguf_transformer(tmp_path / "m.gguf", transformer)
    real = qwen_image().pos_embed
    for name in ("pos_freqs", "neg_freqs"):
        assert torch.equal(getattr(transformer.pos_embed, name), getattr(real, name))
    assert not any(tensor.is_meta for tensor in transformer.state_dict().values())


def test_tables_that_were_built_are_kept(tmp_path):
    transformer = qwen_image()
    tables = transformer.pos_embed
    packer.write(tmp_path / "m.gguf", recipe(diffusers_table(transformer)))
    assert load_gguf_transformer(tmp_path / "m.gguf", transformer).pos_embed is tables


@pytest.mark.parametrize("as_buffer", [True, False])
def test_other_values_on_the_meta_device_are_refused(tmp_path, as_buffer):
    with torch.device("meta"):
        transformer = z_image()
        table = torch.ones(3)
    if as_buffer:
        transformer.t_embedder.register_buffer("table", table, persistent=False)
    else:
        transformer.t_embedder.table = table
    packer.write(tmp_path / "m.gguf", recipe(native_table(transformer)))
    words = r"t_embedder \(TimestepEmbedder\) holds values that are in no file"
    with pytest.raises(UnsupportedModelError, match=words):
        load_gguf_transformer(tmp_path / "m.gguf", transformer)
    assert not packed_layers(transformer)


# ---- what does not fit ----


def without(plan, name):
    return [row for row in plan if row[0] != name]


def reshaped(plan, name, shape):
    return [(n, shape if n == name else s, q) for n, s, q in plan]


FAULTS = {
    "missing": (
        lambda plan: without(plan, "layers.1.feed_forward.w1.weight"),
        r"m\.gguf lacks 1 of the \d+ tensors that the transformer needs \(first "
        r"'layers\.1\.feed_forward\.w1\.weight'\)\. Build the transformer from the config",
    ),
    "missing bias": (
        lambda plan: without(plan, "t_embedder.mlp.2.bias"),
        r"lacks 1 of .*first 't_embedder\.mlp\.2\.bias'",
    ),
    "too many": (
        lambda plan: [*plan, ("layers.2.feed_forward.w1.weight", (256, 96), Q.Q8_0)],
        r"\(z_image, base\) has 1 tensors that the transformer has no place for \(first "
        r"'layers\.2\.feed_forward\.w1\.weight'\)",
    ),
    "packed of another shape": (
        lambda plan: reshaped(plan, "layers.1.feed_forward.w1.weight", (192, 96)),
        r"has 'layers\.1\.feed_forward\.w1\.weight' of shape \[192, 96\]; the transformer needs "
        r"\[256, 96\]\. Build it",
    ),
    "plain of another shape": (
        lambda plan: reshaped(plan, "t_embedder.mlp.0.bias", (1000,)),
        r"has 't_embedder\.mlp\.0\.bias' of shape \[1000\]; the transformer needs \[1024\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("on_meta", [True, False])
def test_a_file_that_does_not_fit_is_refused_in_words(tmp_path, fault, on_meta):
    with torch.device("meta" if on_meta else "cpu"):
        transformer = z_image()
    change, words = FAULTS[fault]
    packer.write(tmp_path / "m.gguf", change(recipe(native_table(transformer))))
    modules = dict(transformer.named_modules())
    values = {name: value.data for name, value in transformer.named_parameters()}
    with pytest.raises(GGUFFileError, match=words):
        load_gguf_transformer(tmp_path / "m.gguf", transformer)
    assert dict(transformer.named_modules()) == modules, "the transformer is as it was"
    for name, value in transformer.named_parameters():
        assert value.is_meta if on_meta else torch.equal(value, values[name])


def test_a_weight_that_no_forward_reads_is_let_be(tmp_path):
    transformer = z_image()
    plan = [*recipe(native_table(transformer)), ("norm_final.weight", (96,), Q.F32)]
    packer.write(tmp_path / "m.gguf", plan)
    load_gguf_transformer(tmp_path / "m.gguf", transformer)
    assert packed_layers(transformer)


def test_another_family_is_refused_in_words(tmp_path):
    packer.write(tmp_path / "m.gguf", recipe(diffusers_table(qwen_image())))
    words = r"m\.gguf holds a model of the family qwen_image; found a ZImageTransformer2DModel"
    with pytest.raises(GGUFFileError, match=words):
        load_gguf_transformer(tmp_path / "m.gguf", z_image())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, 2), "not a Z-Image or Qwen-Image transformer; found Linear"),
        (tiny.host_next_dit, "needs a diffusers transformer; found the comfyui class"),
    ],
)
def test_what_is_no_transformer_of_diffusers_is_refused_in_words(make, words):
    with pytest.raises(UnsupportedModelError, match=words):
        load_gguf_transformer("missing.gguf", make())


def test_a_second_file_needs_a_new_transformer(case):
    transformer = case.loaded()
    with pytest.raises(GGUFFileError, match=r"of shape \[|found a QuantLinear there"):
        load_gguf_transformer(case.path, transformer)


def test_a_file_that_is_no_gguf_says_so(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"<!doctype html>" + bytes(64))
    with pytest.raises(GGUFFileError, match="is a web page, not a GGUF file"):
        load_gguf_transformer(tmp_path / "m.gguf", z_image())


VARIANTS = {
    "edit_2511": ({"zero_cond_t": True}, {}, "needs zero_cond_t; found a transformer without"),
    "layered": (
        {"use_additional_t_cond": True, "use_layer3d_rope": True},
        {"use_additional_t_cond": True},
        "needs use_layer3d_rope; found a transformer without it",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_need_their_options(tmp_path, variant):
    right, wrong, words = VARIANTS[variant]
    with torch.device("meta"):
        transformer, other = qwen_image(**right), qwen_image(**wrong)
    table = packer.qwen_image(variant=variant)
    packer.write(tmp_path / "m.gguf", recipe(table))
    load_gguf_transformer(tmp_path / "m.gguf", transformer)
    assert len(packed_layers(transformer)) == 3 * 14
    assert transformer.pos_embed.pos_freqs.device.type == "cpu"
    with pytest.raises(GGUFFileError, match=f"Qwen-Image {variant}, which {words}"):
        load_gguf_transformer(tmp_path / "m.gguf", other)
