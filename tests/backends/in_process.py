"""Stands for verl's workers in tests: a plain transformers model per role, trained as verl does it.

Rows are dealt to `size` workers. Each computes its share in micro-batches of one row, without packing, and gradients
are averaged over the workers, as FSDP does.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from agent_r1.backends.verl.inside.losses import PolicyLoss, ValueLoss
from agent_r1.backends.verl.inside.schedule import AdamW
from agent_r1.backends.verl.learner import Extras, Found, Rows


class InProcessWorkers:
    def __init__(self, network: Any, *, size: int = 2, head: nn.Linear | None = None, **optimizer: Any) -> None:
        self.size = size
        self.network, self.reference, self.body = (deepcopy(network).eval() for _ in range(3))
        self.head = deepcopy(head)
        self.policy_loss: PolicyLoss | None = None
        self.value_loss: ValueLoss | None = None
        self.max_grad_norm = optimizer.pop("max_grad_norm", 1.0)
        self.calls: list[str] = []
        self._adam = AdamW(self.network.parameters(), role="policy", **optimizer)
        if self.head is not None:
            own = [*self.head.parameters(), *self.body.model.parameters()]
            self._critic_adam = AdamW(own, role="critic", **optimizer)

    @torch.no_grad()
    def logprobs(self, rows: Rows, extras: Extras) -> Tensor:
        self.calls.append("logprobs")
        return torch.cat([self._logprobs(self.network, ids, extras)[0] for ids in rows["input_ids"]])

    @torch.no_grad()
    def reference_logprobs(self, rows: Rows, extras: Extras) -> Tensor:
        self.calls.append("reference")
        return torch.cat([self._logprobs(self.reference, ids, extras)[0] for ids in rows["input_ids"]])

    @torch.no_grad()
    def values(self, rows: Rows, extras: Extras) -> Tensor:
        return torch.cat([self._values(ids) for ids in rows["input_ids"]])

    def update_policy(self, rows: Rows, extras: Extras) -> Found:
        self.calls.append("policy")

        def output(ids: Tensor) -> dict[str, Tensor]:
            logprobs, entropy = self._logprobs(self.network, ids, extras)
            return {"log_probs": logprobs, "entropy": entropy}

        return self._update(rows, extras, output, self.policy_loss, self._adam)

    def update_critic(self, rows: Rows, extras: Extras) -> Found:
        self.calls.append("critic")
        return self._update(rows, extras, lambda ids: {"values": self._values(ids)}, self.value_loss, self._critic_adam)

    def _update(self, rows: Rows, extras: Extras, output: Any, loss: Any, adam: AdamW) -> Found:
        count = len(rows["input_ids"])
        assert count % self.size == 0, "verl needs equal shares"
        found: Found = {}
        adam.zero_grad()
        for index in range(count):
            data = {name: each[index] for name, each in rows.items()} | extras | {"dp_size": self.size}
            share, metrics = loss(output(rows["input_ids"][index]), data)
            (share / self.size).backward()
            for name, value in metrics.items():
                found.setdefault(name, []).append(value)
        parameters = [p for group in adam.param_groups for p in group["params"]]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.max_grad_norm))
        if norm == norm and norm != float("inf"):  # verl's engines skip the step otherwise
            adam.step()
        return found | {"grad_norm": [norm]}

    @staticmethod
    def _logprobs(network: Any, ids: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """Of the token after each position; the last has none, so verl's number there means nothing."""
        logits = network(input_ids=ids[None]).logits[0].float() / extras["temperature"]
        every = logits.log_softmax(-1)
        return every.gather(1, ids.roll(-1)[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def _values(self, ids: Tensor) -> Tensor:
        assert self.head is not None
        hidden = self.body.model(input_ids=ids[None]).last_hidden_state[0].float()
        values: Tensor = self.head(hidden)[:, 0]
        return values
