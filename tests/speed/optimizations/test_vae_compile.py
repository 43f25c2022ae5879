"""Compiled norms of a VAE: one kind a channel count; what somebody listens to stays."""

import contextlib

import pytest
import torch
from speed_tier.speed import probe
from speed_tier.speed.bounds import allowed_error
from speed_tier.speed.optimizations.channels_last import ChannelsLast
from speed_tier.speed.optimizations.regional_compile import CompileConfig
from speed_tier.speed.optimizations.vae_compile import VaeCompile
from speed_tier.speed.patching import PatchSet, active_patches
from speed_tier.tests.speed import tiny_vae
from speed_tier.tests.speed.optimizations.compiling import config
from speed_tier.tests.speed.tiny import relative_error
from torch import nn

EAGER = VaeCompile(CompileConfig(backend="eager", dynamic=True))
KINDS = ("kl", "wan")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_remembered():
    probe.forget()
    torch._dynamo.reset()
    yield
    probe.forget()


@contextlib.contextmanager
def installed(kind, vae, z, row=EAGER, layout=False, **more):
    given = tiny_vae.context(kind, vae, z, **{"forced": True, **more})
    assert row.check(given) is None, row.check(given)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        handles = [row.install(given)]
        if layout:
            handles.append(ChannelsLast().install(given))
        for handle in handles:
            stack.callback(handle.remove)
            stack.enter_context(handle.scope())
        stack.enter_context(PatchSet([patch for h in handles for patch in h.patches]))
        yield handles[0]


def plain(vae, z):
    with torch.no_grad():
        return vae.decode(z)


@pytest.mark.parametrize("layout", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_picture_in_every_size_from_few_compiles(kind, layout):
    vae, before = tiny_vae.MAKERS[kind](), config()
    sizes = [tiny_vae.latent(kind, *size) for size in ((8, 12), (6, 10), (12, 8), (10, 10))]
    with installed(kind, vae, sizes[0], layout=layout) as handle:
        for z in sizes:
            off = plain(tiny_vae.MAKERS[kind](), z)
            assert relative_error(vae.decode(z), off) < 1e-5
        compiled = {kind.name: kind.compiles for kind in handle.compile_facts().kinds}
    expected = {
        "kl": ["norm and SiLU 16", "norm 16", "norm and SiLU 8", "norm 8"],
        "wan": ["norm and SiLU 8"],
    }
    assert list(compiled) == expected[kind]
    assert all(1 <= count <= 2 for count in compiled.values()), compiled
    assert active_patches() == 0
    assert config() == before


def test_a_second_run_compiles_nothing():
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    for expected in (4, 0):
        with installed("kl", vae, z) as handle:
            vae.decode(z)
            assert handle.compile_facts().graphs == expected


@pytest.mark.parametrize("what", ["hook", "replaced"])
@pytest.mark.parametrize("on", ["norm1", "swish"])
def test_what_somebody_listens_to_or_replaced_stays(what, on):
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    block = vae.decoder.mid.block_1
    module = getattr(block, on)
    if what == "hook":
        module.register_forward_hook(lambda m, a, out: out * 0.5)
    else:
        forward = module.forward
        module.forward = lambda x: forward(x) * 0.5
    off = plain(vae, z)
    with installed("kl", vae, z) as handle:
        taken = [patch.target for patch in handle.patches]
        assert relative_error(vae.decode(z), off) < 1e-5
    assert block.swish not in taken
    assert (block.norm1 in taken) is (on == "swish")
    assert vae.decoder.up[0].block[0].swish in taken


def test_a_hook_that_comes_after_the_first_run_is_heard():
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    with installed("kl", vae, z):
        vae.decode(z)
    vae.decoder.mid.block_1.norm2.register_forward_hook(lambda m, a, out: out * 0.5)
    off = plain(vae, z)
    with installed("kl", vae, z):
        assert relative_error(vae.decode(z), off) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_activations_beyond_fp16_stay_finite_where_they_are_finite_in_off(dtype):
    vae, z = tiny_vae.wan().to(dtype), tiny_vae.latent("wan").to(dtype)
    norm = vae.decoder.middle[0].residual[0]
    # 8 channels of 60000: the sum of their squares is 2.9e10, their norm 170000.
    vae.decoder.conv1.bias.fill_(60000.0)
    off = plain(vae, z)
    assert off.isfinite().all()
    with installed("wan", vae, z):
        got = vae.decode(z)
    assert got.isfinite().all()
    assert norm.gamma.dtype == dtype


class Casts:
    """A host that keeps the weights of every norm elsewhere, and hands them over in a call."""

    def __init__(self, vae):
        self.handed_over = 0
        self.kept = {}
        for module in vae.modules():
            if isinstance(module, nn.GroupNorm):
                self.kept[module] = (module.weight.data.clone(), module.bias.data.clone())
                module.weight.data.fill_(float("nan"))
                module.comfy_cast_weights = True

    @contextlib.contextmanager
    def parameters(self, norm, x):
        self.handed_over += 1
        weight, bias = self.kept[norm]
        yield weight.to(x), bias.to(x)


def test_weights_that_the_host_hands_over_in_the_call():
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    for norm in (m for m in vae.modules() if isinstance(m, nn.GroupNorm)):
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-0.5, 0.5)
    off = plain(vae, z)
    host = Casts(vae)
    given = tiny_vae.context("kl", vae, z)
    assert "cast, patched or loaded at each call" in EAGER.check(given)
    with installed("kl", vae, z, norm_parameters=host.parameters) as handle:
        assert relative_error(vae.decode(z), off) < 1e-5
        kinds = handle.compile_facts().kinds
    assert host.handed_over == 6
    assert kinds[0].name == "norm and SiLU 16, weights from the host"
    assert sum(kind.compiles for kind in kinds) == len(kinds)


def test_a_weight_that_is_cast_from_now_on_is_not_read_from_the_module():
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    with installed("kl", vae, z) as handle:
        vae.decode(z)
        vae.decoder.norm_out.comfy_cast_weights = True
        vae.decode(z)
    assert (
        handle.note == "1 block calls ran eager: its weight is cast, patched or loaded at the call"
    )


def test_a_compile_that_fails_is_plain_and_says_why(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no such card")

    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    row = VaeCompile(CompileConfig(backend=broken, dynamic=True))
    off = plain(vae, z)
    given = tiny_vae.context("kl", vae, z)
    handle = row.install(given)
    assert "no such card" in handle.fell_back
    assert handle.patches == ()
    handle.remove()
    with torch.no_grad():
        assert torch.equal(vae.decode(z), off)
    assert "did not compile earlier" in row.check(given)
    with installed("kl", vae, z):  # another backend is another try
        assert relative_error(vae.decode(z), off) < 1e-5


def test_what_makes_it_step_aside():
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    assert "not measured" in EAGER.check(tiny_vae.context("kl", vae))
    assert "compiles this VAE" in EAGER.check(tiny_vae.context("kl", vae, z, compiled_by="a node"))
    for module in vae.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_hook(lambda m, a, out: None)
    assert "every norm" in EAGER.check(tiny_vae.context("kl", vae, z))


def test_what_does_not_pay_is_out_and_not_compiled_again(tmp_path, monkeypatch):
    vae, z = tiny_vae.kl(), tiny_vae.latent("kl")
    given = tiny_vae.context("kl", vae, z, state_folder=tmp_path)
    monkeypatch.setattr(probe, "measure", lambda *a, **k: probe.Figures(5.0, 6.0, "", 0.1))
    handle = EAGER.install(given)
    assert handle.patches == () and "does not pay here: 6.00 ms with it" in handle.not_used
    handle.remove()
    probe.forget()
    assert "does not pay here" in EAGER.check(given)


@pytest.mark.parametrize("kind", KINDS)
def test_inductor_is_as_near_to_fp32_as_off(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    vae, z = tiny_vae.MAKERS[kind]().bfloat16(), tiny_vae.latent(kind)
    for name, module in vae.decoder.named_modules():
        if isinstance(module, nn.GroupNorm) and "mid.block_1" not in name:
            module.register_forward_hook(lambda m, a, out: None)  # one kind is enough to build
    exact = plain(tiny_vae.MAKERS[kind]().bfloat16().float(), z.bfloat16().float())
    z = z.bfloat16()
    off = plain(vae, z)
    # Half a minute for headers that a test uses once.
    quick = torch._inductor.config.patch(cpp_cache_precompile_headers=False)
    with quick, installed(kind, vae, z, VaeCompile(), layout=True) as handle:
        got = vae.decode(z)
        assert handle.compile_facts().graphs == len(handle.compile_facts().kinds) == 1
    assert handle.fell_back == ""
    assert not torch.equal(got, off), "nothing was compiled"
    assert relative_error(got, exact) <= allowed_error(relative_error(off, exact), torch.bfloat16)
