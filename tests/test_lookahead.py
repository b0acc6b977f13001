"""Lookahead: what a coming router is asked, and where nobody is asked at all."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from smoe_mlx.layers.lookahead import look_up, make_predictor

DIMS = 4


class Router(nn.Module):
    """Scores, or numbers of experts and weights: in either case what it was asked."""

    def __init__(self, answer):
        super().__init__()
        self._answer, self.asked = answer, []

    def __call__(self, x):
        self.asked.append(x)
        return self._answer(x)


class Block(nn.Module):
    def __init__(self, router, name="gate"):
        super().__init__()
        self[name] = router
        self.switch_mlp = nn.Identity()


def scores(x):
    return x


def numbers(x):
    return x, mx.argsort(x, axis=-1)[..., -2:]


def norm(weight):
    out = nn.RMSNorm(DIMS)
    out.weight = mx.array(weight)
    return out


class Model(nn.Module):
    """Two layers, each with norms and a block."""

    def __init__(self, routers, norms, name="gate"):
        super().__init__()
        self.layers = [nn.Module() for _ in routers]
        for layer, router, n in zip(self.layers, routers, norms, strict=True):
            for key, module in n.items():
                layer[key] = module
            layer.mlp = Block(router, name)


def path(layer):
    return f"layers.{layer}.mlp.switch_mlp"


def two_layers(answer=scores, name="gate"):
    norms = [
        {"post_attention_layernorm": norm(w)} for w in ([2.0, 0.0, 1e-7, 0.5], [1.0, 3.0, 5.0, 1e6])
    ]
    return Model([Router(answer), Router(answer)], norms, name)


X = mx.array([[[1.0, 2.0, -3.0, 4.0]]])


def test_the_next_router_is_asked_about_this_input_in_the_scale_of_its_norm():
    model = two_layers()
    predict = make_predictor(model, path(0), path(1), DIMS, DIMS)
    router = model.layers[1].mlp.gate
    for _ in range(2):  # the scale is computed once
        assert sorted(predict(X, 2).tolist()[0][0]) == [1, 3]
        # Half of it; as it is where the first norm's weight is nothing; never more than 1000 times.
        assert router.asked[-1].tolist() == [[[0.5, 2.0, -3.0, 4000.0]]]
    assert predict(X.astype(mx.bfloat16), 2).shape == (1, 1, 2)
    assert not model.layers[0].mlp.gate.asked


def test_the_same_layer_is_asked_about_the_input_itself_and_for_more_ranks():
    model = two_layers()
    predict = make_predictor(model, path(1), path(1), DIMS, DIMS, extra=1)
    assert sorted(predict(X, 2).tolist()[0][0]) == [0, 1, 3]
    assert sorted(predict(X, 3).tolist()[0][0]) == sorted(predict(X, 9).tolist()[0][0])  # all
    assert mx.array_equal(model.layers[1].mlp.gate.asked[-1], X)


def test_without_a_plain_norm_before_both_the_input_is_left_as_it_is():
    class OwnNorm(nn.RMSNorm):
        pass

    for norms in ([{}, {"norm": norm([2.0] * 4)}], [{"norm": OwnNorm(DIMS)}] * 2):
        model = Model([Router(scores), Router(scores)], norms)
        make_predictor(model, path(0), path(1), DIMS, DIMS)(X, 2)
        assert mx.array_equal(model.layers[1].mlp.gate.asked[-1], X)


def test_the_norm_next_to_the_block_counts():
    norms = [
        {"post_attention_layernorm": norm([7.0] * 4), "pre_mlp_layernorm": norm([w] * 4)}
        for w in (2.0, 4.0)
    ]
    model = Model([Router(scores), Router(scores)], norms)
    make_predictor(model, path(0), path(1), DIMS, DIMS)(X, 2)
    assert mx.array_equal(model.layers[1].mlp.gate.asked[-1], 2 * X)


@pytest.mark.parametrize("name", ["gate", "router"])
def test_a_router_that_answers_with_experts_has_no_further_ranks(name):
    model = two_layers(numbers, name)
    predict = make_predictor(model, path(0), path(1), DIMS, DIMS)
    assert sorted(predict(X, 2).tolist()[0][0]) == [1, 3]
    assert make_predictor(model, path(1), path(1), DIMS, DIMS, extra=1) is None


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x[..., :-1],  # scores of another number of experts
        lambda x: (x, x),  # no numbers
        lambda x: x @ mx.zeros((DIMS + 1, 1)),  # not of this input
    ],
)
def test_what_is_no_router_of_this_input_is_not_asked(answer):
    model = two_layers(answer)
    assert make_predictor(model, path(0), path(1), DIMS, DIMS) is None


def test_a_block_without_a_router_or_with_zero_experts_has_no_lookahead():
    model = two_layers()
    model.layers[1].mlp.zero_expert_num = 1
    assert make_predictor(model, path(0), path(1), DIMS, DIMS) is None
    model.layers[1].mlp.zero_expert_num = 0
    assert make_predictor(model, path(0), path(1), DIMS, DIMS) is not None
    del model.layers[1].mlp["gate"]
    model.layers[1].mlp.gate = "not a module"
    assert make_predictor(model, path(0), path(1), DIMS, DIMS) is None


def test_modules_are_found_by_their_paths():
    model = two_layers()
    assert look_up(model, "") is model
    assert look_up(model, "layers.1.mlp") is model.layers[1].mlp


def test_a_switch_outside_any_layer_has_no_norm_before_it():
    model = nn.Module()
    model.a, model.b = Block(Router(scores)), Block(Router(scores))
    make_predictor(model, "a.switch_mlp", "b.switch_mlp", DIMS, DIMS)(X, 2)
    assert mx.array_equal(model.b.gate.asked[-1], X)
