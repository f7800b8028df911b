"""Which rank this process is, from the environment that torchrun, srun or our own launcher sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agent_r1.errors import ConfigError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank, and where the ranks meet."""

    rank: int
    size: int
    local_rank: int  # number of the rank on its host
    local_size: int  # how many ranks its host has
    address: str
    port: int
    is_launched: bool = False  # by torchrun or our launcher, which then hosts the store; otherwise rank 0 hosts it
    attempt: str = "0"  # counts the restarts of torchrun, which may restart all ranks

    @property
    def hosts_store(self) -> bool:
        return self.rank == 0 and not self.is_launched


def place_of_rank(variables: Mapping[str, str]) -> RankPlace | None:
    """Return this process's place among the ranks, or None if it was not started as one of several."""
    if not {"RANK", "WORLD_SIZE"} & variables.keys():
        variables = _from_slurm(variables)
        if not variables:
            return None
    if missing := [name for name in TORCHRUN if name not in variables]:
        raise ConfigError(
            f"{', '.join(name for name in TORCHRUN if name in variables)} set, but not {', '.join(missing)}: start the "
            "ranks with torchrun, srun or --gpus, or unset these variables"
        )
    rank, size, local_rank, port = (_number(variables, name) for name in TORCHRUN if name != "MASTER_ADDR")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is not one of WORLD_SIZE={size} ranks")
    return RankPlace(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=_number({"LOCAL_WORLD_SIZE": variables["WORLD_SIZE"], **variables}, "LOCAL_WORLD_SIZE"),
        address=variables["MASTER_ADDR"],
        port=port,
        is_launched=variables.get(AGENT_STORE) == "True",
        attempt=variables.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ConfigError(f"{name}={variables[name]!r} is not a number") from None


def _from_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Translate the variables of srun. A batch script has SLURM_PROCID too, but no nodes of a step."""
    if "SLURM_STEP_NODELIST" not in variables or "SLURM_PROCID" not in variables:
        return {}
    job = int(variables.get("SLURM_JOB_ID", "0"))
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    per_node = _tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(variables.get("SLURM_NODEID", "0"))
    return {
        **({"LOCAL_WORLD_SIZE": per_node[node]} if node < len(per_node) else {}),
        "MASTER_ADDR": first_host(variables["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(20_000 + job % 20_000),  # below the ports that systems hand out; jobs may share a host
        **{name: variables[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in variables},
        **{name: variables[other] for name, other in names.items() if other in variables},
    }


def _tasks_per_node(counts: str) -> list[str]:
    """Expand a list of Slurm: `4(x2),3` is 4, 4, 3."""
    return [count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: `gpu[007-012,20],cpu1` is gpu007."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[]*))?", nodes)
    if found is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodes!r} names no host")
    return "".join(part or "" for part in found.groups())
