"""A compact Qwen3-MoE language model in PyTorch; it computes what mlx-lm's qwen3_moe does.

Pre-norm decoder, grouped-query attention with per-head RMS norm on queries and keys, rotary
positions (half rotation), a router whose softmax comes before the top-k choice and whose k
weights are renormalised, SwiGLU experts without shared expert, no biases.
"""

import dataclasses
import json
import pathlib

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass
class Config:
    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 64
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1024

    def save(self, path):
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def load(cls, path):
        return cls(**json.loads(pathlib.Path(path).read_text()))


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Linear(nn.Linear):
    """A linear map without bias that computes in its input's type."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        d = self.c.head_dim
        q = self.q_norm(self.q_proj(x).view(b, t, -1, d))
        k = self.k_norm(self.k_proj(x).view(b, t, -1, d))
        v = self.v_proj(x).view(b, t, -1, d)
        q, k = rotate(q, cos, sin).to(x.dtype), rotate(k, cos, sin).to(x.dtype)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Spread(torch.autograd.Function):
    """rows[i] = x[source[i]], every row of x used k times; the gradient is a gather and a sum."""

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        back = grad[inverse].view(-1, ctx.k, grad.shape[-1])
        return back.float().sum(1).to(grad.dtype), None, None, None


class Collect(torch.autograd.Function):
    """The k rows of every token, summed: undoes the order that Spread made."""

    @staticmethod
    def forward(ctx, rows, order, inverse, k):
        ctx.save_for_backward(order)
        ctx.k = k
        return rows[inverse].view(-1, k, rows.shape[-1]).float().sum(1).to(rows.dtype)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad[order // ctx.k], None, None, None


class MoE(nn.Module):
    """Top-k routed SwiGLU experts; expert weights are kept as [experts, in, out]."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        e, h, i = c.num_experts, c.hidden_size, c.moe_intermediate_size
        self.gate = Linear(h, e)
        self.gate_proj = nn.Parameter(torch.empty(e, h, i))
        self.up_proj = nn.Parameter(torch.empty(e, h, i))
        self.down_proj = nn.Parameter(torch.empty(e, i, h))

    def route(self, x):
        logits = self.gate(x).float()
        probs = logits.softmax(-1)
        weights, chosen = probs.topk(self.c.num_experts_per_tok, dim=-1)
        return logits, probs, weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        shape, k, e = x.shape, self.c.num_experts_per_tok, self.c.num_experts
        x = x.reshape(-1, shape[-1])
        logits, probs, weights, chosen = self.route(x)

        # rows ordered by expert: `order` lists (token, slot) pairs, `ends` where the rows of
        # every expert end
        experts, order = chosen.flatten().to(torch.int16).sort()
        inverse = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=x.device)
        )
        ends = torch.searchsorted(
            experts, torch.arange(e, device=x.device, dtype=torch.int16), right=True, out_int32=True
        )

        rows = Spread.apply(x, order, inverse, k)
        both = torch.cat([self.gate_proj, self.up_proj], dim=-1).to(x.dtype)
        gate, up = torch._grouped_mm(rows, both, offs=ends).chunk(2, dim=-1)
        inner = (
            F.silu(gate.float())
            * up.float()
            * Spread.apply(weights.reshape(-1, 1), order, inverse, 1)
        )
        y = torch._grouped_mm(inner.to(x.dtype), self.down_proj.to(x.dtype), offs=ends)
        y = Collect.apply(y, order, inverse, k)

        share = torch.diff(ends, prepend=ends.new_zeros(1)).float() / len(order)
        balance = e * (share * probs.mean(0)).sum()  # 1 when perfectly even
        z = logits.logsumexp(-1).square().mean()
        return y.view(shape), balance, z, share

    def plain(self, x):
        """The same result expert by expert, in the type of `x`: slow, exact, for any device."""
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        _, _, weights, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.c.num_experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            rows = x[token]
            inner = (
                F.silu(rows @ self.gate_proj[e])
                * (rows @ self.up_proj[e])
                * weights[token, slot, None]
            )
            y.index_add_(0, token, inner @ self.down_proj[e])
        return y.view(shape)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        inverse = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angles = torch.outer(torch.arange(c.max_position_embeddings).float(), inverse)
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                deeper = name.endswith(("o_proj.weight", "down_proj"))
                std = (
                    0.02
                    if "embed" in name or "lm_head" in name
                    else 0.5 * p.shape[1 if p.dim() == 2 else -2] ** -0.5
                )
                nn.init.normal_(p, std=std / (2 * c.num_hidden_layers) ** 0.5 if deeper else std)

    def forward(self, tokens, targets, dtype=torch.bfloat16):
        """Mean cross-entropy, summed balance and z terms, and the load share of every expert."""
        t = tokens.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        x = self.embed_tokens(tokens)  # the residual stream stays in float32
        balances, zs, shares = [], [], []
        for block in self.layers:
            x = x + block.self_attn(block.input_layernorm(x).to(dtype), cos, sin)
            y, balance, z, share = block.mlp(block.post_attention_layernorm(x).to(dtype))
            x = x + y
            balances.append(balance)
            zs.append(z)
            shares.append(share)
        logits = self.lm_head(self.norm(x).to(dtype))
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))
        return loss, torch.stack(balances).sum(), torch.stack(zs).sum(), torch.stack(shares)

    @torch.no_grad()
    def reference(self, tokens, watch=None):
        """Plain float32 logits; `watch(layer, residual, moe_input, moe_output)` sees every MoE."""
        t = tokens.shape[1]
        x = self.embed_tokens(tokens)
        for n, block in enumerate(self.layers):
            x = x + block.self_attn(block.input_layernorm(x), self.cos[:t], self.sin[:t])
            h = block.post_attention_layernorm(x)
            y = block.mlp.plain(h)
            if watch:
                watch(n, x, h, y)
            x = x + y
        return self.lm_head(self.norm(x))
