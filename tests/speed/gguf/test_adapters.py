"""LoRA beside a packed weight: what is added, against merging in float64, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from speed_tier.speed.gguf import adapters as module
from speed_tier.speed.gguf.adapters import Adapters, LowRankTerm, low_rank_terms
from speed_tier.tests.speed.gguf.layers import HostAdapter, Lora, Random, fresh_seed, merged

ROWS, COLS = 96, 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def rng():
    return Random(fresh_seed())


def lora(rng, rank=4, rows=ROWS, cols=COLS, **more):
    return Lora(rng.tensor(rows, rank) / rank, rng.tensor(rank, cols), **more)


def q_k_v(rng):
    """A LoRA for each third of a fused weight, as one made for separate q, k, v comes."""
    third = ROWS // 3
    return [
        lora(rng, rank, third, alpha=alpha).patch(strength, offset=(0, part * third, third))
        for part, (rank, alpha, strength) in enumerate([(4, None, 1.0), (4, 8.0, 0.7), (2, 1.0, 2)])
    ]


CASES = {
    "one": lambda rng: [lora(rng).patch()],
    "alpha": lambda rng: [lora(rng, 8, alpha=2.0).patch(0.75)],
    "alpha as a tensor": lambda rng: [lora(rng, 8, alpha=torch.tensor(2.0)).patch(0.75)],
    "several": lambda rng: [
        lora(rng, rank, alpha=alpha).patch(strength)
        for rank, alpha, strength in [(1, None, 1.0), (4, 2.0, -0.5), (16, 16.0, 1.5)]
    ],
    "strength 0": lambda rng: [lora(rng).patch(0.0)],
    "the same twice": lambda rng: [lora(rng).patch(0.5)] * 2,
    "q, k, v": q_k_v,
    "q, k, v and all": lambda rng: [*q_k_v(rng), lora(rng, 3).patch(0.3)],
    "overlapping rows": lambda rng: [
        lora(rng, 2, 40).patch(offset=(0, 0, 40)),
        lora(rng, 3, 40).patch(offset=(0, 30, 40)),
    ],
    "a convolution's": lambda rng: [
        Lora(rng.tensor(ROWS, 4, 1, 1) / 4, rng.tensor(4, COLS, 1, 1)).patch()
    ],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_merging_gives(rng, case, dtype):
    patches = CASES[case](rng)
    terms = low_rank_terms(patches, (ROWS, COLS))
    assert len(terms) == len(patches)
    dense = rng.tensor(ROWS, COLS, dtype=torch.float64)
    x = rng.tensor(2, 5, COLS, dtype=dtype)
    expected = F.linear(x.double(), merged(dense, patches))
    exact_base = F.linear(x.double(), dense)
    out = exact_base.to(dtype)
    Adapters(terms).add_to(out, x)
    # Every product's size, for the roundings of the factors, of the middle and of each sum.
    size = F.linear(x.double().abs(), dense.abs())
    for term in terms:
        part = F.linear(
            F.linear(x.abs().double(), term.down.abs().double()), term.up.abs().double()
        )
        size[..., slice(*term.rows)] += abs(term.scale) * part
    wrong = (out.double() - expected).abs() - 3 * torch.finfo(dtype).eps * size
    assert wrong.max() <= 0, f"{wrong.max():.2e} over the bound"
    if case != "strength 0":
        assert tuple((expected - exact_base).abs().amax((0, 1)) > 0) == tuple(changed_rows(terms))


def changed_rows(terms):
    rows = torch.zeros(ROWS, dtype=torch.bool)
    for term in terms:
        rows[slice(*term.rows)] = True
    return rows


@pytest.mark.parametrize("case", CASES)
def test_merge_into_a_dense_weight(rng, case):
    patches = CASES[case](rng)
    dense = rng.tensor(ROWS, COLS)
    expected = merged(dense.double(), patches).float()
    got = Adapters(low_rank_terms(patches, (ROWS, COLS))).merge_into(dense)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_merge_through_a_rewrite():
    dense = torch.ones(2, 3)
    assert torch.equal(Adapters(rewrite=lambda weight: weight * 3).merge_into(dense), dense * 3)
    assert Adapters(rewrite=lambda weight: weight).n_bytes == 0


def test_terms_or_a_rewrite_but_not_both(rng):
    terms = low_rank_terms([lora(rng).patch()], (ROWS, COLS))
    with pytest.raises(ValueError, match="low-rank terms or a rewrite; found both"):
        Adapters(terms, lambda weight: weight)


def test_one_vector_and_any_leading_dimensions(rng):
    terms = low_rank_terms(q_k_v(rng), (ROWS, COLS))
    x = rng.tensor(2, 3, 4, COLS)
    out = torch.zeros(2, 3, 4, ROWS)
    Adapters(terms).add_to(out, x)
    alone = torch.zeros(ROWS)
    Adapters(terms).add_to(alone, x[1, 2, 3])
    torch.testing.assert_close(alone, out[1, 2, 3])


def test_no_terms_leave_the_output(rng):
    out = rng.tensor(2, ROWS)
    before = out.clone()
    Adapters().add_to(out, rng.tensor(2, COLS))
    assert torch.equal(out, before)


def test_factors_are_built_once_for_a_device_and_dtype(rng, monkeypatch):
    built = []
    join = module._join
    monkeypatch.setattr(module, "_join", lambda terms, *key: built.append(key) or join(terms, *key))
    adapters = Adapters(low_rank_terms(q_k_v(rng), (ROWS, COLS)))
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32):
        adapters.add_to(torch.zeros(3, ROWS, dtype=dtype), rng.tensor(3, COLS, dtype=dtype))
    adapters.add_to(torch.zeros(3, ROWS, device="meta"), torch.zeros(3, COLS, device="meta"))
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert built == [(cpu, torch.bfloat16), (cpu, torch.float32), (meta, torch.float32)]


def test_terms_on_the_same_rows_are_one_product_each_way(rng):
    """However many LoRA there are: one product down, one up for each range of rows."""
    patches = [lora(rng, rank).patch() for rank in (2, 3, 4)] + q_k_v(rng)
    terms = low_rank_terms(patches, (ROWS, COLS))
    down, slices = Adapters(terms)._placed(torch.device("cpu"), torch.float32)
    assert down.shape == (2 + 3 + 4 + 4 + 4 + 2, COLS)
    assert [(part.rows, tuple(part.up.shape)) for part in slices] == [
        ((0, 96), (96, 9)),
        *(((0, 32), (32, 4)), ((32, 64), (32, 4)), ((64, 96), (32, 2))),
    ]


def test_a_strength_is_rounded_with_its_factor_once(rng):
    """Scaled in fp32, then rounded: a LoRA kept in fp32 is not rounded twice."""
    up = rng.tensor(ROWS, 4)
    term = LowRankTerm(up, rng.tensor(4, COLS), 0.333)
    _, (part,) = Adapters([term])._placed(torch.device("cpu"), torch.bfloat16)
    assert torch.equal(part.up, (up * 0.333).bfloat16())


def test_bytes_are_counted_as_on_the_device(rng):
    terms = low_rank_terms([lora(rng, 4).patch(), lora(rng, 2).patch()], (ROWS, COLS))
    adapters = Adapters(terms)
    assert adapters.n_bytes == 2 * (4 + 2) * (ROWS + COLS)
    down, slices = adapters._placed(torch.device("cpu"), torch.bfloat16)
    assert adapters.n_bytes == down.nbytes + sum(part.up.nbytes for part in slices)


def test_a_term_keeps_the_hosts_tensors(rng):
    one = lora(rng)
    (term,) = low_rank_terms([one.patch()], (ROWS, COLS))
    assert term.up.data_ptr() == one.up.data_ptr()
    assert term.down.data_ptr() == one.down.data_ptr()


def test_no_patches_are_no_terms():
    assert low_rank_terms([], (ROWS, COLS)) == []


def test_weights_of_an_older_host_lack_the_reshape(rng):
    up, down = rng.tensor(ROWS, 4), rng.tensor(4, COLS)
    adapter = HostAdapter((up, down, 2.0, None, None))
    (term,) = low_rank_terms([(1.0, adapter, 1.0, None, None)], (ROWS, COLS))
    assert term.scale == 0.5


REFUSED = {
    "mid": lambda rng: lora(rng, more=(rng.tensor(4, 4, 3, 3), None, None)).patch(),
    "dora": lambda rng: lora(rng, more=(None, rng.tensor(ROWS, 1), None)).patch(),
    "reshape": lambda rng: lora(rng, more=(None, None, [ROWS, COLS + 8])).patch(),
    "function": lambda rng: lora(rng).patch(function=lambda change: change * 2),
    "strength of the model": lambda rng: lora(rng).patch(model_strength=0.5),
    "columns": lambda rng: lora(rng, cols=8).patch(offset=(1, 0, 8)),
    "beyond the end": lambda rng: lora(rng, rows=32).patch(offset=(0, 80, 32)),
    "another shape of as many": lambda rng: lora(rng, rows=COLS, cols=ROWS).patch(),
    "vectors": lambda rng: Lora(rng.tensor(ROWS), rng.tensor(COLS)).patch(),
    "another kind": lambda rng: lora(rng, name="lokr").patch(),
    "too few weights": lambda rng: (1.0, HostAdapter((1, 2)), 1.0, None, None),
    "a difference": lambda rng: (1.0, ("diff", (rng.tensor(ROWS, COLS),)), 1.0, None, None),
    "a nested list": lambda rng: (1.0, [rng.tensor(ROWS, COLS)], 1.0, None, None),
}


MISFITS = {
    "rows": lambda rng: lora(rng, rows=ROWS - 1).patch(),
    "cols": lambda rng: lora(rng, cols=COLS + 1).patch(),
    "ranks that differ": lambda rng: Lora(rng.tensor(ROWS, 4), rng.tensor(5, COLS)).patch(),
    "the slice's rows": lambda rng: lora(rng, rows=16).patch(offset=(0, 0, 32)),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_lora_of_another_models_width_is_left_out_and_said_once(rng, caplog, case):
    fitting = lora(rng).patch()
    terms = low_rank_terms([fitting, MISFITS[case](rng)], (ROWS, COLS))
    assert len(terms) == 1
    assert torch.equal(terms[0].up, fitting[1].weights[0])
    (record,) = caplog.records
    assert "does not fit a weight of" in record.message
    assert record.message.endswith("left out. Use a LoRA made for this model.")
    with_more = [lora(rng, name="lokr").patch(), MISFITS[case](rng)]
    assert low_rank_terms(with_more, (ROWS, COLS)) is None


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_more_than_low_rank_is_left_to_the_host(rng, case):
    """All of it: patches are applied in order, so one that is refused takes the others along."""
    refused = REFUSED[case](rng)
    assert low_rank_terms([refused], (ROWS, COLS)) is None
    assert low_rank_terms([lora(rng).patch(), refused, lora(rng).patch()], (ROWS, COLS)) is None
