"""Threads, tasks and forks: right answers, or an error that says what to do instead."""

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from conftest import resident
from mlx_lm.generate import generate_step as mlx_generate_step
from test_faults import TOKENS, answer

import smoe_mlx
from smoe_mlx.generate import generate_step
from smoe_mlx.load import load_model


def by_mlx_lm(model):
    return [int(t) for t, _ in mlx_generate_step(mx.array(TOKENS[:9]), model, max_tokens=8)]


def plainly(model):
    """A loop of one's own."""
    tokens = TOKENS[:9]
    for _ in range(8):
        tokens = [*tokens, int(mx.argmax(model(mx.array([tokens]))[0, -1]).item())]
    return tokens[9:]


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("qwen3_moe", "affine")


@pytest.fixture(scope="module")
def expected(folder):
    return by_mlx_lm(resident(folder))


def open_model(folder, **options):
    options = {"slots": 0.3, "threads": 2, "debug": True, **options}
    return load_model(folder, config=smoe_mlx.StreamingConfig(**options))[0]


def at_once(acts, times):
    """What the acts return, each called so often on a thread of its own."""
    with ThreadPoolExecutor(len(acts)) as pool:
        runs = [pool.submit(lambda act=act: [act() for _ in range(times)]) for act in acts]
        return [x for run in runs for x in run.result(timeout=200)]


@pytest.mark.parametrize("ways", [[answer] * 3, [by_mlx_lm] * 3, [answer, by_mlx_lm, plainly]],
                         ids=["ours", "mlx-lm's", "mixed"])  # fmt: skip
@pytest.mark.parametrize(
    "options",
    [{}, {"slots": 15, "decode": "lag1"}, {"slots": 15, "decode": "wait"}],
    ids=["exact", "lag1", "wait"],
)
def test_one_model_on_several_threads(ways, options, folder, expected):
    model = open_model(folder, **options)
    got = at_once([lambda way=way: way(model) for way in ways], 8)
    assert got == [expected] * 24
    assert answer(model) == expected
    cache = model._streaming.cache
    cache.check()
    if ways[-1] is answer:  # they take turns, and leave nothing to each other
        assert cache.stats.abandoned == 0


def test_two_models_and_loads_on_several_threads(folder, expected):
    one, two = open_model(folder, decode="token"), open_model(folder, slots=1.0)
    acts = [
        lambda: answer(one),
        lambda: answer(two),
        lambda: answer(open_model(folder)),
        lambda: by_mlx_lm(open_model(folder, slots=9)),
    ]
    assert at_once(acts, 6) == [expected] * 24


def test_tasks_that_are_cancelled(folder, expected):
    """As servers do it: tokens are awaited from a pool, on whatever thread is free."""
    model = open_model(folder)

    async def tokens(pool, n):
        steps, out = generate_step(mx.array(TOKENS[:9]), model, max_tokens=8), []
        loop = asyncio.get_running_loop()
        try:
            for _ in range(n):
                out.append(await asyncio.shield(loop.run_in_executor(pool, lambda: next(steps)[0])))
        finally:
            await asyncio.shield(loop.run_in_executor(pool, lambda: close(steps)))
        return out

    def close(steps):
        while True:
            try:
                return steps.close()
            except ValueError:  # a token of it is still being made
                time.sleep(0.001)

    async def talk():
        with ThreadPoolExecutor(3) as pool:
            for round_ in range(3):
                tasks = [asyncio.create_task(tokens(pool, n)) for n in (8, 5, 8)]
                while not tasks[1].done() and round_ < 2:
                    await asyncio.sleep(0.002 * round_)
                    tasks[1].cancel()
                got = await asyncio.gather(*tasks, return_exceptions=True)
                assert got[0] == got[2] == expected
                assert got[1] == expected[:5] or isinstance(got[1], asyncio.CancelledError)

    asyncio.run(talk())
    assert answer(model) == expected


FORK = """
import os, sys, threading
import mlx.core as mx
mx.set_default_device(mx.cpu)
import smoe_mlx
from smoe_mlx.generate import generate_step
def answer(model):
    steps = generate_step(mx.array([1, 2, 3]), model, max_tokens=4)
    return [t for t, _ in steps]
def load():
    return smoe_mlx.load("demo", slots=0.3)[0]
def in_child(act):
    pid = os.fork()
    if not pid:
        try:
            print(act(), flush=True)
        except smoe_mlx.SmoeError as e:
            print(e, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
smoe_mlx.plan("demo", slots=0.3)
in_child(lambda: smoe_mlx.shatter("demo", sys.argv[1] + "0"))
in_child(lambda: answer(load()))
model = load()
in_child(lambda: answer(model))
in_child(lambda: model(mx.array([[1, 2]])))
in_child(load)
in_child(lambda: smoe_mlx.shatter("demo", sys.argv[1]))
in_child(lambda: smoe_mlx.prewarm(model))
in_child(lambda: smoe_mlx.resize(model, slots=0.5))
in_child(lambda: smoe_mlx.verify(sys.argv[1] + "0", "demo"))
in_child(lambda: in_child(load))
print(answer(model), flush=True)
os._exit(0)
"""


def test_forks(tmp_path):
    """Before MLX is used, a child can do all; afterwards it says that it cannot, and at once."""
    out = subprocess.run(
        [sys.executable, "-c", FORK, tmp_path / "v"], capture_output=True, text=True, timeout=100
    )
    assert out.returncode == 0, out.stderr
    vault, first, *middle, last = out.stdout.splitlines()
    assert vault == f"{tmp_path / 'v'}0"
    assert first == last
    assert first.startswith("[")
    refused = [line for line in middle if line != "None"]
    assert len(refused) == 8
    assert all("forked" in line and "spawn" in line for line in refused)


def test_interrupts_anywhere():
    """The short form of check_interrupts.py."""
    path = os.path.join(os.path.dirname(__file__), "check_interrupts.py")
    out = subprocess.run([sys.executable, path, "--times", "25"], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
