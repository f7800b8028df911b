"""Which rank a process is, from the variables of torchrun and srun."""

from __future__ import annotations

import pytest

from agent_r1.errors import ConfigError
from agent_r1.ranks.rank_env import first_host, place_of_rank

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_ID": "41234",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}


def test_no_variables_mean_one_process() -> None:
    assert place_of_rank({"PATH": "/bin"}) is None


def test_the_variables_of_torchrun() -> None:
    place = place_of_rank(TORCHRUN)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 8, 1, 8)  # all on one host
    several = place_of_rank({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"})
    assert several is not None
    assert several.local_size == 2
    assert (place.address, place.port) == ("gpu1", 29500)


@pytest.mark.parametrize(("rank", "launched", "hosts"), [("0", "", True), ("0", "True", False), ("1", "", False)])
def test_rank_0_hosts_the_store_unless_a_launcher_does(rank: str, launched: str, hosts: bool) -> None:
    place = place_of_rank({**TORCHRUN, "RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": launched})
    assert place is not None
    assert place.hosts_store is hosts


def test_the_variables_of_srun() -> None:
    place = place_of_rank(SRUN)
    assert place is not None
    assert (place.rank, place.size, place.local_rank) == (5, 16, 2)
    for node, count in enumerate((8, 8, 2, 3, 3)):
        here = {"SLURM_STEP_TASKS_PER_NODE": "8(x2),2,3(x2)", "SLURM_NODEID": str(node)}
        found = place_of_rank({**SRUN, **here})
        assert found is not None
        assert found.local_size == count
    assert (place.address, place.port) == ("gpu007", 20_000 + 1234)
    chosen = place_of_rank({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"})
    assert chosen is not None
    assert (chosen.address, chosen.port) == ("10.0.0.1", 7)


def test_a_batch_script_is_not_a_rank() -> None:
    assert place_of_rank({name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[007-012,20],cpu1", "gpu007"),
        ("rack2-[4,6]-ib,x", "rack2-4-ib"),
    ],
)
def test_the_first_host_is_where_the_ranks_meet(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK=8 is not one of WORLD_SIZE=8 ranks"),
        ({"RANK": "one"}, "RANK='one' is not a number"),
        ({"LOCAL_RANK": None, "MASTER_PORT": None}, "but not LOCAL_RANK, MASTER_PORT: start the ranks with torchrun"),
    ],
)
def test_bad_variables_are_refused(changes: dict[str, str | None], message: str) -> None:
    variables = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        place_of_rank(variables)
