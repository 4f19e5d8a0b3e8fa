"""A step does the same on every mesh, under every remat policy, and in pieces."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention import AttentionOptions, UnsupportedAttention
from maxdiffusion.attention.registry import ATTENTION_OPS, differentiable_names
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.training.loss import (
    ExpertSchedule,
    NoiseLevels,
    Remat,
    RematPolicy,
    TrainedExperts,
)
from maxdiffusion.training.step import (
    Clipping,
    Decay,
    LearningRate,
    StepReport,
    TrainState,
    first_state,
    make_step,
)
from maxdiffusion.training.text import TEXT_ENCODER
from maxdiffusion.training.wan import BatchShape, BucketedTraining, WanTraining
from tests.training.tiny_training import (
    CLIPS,
    LATENT,
    alone,
    batch_of,
    flat,
    losses_alone,
    losses_of,
    mesh_of,
    optimiser,
    state_of,
    training,
)

# Sums in float32 in another order: a loss is a mean over 1,000 values, each from a network of
# depth 2, so that some 50 roundings of 6e-8 remain below this. A step adds little: Adam moves every
# weight by at most the rate, and turns the sign only of a move whose gradient is below its own
# error. So the loss moves by rate x sum |error of a gradient|, of N weights at most rate x sqrt(N)
# x norm x 3e-6, which is 4e-6 for 2e-3, 5e5 weights and a norm of 1 (clipped).
RTOL = 1e-5
EXPERT = "transformer"


def test_an_attention_without_gradient_is_refused_before_the_first_step():
    run = training(attention="ulysses_ring_custom_fp8")
    with pytest.raises(UnsupportedAttention, match="our flash kernel has no gradient in fp8"):
        run.block_attention  # noqa: B018 - planned when asked for


def test_few_tokens_train_with_dot_product_where_a_name_gives_way():
    limit = AttentionOptions(flash_min_seq_length=4096)
    run = training(attention="ulysses_custom", attention_options=limit)
    assert run.block_attention.self_attention.runs == "dot_product"


# A name for every scheme, and the mesh that it is trained on.
TRAINED = {
    "dot_product": {"data": 2, "tensor": 4},
    "flash": {"fsdp": 4, "ring": 2},
    "tokamax_ring_custom": {"fsdp": 2, "ring": 4},
    "ulysses_custom_fixed_m": {"fsdp": 2, "ulysses": 4},
    "ulysses_ring_custom": {"fsdp": 2, "ring": 2, "ulysses": 2},
    "ulysses_ring_custom_bidir": {"ring": 4, "ulysses": 2},
}


def test_every_scheme_with_a_gradient_is_trained():
    """That of `ulysses_ring` is what `ulysses_ring_custom` becomes where tokens are few."""
    schemes = {ATTENTION_OPS[name].scheme for name in differentiable_names()}
    few = ATTENTION_OPS["ulysses_ring"].scheme
    assert schemes - {few} == {ATTENTION_OPS[name].scheme for name in TRAINED}


@pytest.mark.slow
@pytest.mark.parametrize("attention", TRAINED)
def test_losses_are_the_same_on_one_device_and_eight(attention, monkeypatch):
    op, sizes = ATTENTION_OPS[attention], TRAINED[attention]
    if attention == "ulysses_ring_custom":  # which overlaps for more tokens than there are here
        scheme = replace(op.scheme, queries=replace(op.scheme.queries, query_tile=1))
        monkeypatch.setitem(ATTENTION_OPS, attention, replace(op, scheme=scheme))
    run = training(mesh=mesh_of(**sizes), attention=attention)
    overlapped = "overlapped" in run.block_attention.describe()
    assert overlapped == (attention == "ulysses_ring_custom")
    losses, state = losses_of(run, run.step(EXPERT))
    np.testing.assert_allclose(losses, losses_alone(), rtol=RTOL)
    kernel = state.values[EXPERT]["blocks.ffn.up.kernel"]
    held = kernel.addressable_shards[0].data.size
    assert held * sizes.get("fsdp", 1) * sizes.get("tensor", 1) == kernel.size


@pytest.mark.slow
def test_training_learns_the_same_each_time():
    run, step = alone()
    ends = []
    for _ in range(2):
        state, losses = state_of(run), []
        for number in range(30):
            state, report = step(state, batch_of(number % 2))
            losses.append(float(report.loss))
        assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
        ends.append(flat(state))
    assert_same(*ends)
    assert all(np.isfinite(value).all() for value in ends[0].values())


def assert_same(one, other):
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], err_msg=path)


@pytest.fixture(scope="module")
def gradients():
    """How many numbers the backward pass of one loss keeps under a policy, and its gradient."""

    def under(policy, *, computed=True):
        run = training(remat=policy)
        values, part = state_of(run).values[EXPERT], run.models[EXPERT]
        latents = jnp.asarray(batch_of(0).latents)
        rows = jnp.ones((len(latents), run.batch.caption_tokens + 1, 16))

        def of(values):
            model = part.merge(values)
            return jnp.sum(
                jnp.sin(
                    model(
                        latents,
                        jnp.arange(1.0, 1 + len(latents)),
                        model.text_keys_values(rows),
                        attention=run.block_attention,
                        layout=run.layout,
                        wrap_block=policy.wrap_block,
                    )
                )
            )

        with jax.set_mesh(run.mesh):
            kept = jax.eval_shape(lambda v: jax.vjp(of, v)[1], values)
            found = jax.jit(jax.grad(of))(values) if computed else {}
        return flat(found), sum(leaf.size for leaf in jax.tree.leaves(kept))

    return under


@pytest.mark.slow
def test_remat_changes_what_is_kept_and_not_the_gradient(gradients):
    plain, most = gradients(RematPolicy())
    kept = {}
    # One policy that recomputes all, one by names, one that offloads; each compiles for seconds.
    computed = (Remat.FULL, Remat.CUSTOM, Remat.OFFLOAD_MATMUL_WITHOUT_BATCH)
    for kind in {*Remat} - {Remat.NONE}:
        policy = RematPolicy(kind=kind, saved=("attn_output",))
        found, kept[kind] = gradients(policy, computed=kind in computed)
        for path, value in found.items():
            scale = np.abs(plain[path]).max()
            np.testing.assert_allclose(value, plain[path], atol=RTOL * scale, err_msg=path)
    assert max(kept.values()) < most
    assert kept[Remat.FULL] < kept[Remat.CUSTOM] < most
    assert kept[Remat.FULL] < kept[Remat.MATMUL_WITHOUT_BATCH]


def test_names_keep_the_tokens_of_every_layer():
    """Only traced: each name keeps one array of tokens.

    Less what only the operation that makes it needs, such as a bias.
    """

    def kept(saved):
        run = training(remat=RematPolicy(kind=Remat.CUSTOM, saved=saved))
        values = state_of(run).values

        def loss(values):
            return run.loss(EXPERT)(values, batch_of(0), jax.random.key(0))[0]

        with jax.set_mesh(run.mesh):
            leaves = jax.tree.leaves(jax.eval_shape(lambda v: jax.vjp(loss, v)[1], values))
        return sum(leaf.size for leaf in leaves), run

    names = ("attn1_change", "attn2_change", "ffn_change", "query_proj")
    (least, run), (more, _) = kept(()), kept(names)
    config, batch = run.transformer, run.batch
    tokens = batch.clips * config.tokens(batch.latent) * config.model_dim
    whole = len(names) * config.layers * tokens
    assert 0.95 * whole < more - least <= whole


def test_unknown_names_of_remat_are_refused():
    with pytest.raises(ProblemsFound, match=r"names_which_can_be_saved='ffn'.*attn_output"):
        RematPolicy(kind=Remat.CUSTOM, saved=("ffn",))


@pytest.mark.parametrize(
    ("policy", "attention", "said"),
    [
        (RematPolicy(kind=Remat.ATTENTION), "flash", "remat ATTENTION"),
        (RematPolicy(kind=Remat.FULL), "dot_product", "remat FULL"),
        (
            RematPolicy(kind=Remat.ATTENTION),
            "dot_product",
            "remat ATTENTION (no attention_out or attention_log_sum in dense einsum: the backward "
            "pass computes this attention again)",
        ),
    ],
)
def test_the_report_says_where_remat_has_nothing_to_keep(policy, attention, said):
    plan = training(attention=attention, remat=policy).block_attention.self_attention
    assert policy.describe(plan) == said


@pytest.mark.slow
def test_each_size_of_clips_has_its_own_step(monkeypatch):
    taken = []
    zero = jnp.zeros(())
    report = StepReport(loss=zero, gradient_norm=zero, learning_rate=zero, figures=None)
    state = TrainState(
        step=jnp.zeros((), jnp.int32), key=jax.random.key(0), values={}, ema={}, moments={}
    )

    def named(self, name, frozen):
        def step(state, batch):
            taken.append((name, self.batch.latent, self.block_attention))
            return state, report

        return step

    monkeypatch.setattr(WanTraining, "step", named)
    buckets = BucketedTraining(training=training(), latents=[LATENT, (3, 2, 4)])
    step = buckets.bucketed_step(EXPERT)
    for latent, tokens in ((LATENT, 8), ((3, 2, 4), 6)):
        batch = replace(batch_of(0), latents=np.zeros((CLIPS, *latent, 4)))
        step(state, batch)
        name, planned, attention = taken[-1]
        assert (name, planned) == (EXPERT, latent)
        assert attention.self_attention.problem.q_len == tokens
        assert buckets.work_of(batch).tokens == CLIPS * tokens


def test_experts_take_turns_by_the_share_of_their_levels():
    schedule = ExpertSchedule(levels=NoiseLevels(shift=3.0), boundary=0.875)
    turns = [schedule.at(step) for step in range(1000)]
    assert turns.count("transformer") == 300  # 0.875 is 0.7 before the shift
    assert {*turns[:8]} == {"transformer", "transformer_2"}


@pytest.mark.slow
def test_a_step_of_one_expert_leaves_the_other_alone():
    schedule = ExpertSchedule(levels=NoiseLevels(shift=3.0), boundary=0.875)
    run = training(experts=schedule, text_rate=0.5, dtype=jnp.dtype(jnp.bfloat16))
    before = state_of(run)
    held = {name: flat(part) for name, part in before.values.items()}
    after, report = run.step("transformer_2")(before, batch_of(0))
    assert_same(flat(after.values["transformer"]), held["transformer"])
    for name in ("transformer_2", TEXT_ENCODER):
        found = flat(after.values[name])
        assert any((value != held[name][path]).any() for path, value in found.items())
        # bfloat16 is what is computed in; what is trained is float32.
        assert {value.dtype for value in found.values()} == {np.dtype("float32")}
    assert [*report.figures.means()][-1] == "750-875"


def quadratic(values, batch, key):
    """A loss without a network: how far `w` is from the rows."""
    error = values["toy"]["w"][None] - batch
    return jnp.mean(jnp.square(error)), {"rows": jnp.float32(batch.shape[0])}


def toy_state(rule, start=(1.0, 2.0, 3.0)):
    mesh = mesh_of()
    return first_state({"toy": {"w": jnp.array(start)}}, rule, seed=0, mesh=mesh)


@pytest.mark.slow
def test_pieces_give_the_gradient_of_the_whole_batch():
    rule = optimiser()
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)), jnp.float32)
    results = []
    for count in (1, 4):
        step = jax.jit(make_step(quadratic, rule, trained=("toy",), accumulation=count))
        results.append(step(toy_state(rule), rows))
    (one, whole), (other, pieces) = results
    np.testing.assert_allclose(one.values["toy"]["w"], other.values["toy"]["w"], rtol=1e-6)
    assert float(whole.loss) == pytest.approx(float(pieces.loss), rel=1e-6)
    assert float(pieces.figures["rows"]) == 8


@pytest.mark.parametrize(
    ("clipping", "expected"),
    [
        (Clipping.NONE, (30.0, 40.0)),
        (Clipping.VALUE, (2.0, 2.0)),
        (Clipping.GLOBAL_NORM, (1.2, 1.6)),
    ],
)
def test_clipping(clipping, expected):
    rule = optimiser(clipping=clipping, clip_at=2.0)
    clipped = rule.clip(jnp.array([30.0, 40.0]), jnp.float32(50.0))
    np.testing.assert_allclose(clipped, expected, rtol=1e-6)


def test_rates_rise_and_fall():
    flat_rate = LearningRate(peak=1.0, steps=100)
    assert [float(flat_rate(jnp.int32(n))) for n in (0, 9, 99)] == pytest.approx([0.1, 1, 1])
    cosine = LearningRate(peak=1.0, steps=110, warmup_share=10 / 110, decay=Decay.COSINE)
    found = [float(cosine(jnp.int32(n))) for n in (0, 10, 60, 110)]
    assert found == pytest.approx([0.1, 1, 0.51, 0.02])


def test_the_running_mean_follows_by_its_decay():
    rule = optimiser(ema_decay=0.9)
    mean = {"w": jnp.zeros(1)}
    early = rule.average(mean, {"w": jnp.ones(1)}, jnp.int32(0))
    late = rule.average(mean, {"w": jnp.ones(1)}, jnp.int32(10_000))
    assert float(early["w"][0]) == pytest.approx(0.9)
    assert float(late["w"][0]) == pytest.approx(0.1)


def test_bad_batches_are_refused_with_all_reasons():
    with pytest.raises(ProblemsFound, match=r"global_batch_size=6.*\n.*caption_tokens=0"):
        BatchShape(clips=6, latent=LATENT, caption_tokens=0, accumulation=4)
    with pytest.raises(ValueError, match="shared"):
        ExpertSchedule(levels=NoiseLevels(), boundary=None, trained=TrainedExperts.BOTH)
