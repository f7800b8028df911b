"""Blocks count their users, and are found by name while they hold the named tokens."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent_r1.engines.local.blocks import START, BlockPool, chain_names, name_after

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(tokens, tokens, st.sampled_from([START, name_after(START, [7])]))
def test_names_are_equal_when_the_tokens_are(first: list[int], second: list[int], before: bytes) -> None:
    assert (name_after(before, first) == name_after(before, second)) == (first == second)


def test_a_name_stands_for_all_tokens_before_it_too() -> None:
    assert name_after(name_after(START, [1]), [5]) != name_after(name_after(START, [2]), [5])


def test_a_chain_of_names_is_made_of_single_ones() -> None:
    tokens = [5, 0, 2**40, 7, 7]
    first = name_after(b"before", tokens[:2])
    second = name_after(first, tokens[2:4])
    assert chain_names(b"before", tokens, 2) == [first, second, name_after(second, tokens[4:])]
    assert chain_names(b"before", [], 2) == []


class Pool(RuleBasedStateMachine):
    """Any order of calls, compared with a list of held blocks and a table of names."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[int] = []  # once for every user
        self.names: dict[bytes, tuple[int, int]] = {}

    @rule(count=st.integers(0, 3))
    def take(self, count: int) -> None:
        blank = sorted(set(range(6)) - set(self.held))
        if count <= len(blank):
            taken = self.pool.take(count)
            assert taken == blank[:count]  # the lowest first
            self.held += taken

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 20))
    def share(self, index: int) -> None:
        block = self.held[index % len(self.held)]
        self.pool.share(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 20))
    def give_back(self, index: int) -> None:
        block = self.held.pop(index % len(self.held))
        self.pool.give_back([block])
        if block not in self.held:
            self.names = {name: at for name, at in self.names.items() if at[0] != block}

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 20), name=st.binary(min_size=1, max_size=1), count=st.integers(1, 4))
    def publish(self, index: int, name: bytes, count: int) -> None:
        block = self.held[index % len(self.held)]
        self.pool.publish(name, block, count)
        self.names.setdefault(name, (block, count))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 20), kept=st.integers(0, 4))
    def rewrite(self, index: int, kept: int) -> None:
        block = self.held[index % len(self.held)]
        self.pool.rewrite(block, kept)
        self.names = {name: at for name, at in self.names.items() if at[0] != block or at[1] <= kept}

    @invariant()
    def agrees(self) -> None:
        users = Counter(self.held)
        assert self.pool.num_blank == 6 - len(users)
        assert [self.pool.is_shared(block) for block in range(6)] == [users[block] > 1 for block in range(6)]
        assert all(self.pool.find(name) == block for name, (block, _) in self.names.items())
        assert len(self.pool._held) == sum(map(len, self.pool._names.values())) == len(self.names)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=50, deadline=None)
