"""The nouns of the pipeline: one frozen type per arrow, without dependencies.

    TaskRow --flow--> Trajectory[Step] --reward--> scored Group --advantages--> CreditedTrajectory --> batch

A trajectory is a sequence of transitions of a step-level MDP: the state is the exact prompt the policy saw,
the action is the exact response it sampled. Nothing here knows models, environments or tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Real
from types import UnionType
from typing import Any, Literal

from agent_r1.errors import brief
from agent_r1.vision.contents import read_pictures
from agent_r1.vision.pictures import Picture

Message = dict[str, Any]  # {"role": ..., "content": ...}, as chat templates take them
PerToken = list[list[float]]  # one trajectory: [step][response token]
SummaryQuality = Literal["whole", "cut", "empty"]
# Why a call has no result. "misplaced": readable, but inside thinking or one too many; "failed": a ToolError.
CallFault = Literal["malformed", "misplaced", "unknown_tool", "bad_arguments", "failed"]
ByRole = float | Mapping[str, float]  # a setting, or its values by role; the key "" holds the value of all other steps
# Check for the usual class first: a check against an abstract class takes longer.
NUMBER, MAPPING = float | Real, dict | Mapping
Versions = tuple[tuple[int, int], ...]  # who sampled a response: (policy version, number of tokens), in order


def of_role(setting: ByRole, role: str = "") -> float:
    return setting.get(role, setting[""]) if isinstance(setting, Mapping) else setting


def check_type(name: str, value: object, kind: type | UnionType, wanted: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {wanted}, got {brief(value)}")


def check_bool(name: str, value: object) -> None:
    """Accept numpy's booleans too. A text is refused: "false" would count as true."""
    try:
        is_bool = value in (True, False)
    except ValueError:  # an array
        is_bool = False
    if not is_bool:
        raise TypeError(f"{name} must be true or false, got {brief(value)}")


def check_reward(name: str, value: object) -> None:
    if not isinstance(value, NUMBER) or not math.isfinite(value):  # numpy's scalars are real numbers too
        raise TypeError(f"{name} must be a finite number, got {brief(value)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One task, with the fields of the published parquet rows."""

    prompt: list[Message]
    row_id: str = ""  # the same in every run: identifies the row in trajectories and evaluation sets
    agent_name: str | None = None  # which flow plays this row; None: the recipe's
    reward_model: Mapping[str, Any] = field(default_factory=dict)  # {"style": ..., "ground_truth": ...}
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)  # override the recipe's env settings
    data_source: str = "unknown"
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ground_truth(self) -> Any:
        return self.reward_model.get("ground_truth")

    def without_ground_truth(self) -> TaskRow:
        """The row as environments see it: the policy must not be able to query its reward."""
        return replace(self, reward_model={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The complete next model input (not a delta), in exactly one of three forms.

    Environments are user code, so the types of the fields are checked here, where a traceback leads to their line.
    """

    messages: list[Message] | None = None
    text: str | None = None
    token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("messages", "text", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"Observation needs exactly one of messages, text, token_ids: got {given or 'none'}. "
                "They are alternatives."
            )
        check_type("Observation.text", self.text, str | None, "a string")
        check_type("Observation.token_ids", self.token_ids, list | None, "a list of ids")
        if self.messages is not None:
            check_messages(self.messages)
            object.__setattr__(self, "messages", read_pictures(self.messages))

    @classmethod
    def grown(cls, messages: list[Message], *, by: int) -> Observation:
        """Return an observation whose last `by` messages are new. Only these are checked, because the others were
        checked before; so the cost of a step does not grow with the conversation."""
        check_messages(messages, start=len(messages) - by)
        made, set_field = object.__new__(cls), object.__setattr__
        set_field(made, "messages", read_pictures(messages, start=len(messages) - by))
        set_field(made, "text", None)
        set_field(made, "token_ids", None)
        return made


def check_messages(messages: list[Message], start: int = 0) -> None:
    check_type("Observation.messages", messages or None, list, "a list of at least one message")
    for index, message in enumerate(messages[start:], start):
        if type(message) is dict and type(message.get("role")) is type(message.get("content")) is str:
            continue  # nearly every message
        name = f"Observation.messages[{index}]"
        check_type(name, message, MAPPING, "a dict with a role and a content")
        check_type(f"{name}['role']", message.get("role"), str, "a string")
        check_type(f"{name}['content']", message.get("content"), str | list | tuple | None, "a string or a list")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy did: the text for the env, and its exact ids."""

    text: str  # decoded without the stop token
    token_ids: list[int]  # the sampled ids, including the stop token


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"  # the env reached a terminal state
    PARSE_LIMIT = "parse_limit"  # the env gave up after too many malformed calls in a row
    MAX_STEPS = "max_steps"  # we stopped it: step budget
    MAX_TOKENS = "max_tokens"  # we stopped it: context or response budget
    TIMEOUT = "timeout"  # we stopped it: wall clock
    ERROR = "error"  # env, tool or reward code raised

    @property
    def is_truncated(self) -> bool:
        """Whether a budget ended the episode. A critic bootstraps if that left a prompt unanswered."""
        return self in (StopReason.MAX_STEPS, StopReason.MAX_TOKENS)

    @property
    def is_failure(self) -> bool:
        """Whether code failed rather than the policy: counted and shown, but never trained on."""
        return self in (StopReason.TIMEOUT, StopReason.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRecord:
    """The outcome of one tool call. Its process reward is assigned to its own tokens."""

    name: str
    arguments: Mapping[str, Any]
    result: str  # as shown to the model
    pictures: tuple[Picture, ...] = ()  # shown after the text of the result
    reward: float = 0.0  # process reward of this call
    error: str | None = None  # the message to the model if the call was refused or failed
    fault: CallFault | None = None  # what kind of error it is
    text_span: tuple[int, int]  # characters [start, end) of the call in the action's text
    token_span: tuple[int, int] | None = None  # response tokens [start, end); set by the flow
    seconds: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """An env's answer to an action. Field types are checked as in `Observation`."""

    observation: Observation | None = None  # None when the episode has terminated
    reward: float = 0.0
    terminated: bool = False  # reached a terminal state; the flow decides about truncation
    stop: StopReason = StopReason.ANSWERED  # read only when terminated
    calls: tuple[ToolCallRecord, ...] = ()
    feedback: str = ""  # the env's reply, for people
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bool("Transition.terminated", self.terminated)
        if not self.terminated and self.observation is None:
            raise ValueError("Transition has neither an observation nor terminated=True: return one of the two")
        if self.observation is not None:
            check_type("Transition.observation", self.observation, Observation, "an Observation")
        check_reward("Transition.reward", self.reward)
        check_type("Transition.feedback", self.feedback, str, "a string")
        check_type("Transition.info", self.info, MAPPING, "a dict")
        check_type("Transition.calls", self.calls, tuple | list, "a tuple of ToolCallRecord")
        for index, call in enumerate(self.calls):
            check_type(f"Transition.calls[{index}]", call, ToolCallRecord, "a ToolCallRecord")
            check_reward(f"Transition.calls[{index}].reward", call.reward)
        if self.terminated:
            check_type("Transition.stop", self.stop, StopReason, "a StopReason such as StopReason.ANSWERED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """For each token of a response, the ids that top-k and top-p left to sample from. Little-endian int32."""

    counts: bytes  # how many ids were kept, one number per response token
    ids: bytes  # the kept ids of all tokens, concatenated

    @classmethod
    def of(cls, per_token: Iterable[Sequence[int]]) -> Support:
        kept = list(per_token)
        flat = [token for ids in kept for token in ids]
        return cls(counts=struct.pack(f"<{len(kept)}i", *map(len, kept)), ids=struct.pack(f"<{len(flat)}i", *flat))

    def __post_init__(self) -> None:
        if len(self.counts) % 4 or 4 * sum(self._counts()) != len(self.ids):
            raise ValueError("Support.counts and Support.ids do not match: a record is damaged")

    def __len__(self) -> int:
        return len(self.counts) // 4

    def first(self, tokens: int) -> Support:
        """The support of the first `tokens` tokens."""
        return Support(counts=self.counts[: 4 * tokens], ids=self.ids[: 4 * sum(self._counts()[:tokens])])

    def per_token(self) -> list[list[int]]:
        ids = iter(struct.unpack(f"<{len(self.ids) // 4}i", self.ids))
        return [[next(ids) for _ in range(count)] for count in self._counts()]

    def _counts(self) -> tuple[int, ...]:
        return struct.unpack(f"<{len(self)}i", self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One transition (s_t, a_t, r_t) of the step-level MDP, in token space."""

    prompt_ids: list[int]  # s_t: exactly the tokens the policy saw; negative ones belong to `pictures`
    response_ids: list[int]  # a_t: exactly the tokens the policy sampled
    response_logprobs: list[float]  # log pi_old(a_t | s_t), one per response token
    temperature: float | None = None  # the sampler's, like the next two; None: not recorded
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    support: Support | None = None  # what top_p and top_k left to sample from; the log-probs are relative to it
    reward: float = 0.0  # r_t from the env, before any outcome reward
    calls: tuple[ToolCallRecord, ...] = ()
    action_text: str = ""
    role: str = ""  # who acted, in a flow of several roles
    feedback: str = ""  # the env's reply, for people
    versions: Versions = ()  # policy versions (learner steps) that sampled this; (): not sampled
    is_cut: bool = False  # a token limit ended the response, not the policy
    start_seconds: float | None = None  # from the start of the episode to the start of sampling; None: not recorded
    generate_seconds: float = 0.0
    env_seconds: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)  # returned by the env
    pictures: tuple[Picture, ...] = ()  # pictures shown in the prompt, each once
    hidden_messages: int | None = None  # messages that a context policy left out or changed; None: no policy
    summary: SummaryQuality | None = None  # None: this step is an action, not a summary

    def __post_init__(self) -> None:
        if len(self.response_ids) != len(self.response_logprobs):
            raise ValueError(
                f"Step needs one logprob per response token: got {len(self.response_ids)} tokens "
                f"and {len(self.response_logprobs)} logprobs. Did the engine drop the stop token?"
            )

    @property
    def policy_version(self) -> int:
        """The oldest version that sampled any of the tokens, for staleness. 0 if not sampled."""
        return min((version for version, _ in self.versions), default=0)

    @property
    def is_restricted(self) -> bool:
        """Whether top-k or top-p left only some tokens to sample from."""
        return self.temperature != 0 and (self.top_p < 1 or self.top_k > 0)

    def without_sampling(self) -> Step:
        """Return the step as a demonstration, without the record of how it was sampled."""
        return replace(self, temperature=None, top_p=1.0, top_k=0, support=None, versions=())

    @property
    def is_summary(self) -> bool:
        """Written for a context policy, not for the env: sampled and trained like any step, but not an action."""
        return self.summary is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an episode failed: text for people, and a key that groups failures with the same cause."""

    kind: str  # type of the exception, or what happened if nothing was raised
    message: str
    source: str = ""  # what raised it, for example "tool 'search'"
    place: str = ""  # "task.py:11": the line of user code

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for failures with the same cause, even if the data in their messages differ."""
        return self.kind, self.source, self.place

    def __str__(self) -> str:
        return f"{self.source and f'{self.source} raised '}{self.message}{self.place and f' ({self.place})'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at one row."""

    row_id: str
    trajectory_id: str
    steps: list[Step]
    stop: StopReason
    outcome_reward: float = 0.0  # filled in by scoring
    reward_components: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None  # set if `stop.is_failure`
    started: float | None = None  # Unix time; None: not recorded
    seconds: float = 0.0
    next_prompt_ids: list[int] = field(default_factory=list)  # the prompt that max_steps left unanswered
    next_pictures: tuple[Picture, ...] = ()  # pictures shown in that prompt
    opening: list[Message] = field(default_factory=list)  # the first messages of the env, for people
    counts: Mapping[str, float] = field(default_factory=dict)  # the flow's own numbers; metrics are their means
    log: str = ""  # what the flow's programs wrote, for people

    @property
    def error(self) -> str | None:
        return None if self.failure is None else str(self.failure)

    @property
    def total_reward(self) -> float:
        """The return S: process rewards of the steps plus the outcome reward."""
        return sum(step.reward for step in self.steps) + self.outcome_reward

    @property
    def final_text(self) -> str:
        """The policy's last action, which outcome rewards usually grade."""
        return next((step.action_text for step in reversed(self.steps) if not step.is_summary), "")

    @property
    def num_response_tokens(self) -> int:
        return sum(len(step.response_ids) for step in self.steps)

    @property
    def roles(self) -> list[str]:
        """The roles of the steps, in the order of their first steps."""
        return list(dict.fromkeys(step.role for step in self.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one row."""

    row: TaskRow
    trajectories: list[Trajectory]
    greedy: Trajectory | None = None  # an attempt without sampling noise, for algorithms with a greedy baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedTrajectory:
    """A trajectory with one advantage per response token of each step, ready to be batched."""

    trajectory: Trajectory
    advantages: PerToken
    values: PerToken | None = None  # the critic's estimate before each response token
    value_targets: list[list[float | None]] | None = None  # None for tokens at which the critic is not trained

    def __post_init__(self) -> None:
        expected = [len(step.response_ids) for step in self.trajectory.steps]
        for name in ("advantages", "values", "value_targets"):
            given = getattr(self, name)
            if given is not None and [len(row) for row in given] != expected:
                raise ValueError(
                    f"trajectory {self.trajectory.trajectory_id!r} needs one entry of {name} per response token: "
                    f"steps have {expected} tokens, {name} {[len(row) for row in given]}"
                )
