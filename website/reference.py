"""What the API reference shows: its pages, and the names on them besides the public ones of the package."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """A page. Public names of the package come first; then `more` names by module, imported from there."""

    title: str
    introduction: str
    more: tuple[tuple[str, str], ...] = ()  # module below agent_r1, names

    def paths(self) -> list[str]:
        return [f"agent_r1.{module}.{name}" for module, names in self.more for name in names.split()]


TOPICS = {
    "runs": Topic(
        "Train and load runs",
        "Training from Python: [the guide](../python-api.md), and [all keywords](../python-api.md#settings).",
        (
            ("runs.reader", "RunReader"),
            ("runs.trajectories", "read_trajectories transcript"),
            ("runs.outcomes", "EvalRecord"),
            ("runs.compare", "Side find_sides compare"),
            ("runs.statistics", "PairedDifference paired_difference"),
        ),
    ),
    "tools": Topic(
        "Tools",
        "What the model may call. [The guide](../write-a-tool.md).",
        (
            ("tools.base", "ToolCall"),
            ("tools.calculator", "calculator"),
            ("tools.python.tool", "PythonTool"),
            ("tools.search.tool", "SearchTool"),
            ("tools.search.dense", "DenseSettings"),
        ),
    ),
    "formats": Topic(
        "Tool-call formats",
        "How a model writes a tool call, and how it is read. [All formats](../tool-formats.md).",
        (
            ("tokens.formats.table", "FORMATS get_format detect_format register_format"),
            ("tokens.formats.base", "ToolCallFormat ParsedCall ParseFailure"),
            ("tokens.formats.headed", "HeadedFormat"),
            ("tokens.formats.tagged", "TextValuesFormat"),
        ),
    ),
    "envs": Topic("Environments", "What answers the agent. [The guide](../write-an-env.md)."),
    "flows": Topic("Flows", "How an episode is played. [The guide](../write-a-flow.md)."),
    "context": Topic(
        "Context policies",
        "What the model sees of its conversation. [The guide](../context.md).",
        (
            ("flows.context", "ContextPolicy ContextView Window DropResults Notes Summary Rewrite"),
            ("flows.reasoning", "StripReasoning"),
        ),
    ),
    "rewards": Topic(
        "Rewards and judges",
        "What an episode earns. [The guide](../write-a-reward.md).",
        (
            ("rollout.scoring", "Scorer"),
            ("rollout.rewards.shaping", "weighted gated clean_calls matches"),
            ("rollout.rewards.judge", "LLMJudge judge_prompt read_score"),
            ("rollout.rewards.reward_model", "BatchedReward"),
            ("rollout.rewards.classifier", "ClassifierReward final_exchange"),
            ("rollout.rewards.attempts", "ScoringError TransientError"),
            ("serve.gateway", "agent_reward"),
        ),
    ),
    "algorithms": Topic(
        "Algorithms",
        "From rewards to a loss. [The guide](../write-an-algorithm.md), [every algorithm](../algorithms/README.md).",
        (
            ("learn.algorithms", "Algorithm get_algorithm"),
            ("learn.credit", "Scored ScoredGroups Credit assign_credit"),
            ("learn.rewards", "RewardShaper KLInReward"),
            (
                "learn.estimators",
                "group_return leave_one_out_return whitened_group_return greedy_difference step_return token_return "
                "step_gae token_gae anchored_return",
            ),
            ("learn.losses", "LossInputs Counts LossOutput token_weights token_clip step_clip reinforce capped_weight"),
            ("learn.batch.packs", "merge_steps"),
        ),
    ),
    "data": Topic(
        "Data",
        "Where rows and pictures come from. [Recipes](../recipes.md), [pictures](../vision.md).",
        (
            ("data.rows", "load_rows map_columns"),
            ("data.downloads", "Report data_folder fetch"),
            ("data.panels", "panel_hash"),
            ("vision.pictures", "Picture pictures_of"),
            ("vision.picture_format", "PictureFormat QwenPictures IdeficsPictures"),
        ),
    ),
    "adapters": Topic(
        "Adapters",
        "Environments and tasks of other packages. [How to name them in a recipe](../adapters.md).",
        (
            ("adapters.gymnasium_env", "GymnasiumEnv rows reward"),
            ("adapters.reasoning_tasks", "rows reward"),
            ("adapters.verifiers_tasks", "rows reward VerifiersEnv"),
            ("adapters.openenv_env", "OpenEnvEnv rows reward"),
            ("adapters.harbor", "rows reward HarborEnv"),
        ),
    ),
    "types": Topic(
        "Types",
        "What flows through the pipeline: frozen dataclasses. [Concepts](../concepts.md) connects them.",
        (("types", "Step Group ToolCallRecord"),),
    ),
    "errors": Topic("Errors", "What the framework raises. [Error messages and what to do](../errors.md)."),
}
TOPIC_OF = {"api": "runs", "resources": "tools"}  # first part of a public name's module -> its page, if not the same


def page_text(topic: Topic, public: list[str]) -> str:
    """A page in Markdown, with a directive of mkdocstrings for each name."""
    parts = [f"# {topic.title}", topic.introduction, *(f"::: {path}" for path in public)]
    for module, names in topic.more:
        parts.append(f"From `agent_r1.{module}`:")
        parts += [f"::: agent_r1.{module}.{name}" for name in names.split()]
    return "\n\n".join(parts) + "\n"


def page_links(page: str, topic: Topic, public: list[str]) -> str:
    """A line of the index. Names that several modules of a page have are shown with theirs."""
    paths = [*public, *topic.paths()]
    uses = Counter(path.rpartition(".")[2] for path in paths)
    links = []
    for path in paths:
        *_, module, name = path.split(".")
        links.append(f"[`{name if uses[name] == 1 else f'{module}.{name}'}`]({page}.md#{path})")
    return f"**[{topic.title}]({page}.md)**: {', '.join(links)}"
