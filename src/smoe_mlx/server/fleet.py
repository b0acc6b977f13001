"""The models of a server: which are in memory, and how they share it."""

import gc
import logging
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import ModelProvider
from mlx_lm.utils import load_tokenizer

from ..config import StreamingConfig, parse_bytes
from ..device import available_nbytes
from ..errors import SmoeError
from ..hub import find_model
from ..load import load_model, plan_model
from ..model_config import fingerprint
from ..plan import PAGE_CACHE_SHARE, MemoryPlan, format_bytes, usable_nbytes
from .errors import RequestError, UnknownModelError
from .sessions import Sessions

DEFAULT = "default_model"  # what mlx-lm calls the model of a request that names none


@dataclass
class Loaded:
    """A model in memory."""

    model: nn.Module
    tokenizer: Any
    plan: MemoryPlan


class Fleet(ModelProvider):
    """mlx-lm's model provider for the models that the server was started with, and no others.

    All are in memory at once if the largest then has room for the experts of a whole token beside
    all of the others; otherwise each has the budget for itself, and makes others go.

    Attributes:
        folders: name -> folder. Every Hub repository is here before the first request.
        budget: bytes that all models may have together.
        resident: those in memory, the least recently used first.
    """

    model_key: str | None

    def __init__(self, args: Namespace, config: StreamingConfig, sessions: Sessions):
        self.folders = {}
        for name, path in args.models.items():
            self.folders[name] = find_model(path)
        args.model = next(iter(self.folders))  # what mlx-lm reads; the first is the default
        super().__init__(args)
        self.config, self.sessions = config, sessions
        self.step = args.prefill_step_size
        planned = config.memory is None and config.slots is None  # from what the machine has
        available = available_nbytes() if config.memory is None else 0
        self.budget = parse_bytes(config.memory) if config.memory else usable_nbytes(available)
        self.budget -= args.prompt_cache_bytes or 0
        self.resident: dict[str, Loaded] = {}
        # What does not fit at all is said now, not to the first who asks for it.
        self.plans = {
            name: plan_model(folder, None, args.trust_remote_code, config, self.budget)
            for name, folder in self.folders.items()
        }
        full = sum(plan.full for plan in self.plans.values())
        if planned and full > self.budget and config.io != "direct":  # as `plan` does for one
            beyond = self.budget - max(plan.useful for plan in self.plans.values())
            self.budget -= max(0, min(int(PAGE_CACHE_SHARE * available), beyond))
        self.shares = _shares(self.plans, self.budget)

    def name_of(self, asked: str) -> str:
        """The name of the model that a request asks for.

        Raises:
            UnknownModelError: there is no such model here.
        """
        name = self.cli_args.model if asked == DEFAULT else asked
        if name not in self.folders:
            raise UnknownModelError(asked, list(self.folders))
        return name

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[nn.Module, Any]:
        """Make a model the current one. (The other arguments are the server's, not a request's.)"""
        name = self.name_of(model_path)
        if name != self.model_key:
            loaded = self.resident.pop(name) if name in self.resident else self._load_beside(name)
            self.resident[name] = loaded
            self.model_key, self.model, self.tokenizer = name, loaded.model, loaded.tokenizer
            plan = loaded.plan
            self.cli_args.prefill_step_size = min(self.step or plan.prefill_step, plan.widest_step)
            self.is_batchable = self.cli_args.decode_concurrency > 1 and all(
                hasattr(c, "merge") for c in make_prompt_cache(self.model)
            )
        return self.model, self.tokenizer

    def reset(self) -> None:
        """Let go of all models. Their sessions go to files, if there are any."""
        super().reset()
        for name in list(self.resident):
            self._unload(name)

    def _load_beside(self, name: str) -> Loaded:
        needed = self.plans[name].total if self.config.slots else self.shares[name]
        super().reset()  # the current model may be one that has to go

        def room() -> int:
            return self.budget - sum(x.plan.total for x in self.resident.values())

        while self.resident and room() < needed:
            self._unload(next(iter(self.resident)))
        try:
            folder = self.folders[name]
            model, config = load_model(
                folder,
                trust_remote_code=self.cli_args.trust_remote_code,
                config=self.config,
                adapter_path=self.cli_args.adapter_path,
                share=min(room(), self.shares[name]),
            )
            tokenizer = load_tokenizer(
                folder,
                dict(self._tokenizer_config),
                eos_token_ids=config.get("eos_token_id"),
            )
        except (SmoeError, OSError) as e:
            raise RequestError(500, f"{name} cannot be loaded: {e}") from e
        plan, tuned = model._streaming.plan, model._streaming.tuned
        self.sessions.open(name, self._fingerprint(name))
        self._limit_sessions([*(x.plan for x in self.resident.values()), plan])
        how = f"; as tuned: {tuned}" if tuned else ""
        logging.info(f"{name} loaded: {format_bytes(plan.total)} planned{how}")
        return Loaded(model, tokenizer, plan)

    def _unload(self, name: str) -> None:
        self.sessions.evict(name)
        del self.resident[name]
        self._limit_sessions([x.plan for x in self.resident.values()])
        gc.collect()
        mx.clear_cache()
        logging.info(f"{name} made room")

    def _limit_sessions(self, plans: list[MemoryPlan]) -> None:
        """All KV caches together, those in use included, get what the plans set aside for them."""
        extra = self.cli_args.prompt_cache_bytes
        self.sessions.limit = sum(p.kv_cache for p in plans) if extra is None else extra

    def _fingerprint(self, name: str) -> str:
        args = self.cli_args
        return fingerprint(
            self.folders[name],
            name,
            args.adapter_path,
            args.kv_bits,
            args.kv_group_size,
            args.quantized_kv_start,
        )


def _shares(plans: dict[str, MemoryPlan], budget: int) -> dict[str, int]:
    """What each model may have, in bytes."""
    largest = max(plans, key=lambda name: plans[name].full)
    shares = {name: plan.full for name, plan in plans.items()}
    if (full := sum(shares.values())) <= budget:
        return {name: budget * share // full for name, share in shares.items()}
    shares[largest] = budget - sum(shares[name] for name in shares if name != largest)
    if shares[largest] >= plans[largest].useful:
        return shares
    return dict.fromkeys(plans, budget)


def parse_models(names: list[str]) -> dict[str, str]:
    """name -> path, from PATH or NAME=PATH. A folder's name is its last part.

    Raises:
        SmoeError: a name comes twice.
    """
    models: dict[str, str] = {}
    for text in names:
        name, is_named, path = text.partition("=")
        if not is_named or "/" in name:
            folder = Path(text).expanduser()
            name, path = folder.resolve().name if folder.is_dir() else text, text
        if name in models:
            raise SmoeError(f"{name} is named twice. Give one another name: NAME=PATH.")
        models[name] = path
    return models
