"""Build the trainer of a run."""

from __future__ import annotations

from typing import Any

from agent_r1.build.collectors import eval_collector, greedy_collector, train_collector
from agent_r1.build.engine import build_engine
from agent_r1.build.learner import build_learner, build_shaper, lora_settings
from agent_r1.build.models.load import Model
from agent_r1.build.plan import Plan
from agent_r1.build.recipe import code_digest
from agent_r1.build.task import named_code
from agent_r1.config import RunConfig
from agent_r1.ranks.crew import Crew
from agent_r1.runs.run_dir import RunDir
from agent_r1.train.async_trainer import AsyncTrainer
from agent_r1.train.trainer import Progress, Trainer


def build_trainer(
    config: RunConfig,
    *,
    run: RunDir,
    plan: Plan,
    model: Model,
    reference: Model | None,
    progress: Progress,
    crew: Crew | None = None,
) -> Trainer:
    """`reference` is the policy before the first step, for the KL penalty."""
    crew, lora = crew or Crew(), lora_settings(config)
    sent = lora if lora is not None and not lora.merges else None
    engine = build_engine(config, model, logs=run.path / "logs", adapters=sent)
    if engine.startup_seconds > 1:
        progress.note(f"engine: ready after {engine.startup_seconds:.0f} s")
    parts = (config, plan.task, model.renderer, engine)
    kind = AsyncTrainer if config.trainer.mode == "async" else Trainer
    return kind(
        run=run,
        learner=build_learner(config, model, plan.algorithm, reference, crew.ranks),
        tokenizer=model.tokenizer,
        input_files=model.input_files,
        engine=engine,
        collector=train_collector(*parts),
        greedy_collector=greedy_collector(*parts) if plan.algorithm.needs_greedy else None,
        eval_collector=eval_collector(*parts),
        scorer=plan.task.scorer,
        progress=progress,
        **trainer_settings(config, plan),
        crew=crew,
    )


def trainer_settings(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """The settings of a trainer, wherever its models are."""
    return {
        "train_rows": plan.train_rows,
        "test_rows": plan.test_rows,
        "algorithm": plan.algorithm,
        "shaper": build_shaper(config, plan.algorithm),
        "seed": config.seed,
        "rows_per_step": config.rollout.rows_per_step,
        "success_reward": config.task.success_reward,
        "max_error_fraction": config.rollout.max_error_fraction,
        **config.trainer.model_dump(include={"dump_every", "keep_checkpoints"}),
        "observer": plan.observer,
        "code": code_digest(named_code(config), recipe=config.recipe),
    }
