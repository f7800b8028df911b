"""AdamW's moments in 8 bits: how far they are from fp32, for one step and over many."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from agent_r1.learn import moments
from agent_r1.learn.moments import FACTOR, State, compress, expand
from agent_r1.learn.optimizer import Optimizer
from agent_r1.learn.sizes import is_compressed, moment_bytes
from tests.learn.test_optimizer import saved

LR = 0.01
# Half a level of the root is a factor of sqrt(FACTOR) = 1.0229.
ROOT_ERROR = math.sqrt(FACTOR) - 1 + 1e-4
# Levels of the ratio are squares of k / 127: at most (127^2 - 126.5^2) / 127^2 = 0.0079 of the largest off.
RATIO_ERROR = 0.008


def state_of(m: Tensor, v: Tensor) -> State:
    return {"step": torch.tensor(3.0), "exp_avg": m, "exp_avg_sq": v}


def random_state(seed: int, shape: tuple[int, ...], spread: float) -> State:
    """Numbers of very different sizes. As in AdamW, the first moment is of the size of the root of the second."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.exp(spread * torch.randn(shape, generator=generator))
    return state_of(root * torch.randn(shape, generator=generator).clamp(-2, 2), root.square())


def test_codes_by_hand() -> None:
    # Roots 1, 0.1, 1e-5 and 1e-7. FACTOR ** 254 = 1e5, so the codes are 255, 255 - 254 / 5 = 204.2, 1 and, as it must
    # not become 0, 1 again. The four zeros fill the row up to eight.
    v = torch.tensor([[1.0, 1e-2, 1e-10, 1e-14, 0, 0, 0, 0]])
    # Stored roots are 1, FACTOR ** (204 - 255) = 0.0991, 1e-5, 1e-5: with these first moments the ratios are 2, -0.5, 1
    # and 0. Of the largest, 2, the roots of their shares are 1, 0.5, 0.7071 and 0, times 127.
    m = torch.tensor([[2.0, -0.5 * FACTOR**-51, 1e-5, 0, 0, 0, 0, 0]])
    found = compress(state_of(m, v))
    assert found["exp_avg_sq"].tolist() == [[255, 204, 1, 1, 0, 0, 0, 0]]
    assert found["exp_avg"].tolist() == [[127, -64, 90, 0, 0, 0, 0, 0]]
    assert found["exp_avg_sq_scale"].tolist() == [[1.0]]
    assert found["exp_avg_scale"].tolist() == [[2.0]]
    again = expand(found)
    expected = [2.0, -2 * (64 / 127) ** 2 * FACTOR**-51, 2 * (90 / 127) ** 2 * 1e-5, 0, 0, 0, 0, 0]
    torch.testing.assert_close(again["exp_avg"], torch.tensor([expected]), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        again["exp_avg_sq"], torch.tensor([[1.0, FACTOR**-102, 1e-10, 1e-10, 0, 0, 0, 0]]), rtol=1e-4, atol=0
    )


@given(st.integers(0, 100), st.sampled_from([(1, 8), (3, 300), (5, 4, 70), (2, 512)]), st.floats(0, 1.5))
def test_the_root_and_the_ratio_are_off_by_half_a_level_at_most(
    seed: int, shape: tuple[int, ...], spread: float
) -> None:
    before = random_state(seed, shape, spread)
    after = expand(compress(before))
    root, stored = before["exp_avg_sq"].sqrt(), after["exp_avg_sq"].sqrt()
    assert float((stored / root - 1).abs().max()) <= ROOT_ERROR
    ratio, kept = before["exp_avg"] / stored, after["exp_avg"] / stored
    assert float((kept - ratio).abs().max()) <= RATIO_ERROR * float(ratio.abs().max())
    assert after["step"] == before["step"]


def test_a_state_does_not_depend_on_how_its_rows_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state(0, (7, 600), 1.0)
    codes = compress(state)
    parts = [
        compress({"step": state["step"], **{k: state[k].split(3)[i] for k in ("exp_avg", "exp_avg_sq")}})
        for i in range(3)
    ]
    monkeypatch.setattr(moments, "CHUNK", 1500)  # two rows at a time
    chunked = compress(state)
    for name in codes.keys() - {"step"}:
        assert torch.equal(codes[name], torch.cat([part[name] for part in parts]))
        assert torch.equal(codes[name], chunked[name])
        assert torch.equal(expand(codes).get(name, codes[name]), expand(chunked).get(name, codes[name]))


def test_a_rank_without_rows_has_an_empty_state() -> None:
    empty = compress(state_of(torch.empty(0, 300), torch.empty(0, 300)))
    assert empty["exp_avg"].shape == (0, 300)
    assert empty["exp_avg_scale"].shape == (0, 2)
    assert expand(empty)["exp_avg"].shape == (0, 300)


def test_the_size_of_a_state_by_hand() -> None:
    # 300 numbers are two blocks: 2 moments x 10 rows x (300 codes + 2 scales of 4 bytes)
    assert moment_bytes(10, 300, eight_bit=True) == 2 * 10 * (300 + 8)
    assert moment_bytes(10, 300, eight_bit=False) == 2 * 10 * 300 * 4
    assert moment_bytes(10, 1, eight_bit=True) == 2 * 10 * 4  # vectors stay in fp32
    for shape in ((10, 300), (4, 8), (3, 2, 200)):
        state = compress(random_state(0, shape, 1.0))
        held = sum(t.numel() * t.element_size() for name, t in state.items() if name != "step")
        assert held == moment_bytes(shape[0], math.prod(shape[1:]), eight_bit=True)
    assert not is_compressed(7)


def stationary(step: int) -> Tensor:
    return _mean() + _noise(step)


def rare_rows(step: int) -> Tensor:
    """Each row has a gradient in a tenth of the steps, like the embedding of a token."""
    return stationary(step) * (torch.rand(ROWS, 1, generator=_generator(1000 + step)) < 0.1)


def rare_numbers(step: int) -> Tensor:
    return stationary(step) * (torch.rand(ROWS, COLUMNS, generator=_generator(2000 + step)) < 0.05)


def changing(step: int) -> Tensor:
    """Half of the columns have gradients a hundred times smaller than the others; they take turns."""
    return stationary(step) * torch.where(torch.arange(COLUMNS) % 2 == step // 50 % 2, 1.0, 0.01)


ROWS, COLUMNS, STEPS = 16, 520, 100


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sizes() -> Tensor:
    """From 1e-6 to 1e-2 within a row."""
    return 1e-4 * torch.exp(1.5 * torch.randn(ROWS, COLUMNS, generator=_generator(1)))


def _mean() -> Tensor:
    return 0.3 * _sizes() * torch.randn(ROWS, COLUMNS, generator=_generator(2))


def _noise(step: int) -> Tensor:
    return _sizes() * torch.randn(ROWS, COLUMNS, generator=_generator(100 + step))


def optimizer_for(parameters: list[nn.Parameter], **settings: Any) -> Optimizer:
    usual: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1e9}
    return Optimizer(parameters, **(usual | {"schedule": lambda taken, planned: 1.0} | settings))


@pytest.mark.parametrize("gradient", [stationary, rare_rows, rare_numbers, changing])
def test_a_hundred_steps_stay_close_to_those_of_fp32(gradient: Callable[[int], Tensor]) -> None:
    # One update is m / root. The stored root is off by up to 2.3 % and the ratio by 0.8 % of the largest, and a new
    # gradient often changes the root by less than half a level, so that it lags behind: about a tenth in the norm of
    # one update. These errors have no preferred direction, so the sum of a hundred updates is closer.
    weights = [nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(2)]
    exact, small = optimizer_for([weights[0]]), optimizer_for([weights[1]], eight_bit=True)
    largest, errors = 0.0, []
    for step in range(STEPS):
        updates = [-weight.detach().clone() for weight in weights]
        for weight, update, optimizer in zip(weights, updates, (exact, small), strict=True):
            weight.grad = gradient(step)
            optimizer.step()
            update += weight.detach()
        largest = max(largest, float(updates[1].abs().max()) / LR)
        errors.append(float((updates[1] - updates[0]).norm() / updates[0].norm()))
    path = float((weights[1] - weights[0]).detach().norm() / weights[0].detach().norm())
    assert 0 < path < 0.06
    assert max(errors[10:]) < 0.15
    # AdamW's updates are at most (1 - 0.9) / sqrt((1 - 0.99) (1 - 0.9^2 / 0.99)) = 2.35 times lr, by Cauchy-Schwarz. A
    # root that was rounded to 0 would make them thousands of times lr.
    assert largest < 2.35


@pytest.mark.parametrize("offload_before", [False, True])
@pytest.mark.parametrize("offload_after", [False, True])
def test_a_saved_state_continues_bit_for_bit(offload_before: bool, offload_after: bool) -> None:
    def weights() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(ROWS, COLUMNS)), nn.Parameter(torch.zeros(COLUMNS))]

    def take(optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            for parameter in optimizer.parameters:
                parameter.grad = stationary(step)[0 if parameter.ndim == 1 else slice(None)]
            optimizer.step()

    straight = optimizer_for(weights(), eight_bit=True)
    first = optimizer_for(weights(), eight_bit=True, offload=offload_before)
    second = optimizer_for(weights(), eight_bit=True, offload=offload_after)
    take(straight, range(6))
    take(first, range(3))
    with torch.no_grad():
        for mine, theirs in zip(second.parameters, first.parameters, strict=True):
            mine.copy_(theirs)
    state = saved(first)
    assert [t.dtype for t in state["adam"]["state"][0].values()] == [
        *(torch.float32, torch.int8, torch.uint8, torch.float32, torch.float32)
    ]
    second.load_state_dict(state)
    take(second, range(3, 6))
    for mine, theirs in zip(second.parameters, straight.parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_a_parameter_without_a_gradient_keeps_its_state() -> None:
    weight, other = (nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(2))
    optimizer = optimizer_for([weight, other], eight_bit=True)
    weight.grad, other.grad = stationary(0), stationary(1)
    optimizer.step()
    before = {name: tensor.clone() for name, tensor in optimizer._adam.state[weight].items()}
    weight.grad = None
    optimizer.step()
    after = optimizer._adam.state[weight]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_a_step_needs_for_itself_is_counted() -> None:
    weights = [nn.Parameter(torch.zeros(ROWS, COLUMNS)), nn.Parameter(torch.zeros(COLUMNS))]
    assert optimizer_for(weights).step_bytes == 0
    # the two moments of the matrix in fp32; the vector is in another group, so in another bucket
    assert optimizer_for(weights, eight_bit=True).step_bytes == 2 * 4 * ROWS * COLUMNS
    size = optimizer_for(weights, eight_bit=True).state_bytes
    assert size == moment_bytes(ROWS, COLUMNS, eight_bit=True) + 2 * 4 * COLUMNS
    assert optimizer_for(weights, eight_bit=True, offload=True).state_bytes == 0
