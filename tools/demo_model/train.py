"""Train the demo model for a fixed time on one GPU.

    python train.py --data DIR --run DIR --seconds 1080

The learning rate follows the share of the time that has passed (warm-up, plateau, linear decay
to zero), so the run always ends with a finished schedule.  A stopped run goes on from its last
checkpoint (`--run` holds state.pt), its clock included.  Writing a number of seconds to
`RUN/seconds` while it runs moves the end.
"""

import argparse
import json
import math
import os
import pathlib
import time

import numpy as np
import torch

# isort: split
from model import Config, Model


def orthogonal(g, steps=5):
    """The nearest (semi-)orthogonal matrices of a batch, by Newton-Schulz iteration in bfloat16."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for matrices and stacks of matrices.

    Every update is scaled to the size that AdamW's updates have (0.2 per element, root mean
    square), so learning rates are comparable.  Tensors of one shape are handled together.
    """

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(p.shape), []).append(p)
            for shape, params in shapes.items():
                grads = [p.grad for p in params]
                buffers = [
                    self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params
                ]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                torch._foreach_lerp_(grads, buffers, group["momentum"])
                updates = (
                    orthogonal(torch.stack(grads).view(-1, *shape[-2:]))
                    .float()
                    .view(len(params), *shape)
                    .unbind(0)
                )
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(
                    params, list(updates), alpha=-group["lr"] * 0.2 * max(shape[-2:]) ** 0.5
                )


def optimizers(model, lr, lr_adam):
    matrices, tables, routers, small = [], [], [], []
    for name, p in model.named_parameters():
        if p.dim() < 2:
            small.append(p)
        elif "embed" in name or "lm_head" in name:
            tables.append(p)
        elif name.endswith("mlp.gate.weight"):
            routers.append(p)
        else:
            matrices.append(p)
    adam = torch.optim.AdamW(
        [
            dict(params=tables, weight_decay=0.1),
            dict(params=routers, weight_decay=0.1, lr=0.3 * lr_adam),
            dict(params=small, weight_decay=0.0),
        ],
        lr=lr_adam,
        betas=(0.9, 0.95),
        eps=1e-10,
        fused=torch.cuda.is_available(),
    )
    both = [Muon(matrices, lr), adam]
    for o in both:
        for g in o.param_groups:
            g["peak"] = g["lr"]
    return both


def schedule(part, warm=0.01, plateau=0.45):
    if part < warm:
        return part / warm + 0.02
    return min(1.0, max(0.0, (1 - part) / (1 - plateau)))


class Data:
    """Random windows of one long token sequence, without repeats inside an epoch."""

    def __init__(self, path, length, device, seed):
        self.tokens = torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(
            device
        )
        self.length, self.device = length, device
        self.rng = np.random.default_rng(seed)
        self.queue, self.epoch = [], 0

    def batch(self, size):
        if len(self.queue) < size:  # a new epoch starts at another offset, in another order
            offset = int(self.rng.integers(self.length))
            starts = np.arange(offset, len(self.tokens) - self.length - 1, self.length)
            self.queue = self.rng.permutation(starts)
            self.epoch += 1
        take, self.queue = self.queue[:size], self.queue[size:]
        index = torch.from_numpy(take).to(self.device)[:, None] + torch.arange(
            self.length + 1, device=self.device
        )
        rows = self.tokens[index].long()
        return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate(step, data, size, rows):
    starts = torch.arange(0, len(data.tokens) - data.length - 1, data.length, device=data.device)[
        :rows
    ]
    total = 0.0
    parts = [p for p in starts.split(size) if len(p) == size] or [starts]
    for part in parts:
        index = part[:, None] + torch.arange(data.length + 1, device=data.device)
        chunk = data.tokens[index].long()
        total += step(chunk[:, :-1], chunk[:, 1:])[0].item()
    return total / len(parts)


def save(path, **state):
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=1080)
    parser.add_argument(
        "--stop-after",
        type=float,
        help="stop early, with a checkpoint, after so many seconds of this call",
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--lr-adam", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=2e-3)
    parser.add_argument("--z", type=float, default=1e-4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--evaluate-every", type=float, default=30)
    parser.add_argument("--save-every", type=float, default=60)
    parser.add_argument("--evaluate-rows", type=int, default=768)
    parser.add_argument("--compile", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    args.run.mkdir(parents=True, exist_ok=True)
    config = Config(num_hidden_layers=args.layers, num_experts=args.experts)
    config.save(args.run / "config.json")
    model = Model(config).to(device)
    opts = optimizers(model, args.lr, args.lr_adam)
    train = Data(args.data / "train.bin", args.length, device, args.seed)
    held = Data(args.data / "heldout.bin", args.length, device, 0)
    log = open(args.run / "log.jsonl", "a")
    steps, spent, tokens = 0, 0.0, 0
    if (args.run / "state.pt").exists():
        state = torch.load(args.run / "state.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for o, s in zip(opts, state["opts"]):
            o.load_state_dict(s)
        steps, spent, tokens = state["steps"], state["spent"], state["tokens"]
        train.rng = np.random.default_rng([args.seed, steps])
        print(f"goes on at step {steps}, {spent:.0f} s", flush=True)

    step_fn = torch.compile(model) if args.compile else model
    # compilation happens here, outside the clock
    x, y = (
        held.batch(args.batch)
        if len(held.tokens) > args.batch * (args.length + 1) + args.length
        else train.batch(args.batch)
    )
    t0 = time.time()
    for _ in range(2):
        loss, balance, z, _ = step_fn(x, y)
        (loss + args.balance * balance + args.z * z).backward()
        model.zero_grad(set_to_none=True)
    evaluate(step_fn, held, args.batch, args.batch)
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {len(train.tokens)} tokens, "
        f"compiled in {time.time() - t0:.1f} s",
        flush=True,
    )

    def checkpoint():
        save(
            args.run / "state.pt",
            model=model.state_dict(),
            opts=[o.state_dict() for o in opts],
            steps=steps,
            spent=spent,
            tokens=tokens,
        )

    began = last = time.time()
    base, next_eval, next_save, seconds = (
        spent,
        spent + args.evaluate_every,
        spent + args.save_every,
        args.seconds,
    )
    window = []
    done = False
    while not done:
        if steps % 10 == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            spent = base + time.time() - began
            if steps % 50 == 0 and (args.run / "seconds").exists():
                seconds = float((args.run / "seconds").read_text())
        done = spent >= seconds or (args.stop_after is not None and spent - base >= args.stop_after)
        factor = schedule(spent / seconds)
        for o in opts:
            for g in o.param_groups:
                g["lr"] = g["peak"] * factor
        x, y = train.batch(args.batch)
        loss, balance, z, share = step_fn(x, y)
        (loss + args.balance * balance + args.z * z).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in opts:
            o.step()
        model.zero_grad(set_to_none=True)
        steps += 1
        tokens += x.numel()
        window.append(loss.detach())
        if steps % 100 == 0 or done:
            mean = torch.stack(window).mean().item()
            now = time.time()
            row = dict(
                step=steps,
                tokens=tokens,
                seconds=round(base + now - began, 1),
                loss=round(mean, 4),
                lr=round(factor, 4),
                balance=round(balance.item() / args.layers, 4),
                z=round(z.item() / args.layers, 3),
                worst_load=round((share.max(1).values * args.experts).max().item(), 2),
                epoch=train.epoch,
                rate=round(len(window) * x.numel() / (now - last)),
            )
            window, last = [], now
            log.write(json.dumps(row) + "\n")
            log.flush()
            print(json.dumps(row), flush=True)
        if spent >= next_eval or done:
            next_eval = spent + args.evaluate_every
            value = evaluate(step_fn, held, args.batch, args.evaluate_rows)
            row = dict(
                step=steps,
                tokens=tokens,
                seconds=round(spent, 1),
                heldout=round(value, 4),
                perplexity=round(math.exp(value), 3),
            )
            log.write(json.dumps(row) + "\n")
            log.flush()
            print(json.dumps(row), flush=True)
        if spent >= next_save or done:
            next_save = spent + args.save_every
            checkpoint()
    print("finished" if spent >= seconds else "stopped", flush=True)
    if spent >= seconds:
        torch.save(model.state_dict(), args.run / "final.pt")


if __name__ == "__main__":
    main()
