"""The losses of packed samples against NumPy, torch and the original's own gradients; gradient
accumulation, rematerialisation and what the head is run on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from combkv_jax import model, planner, weights
from combkv_jax.chunking import IGNORED, Sample, pack
from combkv_jax.config import plain
from combkv_jax.errors import RequestError
from combkv_jax.training import objectives, samples, step
from combkv_jax.training.objectives import PackedLoss
from tests import tiny

LIMITS = samples.Limits(tokens=40, history=60, samples=4, chunks=9, alone=40, together=10**6)
SHAPES = [[(9, [13, 7]), (17, [5]), (6, [2, 13])], [(21, [13, 13, 8]), (12, [4])]]


def drawn(rng, shapes, vocab=97):
    """Packs of random samples; the first label counts for nothing, and half of the others."""
    packs = []
    for shape in shapes:
        made = []
        for length, chunks in shape:
            tokens = rng.integers(0, vocab, length)
            labels = np.where(rng.random(length) < 0.5, tokens, IGNORED)
            made.append(Sample(tokens, labels, [rng.integers(0, vocab, n) for n in chunks]))
        packs.append(made)
    return packs


def case(form):
    """(config, trained, frozen, packs of samples)."""
    rng = np.random.default_rng(31)
    config = tiny.comb_config(form, (0, 1), num_hidden_layers=2)
    arrays = {n: jnp.asarray(x) for n, x in tiny.random_parameters(rng, config).items()}
    return config, *step.split(arrays), drawn(rng, SHAPES)


# What is compiled is shared where objective and shapes are the same: compiling takes the time here.
gradients = jax.jit(step.gradients, static_argnums=3)
WEIGHTS = (1.0, 0.7, 0.4)  # of the NLL and both KLs


def plain_terms(config, arrays, packs):
    """(sums over labels of NLL and of both KLs, labels) in float64, from all logits of the packed
    model and of a plain Llama that has each sample's history and recent tokens as one text."""
    made = [sample for some in packs for sample in some]
    llama = {name: x for name, x in arrays.items() if name.startswith("decoder.")}
    whole = [np.concatenate([*sample.chunks, sample.tokens]) for sample in made]
    borders = np.cumsum([0, *map(len, whole)])
    full = {"input_ids": np.concatenate(whole), "cu_seqlens_q": borders.astype(np.int32)}
    theirs = tiny.logits(tiny.build(plain(config.text), llama), full)
    batch = pack(made)
    ours = tiny.logits(tiny.build(config, arrays), batch)
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    ours, theirs = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (ours, theirs))
    sums, labels = np.zeros(3), 0
    for number, sample in enumerate(made):
        for t, label in enumerate(sample.labels[1:]):
            if label != IGNORED:
                p = theirs[borders[number + 1] - len(sample.tokens) + t]
                q = ours[batch["cu_seqlens_q"][number] + t]
                sums += [-q[label], np.exp(p) @ (p - q), np.exp(q) @ (q - p)]
                labels += 1
    return sums, labels


@pytest.mark.parametrize("form", ["lse", "tanh"])
def test_terms_are_those_of_all_logits_and_of_the_full_context(form):
    config, trained, frozen, packs = case(form)
    expected, labels = plain_terms(config, {**frozen, **trained}, packs)
    batch = step.accumulated([objectives.stack(packs, LIMITS, taught=True)])
    value, gradient, terms = gradients(trained, frozen, batch, PackedLoss(config, *WEIGHTS))
    np.testing.assert_allclose(np.asarray(terms[0]) * labels, expected, rtol=2e-4)
    np.testing.assert_allclose(value, expected @ WEIGHTS / labels, rtol=2e-4)
    assert all(np.abs(g).max() > 0 for g in gradient.values())


def test_steps_lower_the_loss_of_the_original_form_and_leave_the_decoder():
    config, trained, frozen, packs = case("tanh")
    batch = step.accumulated([objectives.stack(packs, LIMITS, taught=False)])
    optimise = step.optimiser((step.Rates(3e-3, 1e-2, 15, 1, 0.0),), 1.0, weight_decay=0.01)
    state = step.State(trained, optimise.init(trained), jnp.int32(0))
    losses = []
    for _ in range(15):
        state, measured = step.train_step(state, frozen, batch, PackedLoss(config), optimise)
        losses.append(float(measured.loss))
    assert losses[-1] < 0.8 * losses[0]


def test_cross_entropy_and_kl_are_torch_s():
    torch = pytest.importorskip("torch", exc_type=ImportError)
    rng = np.random.default_rng(3)
    logits, full = rng.normal(0, 3, (2, 1, 11, 23)).astype(np.float32)
    target = rng.integers(0, 23, (1, 11))
    target[0, [2, 7]] = IGNORED
    ours = PackedLoss(tiny.comb_config("lse"), forward=1.0)._terms(target, logits, full)
    p, q = (torch.log_softmax(torch.tensor(x[0], dtype=torch.float64), -1) for x in (full, logits))
    counts = torch.tensor(target[0] != IGNORED)
    kl = torch.nn.functional.kl_div
    theirs = [
        torch.nn.functional.nll_loss(q, torch.tensor(target[0]), reduction="sum"),
        kl(q[counts], p[counts], reduction="sum", log_target=True),
        kl(p[counts], q[counts], reduction="sum", log_target=True),
    ]
    np.testing.assert_allclose(ours, [float(x) for x in theirs], rtol=1e-5)


def test_kl_is_nothing_where_the_model_is_the_full_one():
    # Every layer keeps the history, projections are copies and there is one whole chunk.
    rng = np.random.default_rng(4)
    config = tiny.comb_config("lse", (0, 1), num_hidden_layers=2)
    arrays = tiny.untrained(config, tiny.random_llama(rng, config.text))
    trained, frozen = step.split({n: jnp.asarray(x) for n, x in arrays.items()})
    packs = drawn(rng, [[(9, [13])], [(17, [13])]])
    batch = step.accumulated([objectives.stack(packs, LIMITS, taught=True)])
    _, _, terms = gradients(trained, frozen, batch, PackedLoss(config, *WEIGHTS))
    assert terms[0, 0] > 1
    np.testing.assert_allclose(terms[0, 1:], 0, atol=1e-4)


def test_loss_and_gradients_are_the_original_s_own(golden_folder):
    config, arrays, _ = weights.load(golden_folder, "float32")
    data = load_file(golden_folder / "io.safetensors")
    trained, frozen = step.split(arrays)
    labels = data["shift_labels"][0]
    column = np.flatnonzero(labels != IGNORED).astype(np.int32)
    pad = (0, -len(column) % objectives.HEAD)
    packs = objectives.Packs(
        *(data[name].reshape(-1) for name in objectives.Packs._fields[:5]),
        np.pad(column, pad),
        np.pad(labels[column], pad, constant_values=IGNORED),
    )
    batch = jax.tree.map(lambda x: x.astype(np.int32)[None, None], packs)
    value, gradient, _ = gradients(trained, frozen, batch, PackedLoss(config))
    np.testing.assert_allclose(value, data["loss"][0], rtol=0, atol=1e-4)
    seen = set()
    for name, theirs in data.items():
        ours = name.startswith("grad.") and tiny.from_combllama_name(name.removeprefix("grad."))
        if ours in gradient:
            seen.add(ours)
            error = np.linalg.norm(gradient[ours] - theirs) / np.linalg.norm(theirs)
            assert error < 1e-3, (ours, error)
    assert any(name.startswith("encoder.layers") for name in seen)
    assert any(name.startswith("encoder.k_proj") for name in seen)
    assert any(name.endswith("cross_attn_attn_gate") for name in seen)


def assert_same_gradient(ours, wanted):
    """To 1e-5 as a whole; a gate's own is a sum that mostly cancels."""
    norms = [
        np.sqrt(sum(np.sum(np.square(x)) for x in tree))
        for tree in ([ours[name] - x for name, x in wanted.items()], list(wanted.values()))
    ]
    assert norms[0] < 1e-5 * norms[1]
    for name, x in wanted.items():
        np.testing.assert_allclose(ours[name], x, atol=5e-4 * np.abs(x).max(), err_msg=name)


@pytest.mark.parametrize("form", ["lse", "tanh"])
def test_accumulated_gradients_are_those_of_one_larger_batch(form):
    config, trained, frozen, packs = case(form)
    objective = PackedLoss(config, *WEIGHTS)
    many = step.accumulated([objectives.stack([made], LIMITS, taught=True) for made in packs])
    one = step.accumulated([objectives.stack(packs, LIMITS, taught=True)])
    value, gradient, _ = gradients(trained, frozen, many, objective)
    expected, wanted, _ = gradients(trained, frozen, one, objective)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_same_gradient(gradient, wanted)


def test_remat_changes_no_gradient():
    config, trained, frozen, packs = case("tanh")
    batch = step.accumulated([objectives.stack(packs, LIMITS, taught=True)])
    value, gradient, _ = gradients(trained, frozen, batch, PackedLoss(config, *WEIGHTS))
    plain = PackedLoss(config, *WEIGHTS, remat=False)
    expected, wanted, _ = gradients(trained, frozen, batch, plain)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_same_gradient(gradient, wanted)


def abstract_case(config, length, limits):
    """(trained, frozen, batch) of one pack, as shapes."""
    abstract = model.parameters(model.abstract(config, jnp.float32))
    trained = {name: x for name, x in abstract.items() if step.is_trained(name)}
    frozen = {name: x for name, x in abstract.items() if not step.is_trained(name)}
    packs = drawn(np.random.default_rng(0), [[(length, [13])]])
    batch = step.accumulated([objectives.stack(packs, limits, taught=False)])
    return trained, frozen, batch


def scratch(mesh, layers, remat):
    """Bytes of scratch memory of a gradient whose first layer is trained, as compiled for a GPU (on
    a CPU, XLA puts the repeated work together again)."""
    limits = samples.Limits(256, 64, 4, 9, 256, 10**6)
    changes = {"num_hidden_layers": layers, "intermediate_size": 512, "cross_layers": (0,)}
    config = tiny.comb_config("lse", **changes)
    case = abstract_case(config, 256, limits)
    where = NamedSharding(mesh, P())
    case = planner.placed(case, jax.tree.map(lambda _: where, case))
    with planner.no_compile_cache():
        lowered = gradients.lower(*case, PackedLoss(config, remat=remat))
        compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": "0"})
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.optimized
@pytest.mark.once
def test_remat_keeps_little_more_than_the_input_of_a_layer():
    try:
        mesh = planner.gpu_mesh("h200")
    except RequestError as error:
        pytest.skip(str(error))
    state = 256 * 40 * 4  # one hidden state of the pack, float32
    more = scratch(mesh, 4, remat=True)
    assert (more - scratch(mesh, 2, remat=True)) / 2 < 8 * state
    assert scratch(mesh, 4, remat=False) - more > 3 * 32 * state  # of all layers but the first


def test_the_head_is_run_where_a_label_is():
    config = tiny.comb_config("lse", vocab_size=1009)
    limits = samples.Limits(2 * objectives.HEAD, 64, 4, 9, 512, 10**6)
    case = abstract_case(config, 30, limits)
    text = str(jax.make_jaxpr(step.gradients, static_argnums=3)(*case, PackedLoss(config)))
    assert f"f32[1,{objectives.HEAD},1009]" in text
    assert f"{2 * objectives.HEAD},1009]" not in text


def test_gates_have_no_weight_decay_and_a_rate_of_their_own():
    config = tiny.comb_config("tanh", (0,), num_hidden_layers=1)
    arrays = tiny.random_parameters(np.random.default_rng(0), config)
    trained, _ = step.split({n: jnp.asarray(x) for n, x in arrays.items()})
    assert {n.split(".")[0] for n in trained} == {"history", "encoder"}
    optimise = step.optimiser((step.Rates(1e-3, 1e-2, 10, 1, 0.0),), 1.0, weight_decay=0.5)
    zero = jax.tree.map(jnp.zeros_like, trained)
    update, begun = jax.jit(optimise.update), optimise.init(trained)
    moved, _ = update(zero, begun, trained)
    for name, x in trained.items():
        decayed = -1e-3 * 0.5 * x if x.ndim > 1 else 0 * x
        np.testing.assert_allclose(moved[name], decayed, rtol=1e-5, atol=1e-9, err_msg=name)
    moved, _ = update(jax.tree.map(jnp.ones_like, trained), begun, zero)
    for name, x in moved.items():
        rate = 1e-2 if "gate" in name.rsplit(".", 1)[-1] else 1e-3
        np.testing.assert_allclose(x, -rate, rtol=1e-3, err_msg=name)


def test_stages_have_their_own_rates():
    stages = (step.Rates(1e-2, 1e-1, 10, 2, 0.5), step.Rates(1e-3, 1e-4, 6, 1, 0.0))
    optimise = step.optimiser(stages, 1e9)
    trained = {"history.0.q_proj.weight": jnp.ones(()), "history.0.bias": jnp.ones(())}
    state, moves = optimise.init(trained), []
    for _ in range(16):
        update, state = optimise.update(jax.tree.map(jnp.ones_like, trained), state, trained)
        moves.append([-float(update[name]) for name in trained])
    np.testing.assert_allclose(moves[2], [1e-2, 1e-1], rtol=1e-3)
    assert moves[9][0] < 1e-3
    np.testing.assert_allclose(moves[10:15], [[1e-3, 1e-4]] * 5, rtol=1e-3)
