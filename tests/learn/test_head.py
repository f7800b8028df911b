"""The chunked head against its definition: all logits at once, and autograd."""

from __future__ import annotations

import shutil
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agent_r1.learn.model.head import HeadSettings, token_logprobs

T, D, V = 11, 6, 17


def inputs(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets_T = torch.randint(0, V, (T,), generator=generator)
    return drawn(T, D), drawn(V, D), drawn(V) if bias else None, targets_T


def settings(**changes: Any) -> HeadSettings:
    usual: dict[str, Any] = {
        "temperature": 1.0,
        "softcap": None,
        "entropy_gradient": False,
        "chunk": 4,
        "dtype": torch.float32,
        "compiled": False,
    }
    return HeadSettings(**(usual | changes))


def definition(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, made: HeadSettings
) -> tuple[Tensor, Tensor]:
    logits_TV = torch.nn.functional.linear(hidden_TD, weight_VD, bias_V)
    if made.softcap is not None:
        logits_TV = made.softcap * (logits_TV / made.softcap).tanh()
    logprobs_TV = (logits_TV / made.temperature).log_softmax(-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(-1, targets_T[:, None])[:, 0], entropy_T


def gradients(
    function: Any, made: HeadSettings, dtype: torch.dtype, *, bias: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Values, and gradients of a loss in which every token counts differently."""
    hidden_TD, weight_VD, bias_V, targets_T = inputs(dtype, bias=bias)
    logprobs_T, entropy_T = function(hidden_TD, weight_VD, bias_V, targets_T, made)
    weights_T = torch.linspace(-1, 2, T, dtype=dtype)
    loss = (weights_T * logprobs_T).sum()
    if made.entropy_gradient:
        loss = loss + (weights_T.flip(0) * entropy_T).sum()
    loss.backward()
    leaves = [leaf for leaf in (hidden_TD, weight_VD, bias_V) if leaf is not None]
    return [logprobs_T.detach(), entropy_T.detach()], [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_is_definition(made: HeadSettings) -> None:
    """In fp32 against the definition in fp64: 1e-6 of the length of each value and gradient."""
    got = gradients(token_logprobs, made, torch.float32, bias=True)
    expected = gradients(definition, made, torch.float64, bias=True)
    for ours, exact in zip(chain(*got), chain(*expected), strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.3, 2.0)])
def test_values_and_gradients_are_those_of_the_definition(
    temperature: float, softcap: float | None, entropy_gradient: bool
) -> None:
    assert_is_definition(settings(temperature=temperature, softcap=softcap, entropy_gradient=entropy_gradient))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_the_compiled_head_is_the_same_function() -> None:
    assert_is_definition(settings(temperature=1.3, softcap=2.0, entropy_gradient=True, compiled=True))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_backward_pass_is_the_derivative_of_the_forward_pass(softcap: float | None) -> None:
    made = settings(temperature=0.8, softcap=softcap, entropy_gradient=True, dtype=torch.float64)
    hidden_TD, weight_VD, bias_V, targets_T = inputs(torch.float64)
    assert bias_V is not None
    # gradcheck compares with finite differences, element by element
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, b, targets_T, made), (hidden_TD, weight_VD, bias_V)
    )


def test_the_size_of_the_chunks_changes_nothing() -> None:
    whole = gradients(token_logprobs, settings(chunk=100, dtype=torch.float64), torch.float64, bias=False)
    for chunk in (1, 3, T):
        made = settings(chunk=chunk, dtype=torch.float64)
        torch.testing.assert_close(gradients(token_logprobs, made, torch.float64, bias=False), whole)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_still_do() -> None:
    hidden_TD, weight_VD, _, targets_T = inputs()
    token_logprobs(hidden_TD, weight_VD.detach(), None, targets_T, settings())[0].sum().backward()
    assert hidden_TD.grad is not None
    assert weight_VD.grad is None


def test_half_precision_products_give_fp32_numbers_and_fp32_gradients_of_the_masters() -> None:
    hidden_TD, weight_VD, _, targets_T = inputs()
    logprobs_T, entropy_T = token_logprobs(hidden_TD, weight_VD, None, targets_T, settings(dtype=torch.bfloat16))
    logprobs_T.sum().backward()
    assert {logprobs_T.dtype, entropy_T.dtype, hidden_TD.grad.dtype, weight_VD.grad.dtype} == {torch.float32}  # type: ignore[union-attr]
    expected, _ = definition(*inputs(bias=False), settings())
    torch.testing.assert_close(logprobs_T, expected, rtol=0, atol=0.1)  # 8 bits of mantissa, logits of order 5


def test_no_tokens_give_empty_results() -> None:
    hidden_TD, weight_VD, _, targets_T = inputs()
    logprobs_T, entropy_T = token_logprobs(hidden_TD[:0], weight_VD, None, targets_T[:0], settings())
    logprobs_T.sum().backward()
    assert logprobs_T.shape == entropy_T.shape == (0,)


class LargestTensor(TorchDispatchMode):
    """Watches everything that is computed."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_the_logits_of_one_chunk_are_the_largest_thing_that_ever_exists() -> None:
    tokens, vocabulary = 64, 128
    hidden_TD = torch.randn(tokens, 2, requires_grad=True)
    weight_VD = torch.randn(vocabulary, 2, requires_grad=True)
    with LargestTensor() as watch:
        made = settings(chunk=8, entropy_gradient=True)
        logprobs_T, entropy_T = token_logprobs(hidden_TD, weight_VD, None, torch.zeros(tokens, dtype=torch.long), made)
        (logprobs_T + entropy_T).sum().backward()
    assert watch.numel == 8 * vocabulary
