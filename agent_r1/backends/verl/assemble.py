"""Builds the trainer of a run on verl: composes verl's settings, starts its processes, and wires them to our loop."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from agent_r1.backends.verl.inside.agent_loop import Purpose, RemoteCollector, ScoredAlready, start_loops
from agent_r1.backends.verl.inside.losses import PolicyLoss, ValueLoss
from agent_r1.backends.verl.learner import RemoteCritic, RemoteModel, VerlLearner
from agent_r1.backends.verl.reader import Reader, load_reader
from agent_r1.backends.verl.rows import RowBatch
from agent_r1.backends.verl.settings import num_agent_loops, pack_tokens, rollout_engine, verl_section, verl_tree
from agent_r1.backends.verl.trainer import VerlEngine, VerlTrainer
from agent_r1.backends.verl.watch import Watch
from agent_r1.backends.verl.workers import VerlWorkers
from agent_r1.build.learner import critic_settings, learner_settings
from agent_r1.build.models.load import export_model
from agent_r1.build.plan import Plan
from agent_r1.build.start import needs_reference
from agent_r1.build.trainer import trainer_settings
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError
from agent_r1.learn.algorithms import Algorithm
from agent_r1.runs.run_dir import RunDir
from agent_r1.train.trainer import Progress

CONFIG_MODULE, CONFIG_NAME = "verl.trainer.config", "ppo_trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Everything of a run that runs elsewhere."""

    workers: VerlWorkers
    loops: list[Any]
    reader: Reader

    def __str__(self) -> str:
        return f"{self.workers}, {len(self.loops)} agent loops"


async def start_processes(
    config: RunConfig, *, run: RunDir, plan: Plan, weights: str | Path, watch: Watch
) -> Processes:
    """Start all processes of a run. The servers sleep until they get weights."""
    if torch.cuda.is_initialized():  # the warm start was made here
        gc.collect()
        torch.cuda.empty_cache()
    model = _keep_reference(config, run, str(weights))
    reader = load_reader(config, model)
    tree = compose_tree(verl_tree(config, plan.algorithm, model=reader.directory), config)
    # They load the recipe while the workers load the model.
    settings, folder, logs = config.model_dump(mode="json"), Path.cwd(), run.path / "logs"
    loops = start_loops(num_agent_loops(config), settings, folder=folder, logs=logs)
    workers = VerlWorkers(tree, has_critic=plan.algorithm.needs_critic, has_reference=config.algorithm.kl_coef > 0)
    workers.start()
    client, engine = workers.servers.get_client(), rollout_engine(config)
    await asyncio.gather(*(loop.start.remote(client, engine, reader.directory) for loop in loops))
    watch.begin(workers.processes() | {f"agent loop {number}": loop for number, loop in enumerate(loops)})
    workers.sleep()
    return Processes(workers=workers, loops=loops, reader=reader)


def compose_tree(ours: dict[str, Any], config: RunConfig) -> DictConfig:
    """verl's defaults with our settings on top. Raises ConfigError for names that verl does not have."""
    with initialize_config_module(CONFIG_MODULE, version_base=None):
        overrides = ["model_engine=megatron"] if verl_section(config).strategy == "megatron" else []
        tree = compose(CONFIG_NAME, overrides=overrides)
    with open_dict(tree):  # verl reads these, but its defaults do not list them
        for place in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"):
            if OmegaConf.select(tree, place) is not None:
                OmegaConf.update(tree, f"{place}.mixed_precision", None, force_add=True)
        for place in ("actor_rollout_ref.model", "critic.model"):
            OmegaConf.update(tree, f"{place}.override_config.attn_implementation", "flash_attention_2", force_add=True)
        for place in ("actor_rollout_ref.actor", "critic") if verl_section(config).strategy == "fsdp2" else ():
            OmegaConf.update(tree, f"{place}.optim.override_optimizer_config", {"role": None, "eps": None})
    try:
        merged = OmegaConf.merge(tree, OmegaConf.create(ours))
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"verl.settings: verl has no such setting: {reason}") from error
    assert isinstance(merged, DictConfig)
    OmegaConf.resolve(merged)
    return merged


def _keep_reference(config: RunConfig, run: RunDir, weights: str) -> str:
    """Return the model that the workers load. A run with a reference or adapters keeps its first model: a resumed run
    needs the same one."""
    if not needs_reference(config):
        return weights
    if not run.reference.is_dir():
        export_model(weights, run.reference, lambda line: None)
    return str(run.reference)


def _learner(config: RunConfig, algorithm: Algorithm, workers: VerlWorkers) -> VerlLearner:
    settings = learner_settings(config, algorithm) | {"max_tokens_per_pack": pack_tokens(config)}
    settings |= {"prefix_sharing": "off", "workers": workers}
    policy: Any = RemoteModel()
    reference: Any = RemoteModel() if config.algorithm.kl_coef > 0 else None
    critic: Any = None
    if algorithm.needs_critic:
        known = RemoteCritic.__dataclass_fields__
        own = {name: value for name, value in critic_settings(config).items() if name in known}
        temperature = config.rollout.temperature

        def values(rows: RowBatch) -> Any:
            return workers.values(rows.token_columns(), {"temperature": temperature})

        critic = RemoteCritic(values=values, **own)
    return VerlLearner(policy, reference=reference, critic=critic, **settings)


def _set_losses(learner: VerlLearner, workers: VerlWorkers) -> None:
    policy = PolicyLoss(
        loss=learner.loss,
        kl_coef=learner.kl_coef,
        kl_estimator=learner.kl_estimator,
        entropy_coef=learner.entropy_coef,
    )
    workers.set_losses(policy, ValueLoss(clip=None if learner.critic is None else learner.critic.value_clip))


def make_trainer(
    config: RunConfig, *, run: RunDir, plan: Plan, progress: Progress, processes: Processes, watch: Watch
) -> VerlTrainer:
    """Build a trainer over running processes."""
    workers, loops = processes.workers, processes.loops
    learner = _learner(config, plan.algorithm, workers)
    _set_losses(learner, workers)

    def collector(purpose: Purpose, group_size: int) -> Any:
        limit = config.rollout.max_concurrent
        return RemoteCollector(loops=loops, purpose=purpose, group_size=group_size, max_concurrent=limit)

    scorer: Any = ScoredAlready()
    return VerlTrainer(
        run=run,
        learner=learner,
        tokenizer=processes.reader.tokenizer,
        input_files=processes.reader.tokenizer,
        engine=VerlEngine(workers),
        collector=collector("train", config.rollout.group_size),
        greedy_collector=collector("greedy", 1) if plan.algorithm.needs_greedy else None,
        eval_collector=collector("eval", config.eval.samples),
        scorer=scorer,
        progress=progress,
        **trainer_settings(config, plan),
        workers=workers,
        base=run.reference if config.lora is not None else None,
        watch=watch,
    )
