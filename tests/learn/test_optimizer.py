"""An optimizer whose state lives elsewhere takes the same steps."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from agent_r1.learn import optimizer as module
from agent_r1.learn.optimizer import Optimizer, buckets


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (3,), (5, 2), (2,), (2, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def make(**changes: Any) -> Optimizer:
    settings: dict[str, Any] = {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "eps": 1e-8,
        "schedule": lambda taken, planned: 1.0 / taken,
    }
    return Optimizer(parameters(), **(settings | changes))


def take(optimizer: Optimizer, steps: range, *, skip: int | None = None) -> None:
    """`skip`: a parameter that has no gradient in the first step."""
    for step in steps:
        optimizer.zero_grad()
        for index, parameter in enumerate(optimizer.parameters):
            if index != skip or step > 0:
                parameter.grad = (parameter.detach() + step).sin()
        optimizer.clip()
        optimizer.step()


def values(optimizer: Optimizer) -> list[Any]:
    return [parameter.tolist() for parameter in optimizer.parameters]


def saved(optimizer: Optimizer) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("bucket_bytes", [1, 60, 2**28])
def test_offloading_the_state_takes_bitwise_equal_steps(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", bucket_bytes)
    plain, offloaded = make(), make(offload=True)
    for optimizer in (plain, offloaded):
        take(optimizer, range(4), skip=2)
    assert values(offloaded) == values(plain)
    assert str(saved(offloaded)) == str(saved(plain))


@pytest.mark.parametrize("offload_before", [False, True])
@pytest.mark.parametrize("offload_after", [False, True])
def test_a_saved_state_continues_with_or_without_offloading(offload_before: bool, offload_after: bool) -> None:
    whole, first, second = make(), make(offload=offload_before), make(offload=offload_after)
    take(whole, range(5))
    take(first, range(3))
    state = saved(first)
    with torch.no_grad():
        for mine, theirs in zip(second.parameters, first.parameters, strict=True):
            mine.copy_(theirs)
    second.load_state_dict(state)
    take(second, range(3, 5))
    assert values(second) == values(whole)
    assert second.steps == 5


def test_the_state_between_steps_is_not_the_one_the_step_worked_on() -> None:
    optimizer = make(offload=True)
    take(optimizer, range(2))
    first = optimizer._adam.state[optimizer.parameters[0]]
    before = {name: tensor.data_ptr() for name, tensor in first.items()}
    take(optimizer, range(2, 3))
    after = optimizer._adam.state[optimizer.parameters[0]]
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == before  # the same host memory, used again


def test_state_bytes_are_two_numbers_per_parameter_or_zero_offloaded() -> None:
    # 12 + 3 + 10 + 2 + 4 = 31 parameters of 4 bytes
    assert make().state_bytes == 2 * 31 * 4
    assert make(offload=True).state_bytes == 0


def test_buckets_keep_the_order_and_hold_what_fits() -> None:
    # 48, 12, 40, 8 and 16 bytes
    sizes = [[p.numel() * 4 for p in bucket] for bucket in buckets(parameters(), 60)]
    assert sizes == [[48, 12], [40, 8], [16]]
    assert [len(bucket) for bucket in buckets(parameters(), 1)] == [1] * 5
    assert list(buckets([], 10)) == []


def test_the_epsilon_of_adam_by_hand() -> None:
    # After one step both moments are those of its gradient g: every number moves by lr * g / (|g| + eps).
    optimizer = make(eps=0.5, weight_decay=0.0, max_grad_norm=1e9)
    before = [parameter.detach().clone() for parameter in optimizer.parameters]
    take(optimizer, range(1))
    for old, new in zip(before, optimizer.parameters, strict=True):
        torch.testing.assert_close(new.detach(), old - 0.1 * old.sin() / (old.sin().abs() + 0.5))
