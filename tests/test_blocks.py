"""Blocks that leave the weighted sum and the routing to kernels: what is recognised, and that the
exchanged text computes what mlx-lm's own does."""

import copy
import sys
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import CONFIGS, STREAMED, random_model, resident, same_bits
from mlx_lm.models import glm4_moe
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from mlx_lm.models.switch_layers import SwitchGLU
from test_exact import logits_of

import smoe_mlx
from smoe_mlx.kernels.choose import KernelChooser
from smoe_mlx.kernels.experts import Weights
from smoe_mlx.kernels.route import FusedRouter
from smoe_mlx.kernels.selftest import route_operations
from smoe_mlx.layers.blocks import recognise, recognise_routing
from smoe_mlx.layers.symbols import Symbol, on_symbols
from smoe_mlx.load import load_model

LEFT_ALONE = {"llama4"}  # has no sum: it weighs what goes into its experts
# The sum is left to kernels, the routing is not.
OWN_ROUTING = {
    "deepseek_v41", "gemma4", "gemma4_text", "longcat_flash", "longcat_flash_ngram", "phimoe"
}  # fmt: skip
ROUTED = set(STREAMED) - LEFT_ALONE - OWN_ROUTING
# So is what the shared experts say: these add it elsewhere, or something in between.
SHARED = {
    "afmoe", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "deepseek", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "hunyuan", "kimi_k25", "kimi_linear", "kimi_vl",
    "minimax_m3_vl", "mistral3", "mistral4", "qwen2_moe", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "solar_open", "step3p5",
}  # fmt: skip


class Operations:
    """In the place of FusedExperts: it takes no call, so that all is computed by operations."""

    def fits(self, x, slots):
        return False


class OperationsRouter(FusedRouter):
    """In the place of a router's kernel: the same by mlx-lm's operations."""

    calls = 0

    def fits(self, logits):
        return logits.shape[-1] == self.experts

    def __call__(self, logits, bias=None):
        OperationsRouter.calls += 1
        return route_operations(self)(logits, bias)


@pytest.fixture
def operations(monkeypatch):
    """Every layer is said to use kernels."""
    weighted, sums = [], []
    choose = lambda self, geometry, stock, activation, is_weighted, added: (  # noqa: E731
        weighted.append(is_weighted) or Operations()
    )
    add_up = Weights.sum
    monkeypatch.setattr(KernelChooser, "choose", choose)
    take = lambda self, router: OperationsRouter(**vars(router))  # noqa: E731
    monkeypatch.setattr(KernelChooser, "choose_router", take)
    monkeypatch.setattr(Weights, "sum", lambda self, y: sums.append(self) or add_up(self, y))
    monkeypatch.setattr(OperationsRouter, "calls", 0)
    return weighted, sums


@pytest.mark.parametrize("arch", STREAMED)
def test_exchanged_text_changes_no_bit(arch, tiny, operations):
    folder = tiny(arch, "affine")
    expected = logits_of(resident(folder), 5)
    weighted, sums = operations
    for slots in (1.0, 0.5) if arch in ROUTED else (0.5,):
        config = smoe_mlx.StreamingConfig(slots=slots, kernels="fused")
        model = load_model(folder, config=config)[0]
        for a, b in zip(logits_of(model, 5), expected, strict=True):
            assert same_bits(a, b)
    assert all(w == (arch not in LEFT_ALONE) for w in weighted)
    assert bool(sums) == (arch not in LEFT_ALONE)
    assert any(w.shared is not None for w in sums) == (arch in SHARED)
    assert bool(OperationsRouter.calls) == (arch in ROUTED)


def test_stock_leaves_blocks_alone(tiny, monkeypatch):
    monkeypatch.setattr(sys.modules["smoe_mlx.load"], "recognise", None)  # not called
    model = load_model(tiny("qwen3_moe", "affine"), config=smoe_mlx.StreamingConfig())[0]
    blocks = [m for _, m in model.named_modules() if isinstance(m, Qwen3MoeSparseMoeBlock)]
    assert blocks
    assert all(type(block) is Qwen3MoeSparseMoeBlock for block in blocks)


class Block(nn.Module):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)  # (comments and line breaks do not matter)
        y = (y * scores[..., None]).sum(axis=-2).astype(y.dtype)
        return y  # fmt: skip


class StaysWide(Block):
    def __call__(self, x, inds, scores):
        out = self.switch_mlp(x, inds)
        return (out * scores[..., None]).sum(axis=-2)


class AnotherAxis(Block):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-1)
        return y


class SomethingBetween(Block):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = y + 1
        y = (y * scores[..., None]).sum(axis=-2)
        return y


class AnotherName(Block):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        z = (y * scores[..., None]).sum(axis=-2)
        return z + y.mean(axis=-2)


class Twice(Block):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        x = self.switch_mlp(y, inds)
        x = (x * scores[..., None]).sum(axis=-2)
        return x


class Inherits(Block):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        return super().__call__(y, inds, scores)


class InSteps(Block):
    def __call__(self, x, inds, scores):
        x = self.switch_mlp(x, inds)
        x = x * mx.expand_dims(scores, axis=-1)
        y = x.sum(axis=-2)
        return y


class InStepsAndUsed(Block):
    def __call__(self, x, inds, scores):
        x = self.switch_mlp(x, inds)
        x = x * mx.expand_dims(scores, axis=-1)
        y = x.sum(axis=-2)
        return y + x.mean()


def add_up(outputs, scores):
    return (outputs * scores[..., None]).sum(axis=-2).astype(outputs.dtype)


class ByAFunction(Block):
    def __call__(self, x, inds, scores):
        out = self.switch_mlp(x, inds)
        return add_up(out, scores)


class TheOtherWayRound(Block):
    def __call__(self, x, inds, scores):
        column = mx.expand_dims(scores, -1)
        y = self.switch_mlp(x, inds)
        return (column * y).sum(-2)


class ColumnOfOthers(Block):
    def __call__(self, x, inds, scores):
        column = mx.expand_dims(scores, -1)
        scores = scores * 2
        y = self.switch_mlp(x, inds)
        return (column * y).sum(-2) + scores.sum()


class ThirdFromTheLeft(Block):
    """The sum over experts for [tokens, D], over tokens for [..., tokens, D]."""

    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        return mx.sum(y.astype(mx.float32) * scores[..., None].astype(mx.float32), axis=1)


class InTwoNames(Block):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        weighted = y * scores[..., None]
        z = mx.sum(weighted, axis=-2)
        return z * 2


class InTwoNamesAndUsed(Block):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        weighted = y * scores[..., None]
        z = mx.sum(weighted, axis=-2)
        return z + weighted.mean(axis=-2)


class SomethingElse(Block):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        scores = scores * 2
        return (y * scores[..., None]).sum(axis=-2)


class Shared(Block):
    """Something is added to the sum next."""

    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2).astype(y.dtype)
        if self.wanted:
            more = self.shared(x)
            y = more + y
        return y * 2


class SharedAndGated(Shared):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        more = self.shared(x)
        more = mx.sigmoid(x[..., :1]) * more
        return y + more


class SharedBefore(Shared):
    def __call__(self, x, inds, scores):
        more = self.shared(x)
        y = self.switch_mlp(x, inds)
        z = (y * scores[..., None]).sum(axis=-2)
        z = z + more
        return z + more


class SharedElse(Shared):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        if self.wanted:
            y = y + self.shared(x)
        elif x.ndim > 2:
            y = y * 2
        return y


class SharedOfTheSum(Shared):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        y = y + self.shared(y)
        return y


class SharedIfTheSum(Shared):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        if y.ndim > 1:
            y = y + self.shared(x)
        return y


class SumIsUsedAgain(Shared):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        z = y + self.shared(x)
        return z + y


class SharedIsUsedAgain(Shared):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        more = self.shared(x)
        y = y + more
        return y + more


class ChangesScores(Shared):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        scores = self.shared(x)
        y = y + scores
        return y


class Subtracts(Shared):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        y = y - self.shared(x)
        return y


class TwiceAsMuch(Shared):
    def __call__(self, x, inds, scores):
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        y = y * 2 + self.shared(x)
        return y


class RoutesElsewhere(Block):
    """As qwen3_moe, but that the probabilities are used again: they are still made."""

    def __call__(self, x):
        gates = self.gate(x)
        gates = mx.softmax(gates, axis=-1, precise=True)

        k = self.top_k
        inds = mx.argpartition(gates, kth=-k, axis=-1)[..., -k:]
        inds = mx.stop_gradient(inds)
        scores = mx.take_along_axis(gates, inds, axis=-1)
        if self.norm_topk_prob:
            scores /= mx.sum(scores, axis=-1, keepdims=True)

        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        return y + gates.sum()


class Switch(nn.Module):
    """Experts that give each place something else, in bfloat16."""

    def __call__(self, x, inds):
        return (x[..., None, :] * (inds[..., None] + 1)).astype(mx.bfloat16)

    calls = 0

    def weighted(self, x, inds, scores, cast, shared=None):
        self.calls += 1
        return Weights(scores, cast, shared).sum(self(x, inds))


SHARED_BLOCKS = {
    Shared: 1, SharedAndGated: 2, SharedBefore: 1, SharedElse: 0, SharedOfTheSum: 0,
    SharedIfTheSum: 0, SumIsUsedAgain: 0, SharedIsUsedAgain: 0, ChangesScores: 0, Subtracts: 0,
    TwiceAsMuch: 0,
}  # fmt: skip


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("kind", SHARED_BLOCKS)
def test_what_is_added_next(kind, wanted, monkeypatch):
    given = []
    add = Weights.sum
    monkeypatch.setattr(Weights, "sum", lambda self, y: given.append(self) or add(self, y))
    x, inds = mx.random.normal((2, 3, 8)), mx.random.randint(0, 9, (2, 3, 4))
    scores = mx.random.normal((2, 3, 8 if kind is ChangesScores else 4))[..., :4]
    block = kind()
    block.switch_mlp, block.wanted = Switch(), wanted
    block.shared = nn.Linear(8, 8)
    expected = block(x, inds, scores)
    recognised = recognise(kind, "switch_mlp")
    assert recognised.added == SHARED_BLOCKS[kind]
    block.__class__ = recognised.kind
    assert same_bits(block(x, inds, scores), expected)
    (weights,) = given
    assert (weights.shared is not None) == (recognised.added > 0 and (wanted or kind is not Shared))
    if weights.shared is not None:
        assert len(weights.shared()) == recognised.added


def test_the_sum_over_experts_of_rows_of_tokens():
    block = ThirdFromTheLeft()
    block.switch_mlp = Switch()
    changed = recognise(ThirdFromTheLeft, "switch_mlp").kind
    for shape, calls in (((3, 8), 1), ((2, 3, 8), 0)):
        x, inds = mx.random.normal(shape), mx.random.randint(0, 9, (*shape[:-1], 4))
        block.__class__, block.switch_mlp.calls = ThirdFromTheLeft, 0
        expected = block(x, inds, inds.astype(mx.bfloat16))
        block.__class__ = changed
        assert same_bits(block(x, inds, inds.astype(mx.bfloat16)), expected)
        assert block.switch_mlp.calls == calls


@pytest.mark.parametrize(
    "kind", [Block, StaysWide, InSteps, ByAFunction, TheOtherWayRound, InTwoNames]
)
def test_types_stay(kind):
    x, inds = mx.random.normal((2, 3, 8)), mx.random.randint(0, 9, (2, 3, 4))
    scores = mx.random.normal((2, 3, 4))
    block = kind()
    block.switch_mlp = Switch()
    expected = block(x, inds, scores)
    block.__class__ = recognise(kind, "switch_mlp").kind
    assert type(block) is not kind
    assert same_bits(block(x, inds, scores), expected)


class RoutesTwice(Block):
    """Softmax of softmax, and once more: a router can do the one in the middle."""

    def __call__(self, x):
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        gates = mx.softmax(gates, axis=-1, precise=True)
        k = self.top_k
        inds = mx.stop_gradient(mx.argpartition(-gates, kth=k - 1, axis=-1)[..., :k])
        scores = mx.take_along_axis(gates, inds, axis=-1)
        scores = mx.softmax(scores, axis=-1, precise=True)
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        return y


class TakesOthers(Block):
    """Chosen by one thing, weighed by another."""

    def __call__(self, x, bias):
        gates = self.gate(x)
        gates = mx.softmax(gates, axis=-1, precise=True)
        k = self.top_k
        inds = mx.stop_gradient(mx.argpartition(-bias, kth=k - 1, axis=-1)[..., :k])
        scores = mx.take_along_axis(gates, inds, axis=-1)
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        return y


class ChangesItsInput(Block):
    """What the gate was asked about is something else when the experts are chosen."""

    def __call__(self, x):
        gates = self.gate(x)
        x = x * 2
        gates = mx.softmax(gates, axis=-1, precise=True)
        k = self.top_k
        inds = mx.stop_gradient(mx.argpartition(-gates, kth=k - 1, axis=-1)[..., :k])
        scores = mx.take_along_axis(gates, inds, axis=-1)
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        return y


class AsksTheLength(Block):
    """What it does depends on how many tokens there are."""

    def __call__(self, x):
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        k = self.top_k
        if x.shape[0] == 1:
            k = 1
        inds = mx.argpartition(-gates, kth=k - 1, axis=-1)[..., :k]
        scores = mx.take_along_axis(gates, inds, axis=-1)
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        return y


class ChangesItUnseen(Block):
    """As above, by what cannot be done to symbols."""

    def __call__(self, x):
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        x = x * len(x)
        k = self.top_k
        inds = mx.argpartition(-gates, kth=k - 1, axis=-1)[..., :k]
        scores = mx.take_along_axis(gates, inds, axis=-1)
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        return y


class ReturnsEarly(Block):
    def __call__(self, x):
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        if x.ndim > 5:
            nothing = x
            return nothing
        k = self.top_k
        inds = mx.argpartition(-gates, kth=k - 1, axis=-1)[..., :k]
        scores = mx.take_along_axis(gates, inds, axis=-1)
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        return y


def made(kind, experts=6) -> nn.Module:
    block = kind()
    block.switch_mlp, block.gate = Switch(), nn.Linear(8, experts, bias=False)
    block.top_k, block.norm_topk_prob = 3, True
    return block


def routing_of(block, experts=6):
    return recognise_routing(block, recognise(type(block), "switch_mlp"), "switch_mlp", experts)


def test_what_is_recognised():
    for kind in (Block, StaysWide, InSteps, RoutesElsewhere, RoutesTwice, TakesOthers):
        assert issubclass(recognise(kind, "switch_mlp").kind, kind)
    for kind in (
        AnotherAxis, SomethingBetween, AnotherName, Twice, Inherits, InStepsAndUsed,
        InTwoNamesAndUsed, ColumnOfOthers, SomethingElse,
    ):  # fmt: skip
        assert recognise(kind, "switch_mlp") is None
    assert recognise(Block, "experts") is None  # it calls another module
    assert recognise(nn.Linear, "switch_mlp") is None
    made_of_no_file = type("Block", (nn.Module,), {"__call__": eval("lambda self, x: x")})
    assert recognise(made_of_no_file, "switch_mlp") is None


def test_what_routing_is_recognised(monkeypatch):
    chosen, choose = [], mx.argpartition
    counted = lambda *a, **k: (chosen.append(1), choose(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(mx, "argpartition", counted)
    for kind in (
        Block, TakesOthers, ChangesItsInput, AsksTheLength, ChangesItUnseen, ReturnsEarly
    ):  # fmt: skip
        assert routing_of(made(kind)) is None
    for kind, norm, last in ((RoutesElsewhere, True, True), (RoutesTwice, False, False)):
        block, x = made(kind), mx.random.normal((2, 3, 8))
        routing, expected = routing_of(block), block(x)
        assert routing.router == FusedRouter(6, 3, False, norm, last)
        block.__class__ = routing.kind
        block.switch_mlp.routes = lambda logits: True
        block.switch_mlp.router = OperationsRouter(**vars(routing.router))
        before = OperationsRouter.calls
        chosen.clear()
        assert same_bits(block(x), expected)
        assert OperationsRouter.calls == before + 1
        assert chosen == [1], "the block chooses as well as the router"


class ReshapesByAnother(Block):
    """Groups as DeepSeek V2 makes them, of logits whose rows are in another order than x's."""

    def __call__(self, x):
        gates = self.gate(x).swapaxes(0, 1)
        scores = mx.softmax(gates, axis=-1, precise=True)
        rows, columns = x.shape[:2]
        scores = scores.reshape(rows, columns, 3, -1)
        best = scores.max(axis=-1, keepdims=True)
        worst = mx.argpartition(best, kth=0, axis=-2)[..., :1, :]
        scores = mx.put_along_axis(scores, worst, mx.array(0.0, scores.dtype), axis=-2)
        scores = scores.reshape(rows, columns, -1)
        k = self.top_k
        inds = mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k]
        scores = mx.take_along_axis(scores, inds, axis=-1)
        y = self.switch_mlp(x, inds)
        y = (y * scores[..., None]).sum(axis=-2)
        return y


@pytest.mark.parametrize(("shape", "calls"), [((3, 3, 8), 1), ((2, 3, 8), 0)])
def test_a_router_is_used_where_shapes_say_the_same(shape, calls):
    block, x = made(ReshapesByAnother), mx.random.normal(shape)
    routing, expected = routing_of(block), block(x)
    assert routing.router == FusedRouter(6, 3, False, False, False, groups=3, kept=2, greedy=True)
    block.__class__ = routing.kind
    block.switch_mlp.routes = lambda logits: True
    block.switch_mlp.router = OperationsRouter(**vars(routing.router))
    before = OperationsRouter.calls
    assert same_bits(block(x), expected)
    assert OperationsRouter.calls == before + calls


def gate(**changes) -> nn.Module:
    """A block of GLM 4's, with attributes of its gate changed."""
    args = glm4_moe.ModelArgs.from_dict({
        "model_type": "glm4_moe", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
        "max_position_embeddings": 8, "moe_intermediate_size": 8, "norm_topk_prob": True,
        "num_attention_heads": 1, "n_group": 4, "head_dim": 8, "topk_group": 2,
        "n_shared_experts": None, "n_routed_experts": 32, "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 3, "first_k_dense_replace": 0, "num_hidden_layers": 1,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "use_qk_norm": False,
        "tie_word_embeddings": False, "attention_bias": False, "partial_rotary_factor": 1.0,
        "rope_scaling": None,
    })  # fmt: skip
    block = glm4_moe.MoE(args)
    for name, value in changes.items():
        setattr(block.gate, name, value)
    return block


def test_the_numbers_of_a_router_are_found():
    routers = {"sigmoid": True, "biased": True, "wide": True}
    usual = FusedRouter(32, 3, False, True, False, groups=4, kept=2, scale=2.5, **routers)
    assert routing_of(gate(), 32).router == usual
    for changes, router in (
        ({"n_group": 1}, replace(usual, groups=1, kept=1)),
        ({"topk_group": 3}, replace(usual, kept=3)),
        ({"norm_topk_prob": False}, replace(usual, norm=False)),
        ({"top_k": 1}, replace(usual, norm=False, top_k=1)),
        ({"routed_scaling_factor": 1}, replace(usual, scale=1)),
    ):
        assert routing_of(gate(**changes), 32).router == router
    assert routing_of(gate(e_score_correction_bias=mx.zeros((31,))), 32) is None
    assert routing_of(gate(), 31) is None
    assert routing_of(gate(top_k="three"), 32) is None


SIGMOID = {"sigmoid": True, "biased": True}
ROUTERS_OF = {
    "deepseek_v2": FusedRouter(8, 2, False, False, False, groups=2, kept=1, greedy=True, scale=1.0),
    "ernie4_5_moe": FusedRouter(8, 2, False, True, False, wide=True, least=1e-12),
    "kimi_linear": FusedRouter(
        8, 2, False, True, False, **SIGMOID, bias_in="narrow", eps=1e-20, scale=1.0
    ),
    "lfm2_moe": FusedRouter(
        8, 2, False, True, True, **SIGMOID, bias_in="wide", eps=1e-6, scale=1.0
    ),
    "laguna": FusedRouter(8, 2, False, True, False, softplus=True, biased=True, wide=True),
    "Klear": FusedRouter(8, 2, False, True, False, **SIGMOID, wide=True),
    "bailing_moe": FusedRouter(
        8, 2, False, True, True, wide=True, cast=True, eps=1e-20, scale=1.0
    ),
}  # fmt: skip


def block_of(arch: str) -> nn.Module:
    model = random_model(copy.deepcopy(CONFIGS[arch]))
    switch = next(path for path, m in model.named_modules() if isinstance(m, SwitchGLU))
    return dict(model.named_modules())[switch.rpartition(".")[0]]


@pytest.mark.parametrize("arch", ROUTERS_OF)
def test_routers_of(arch):
    block = block_of(arch)
    name = "experts" if arch == "Klear" else "switch_mlp"
    recognised = recognise(type(block), name)
    assert recognise_routing(block, recognised, name, 8).router == ROUTERS_OF[arch]


def test_routers_of_other_lagunas_and_ernies():
    block = block_of("laguna")
    usual = ROUTERS_OF["laguna"]
    for attributes, router in (
        ({"score_func": "sigmoid"}, replace(usual, softplus=False, sigmoid=True)),
        ({"softcap": 30.0}, replace(usual, wide=False, softplus=False, sigmoid=True)),
        ({"score_func": "another"}, None),
    ):
        for name, value in attributes.items():
            setattr(block.gate, name, value)
        found = routing_of(block, 8)
        assert (found and found.router) == router
    block = block_of("ernie4_5_moe")
    block.gate_act = nn.Sigmoid()
    assert routing_of(block, 8).router == replace(ROUTERS_OF["ernie4_5_moe"], sigmoid=True)
    block.gate_act = nn.Tanh()
    assert routing_of(block, 8) is None


def test_symbols():
    x, y = Symbol("x"), Symbol("y")
    do = on_symbols(lambda x, y: mx.sum(-x.T * y[..., :3].astype(mx.float16) / (2 - x), axis=-1))
    assert str(do(x, y)) == "(((-x.T) * y[..., :3].astype(mx.float16)) / (2 - x)).sum(axis=-1)"
    for code, text in (
        (lambda x: mx.expand_dims(x, axis=-1), "x[..., None]"),
        (lambda x: mx.expand_dims(x, 1), "mx.expand_dims(x, 1)"),
        (lambda x: x.shape[:2][1], "x.shape[1]"),
        (lambda x: x.shape[:-1], "x.shape[:-1]"),
        (lambda x: mx.flatten(x, -2, -1), "x.flatten(-2, -1)"),
        (lambda x: nn.softplus(x), "nn.softplus(x)"),
    ):
        assert str(on_symbols(code)(x)) == text
    for depends_on_values in (
        lambda: bool(x), lambda: x == y, lambda: x != 1, lambda: x < y, lambda: list(x),
        lambda: x[::2], lambda: x.shape[0] == 1, lambda: x + mx.zeros(1), lambda: x.no_method(),
        lambda: x in (1, 2), lambda: {x},
    ):  # fmt: skip
        with pytest.raises((TypeError, AttributeError)):
            depends_on_values()
