"""Checks that need the tokenizer and the rows, but neither the weights nor an episode: seconds.

Each is a function of the prepared `Parts` that returns findings. Errors that stop `agent-r1 train` at once (unknown
settings, a missing model, a context longer than the model's) are findings too: see `prepare`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from agent_r1.build.models.load import load_tokenizer, make_renderer, without_hub
from agent_r1.build.models.source import as_directory
from agent_r1.build.plan import Plan
from agent_r1.build.start import base_model, load_demos
from agent_r1.config import RunConfig
from agent_r1.config.schema import RolloutConfig
from agent_r1.doctor.finding import Finding, green, red, refused, yellow
from agent_r1.doctor.players import RandomAgent, make_env, silent_collector
from agent_r1.envs.base import AgentEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import AgentR1Error, DataError
from agent_r1.guard import explain
from agent_r1.tokens.formats.base import ParsedCall
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import TemplateReport, verify_template
from agent_r1.types import Message, Observation, TaskRow

DRAWS = 12  # calls written and read per tool
LONGEST_ROWS = 8  # rows whose prompts are rendered: those with most characters
HIGH_LR = 5e-3  # for models created from scratch; pretrained ones break at far lower rates
HIGH_PRETRAINED_LR = 1e-4
RARE = 0.001  # share of rows
NARROW, WIDE = 0.5, 1.5  # below, sampling explores little; above, it explores nonsense
WORDS = ("Alpha", "beta 2", "3.5", "naïve", "x_y")
PROSE = 'Two lines,\n  {"a": [1, 2.5]} and "quotes": 17 * 3 = 51 €.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What these checks read."""

    config: RunConfig
    plan: Plan
    tokenizer: Any
    renderer: Renderer
    template: TemplateReport
    vocabulary: int | None  # rows of the model's embedding; None: unknown
    env: AgentEnv | None  # of the first row; None: its flow has none


def prepare(config: RunConfig, plan: Plan, model: str | Path | None = None) -> Parts:
    """Load everything that the checks need, by default from the recipe's own model, which is created. Raises
    AgentR1Error as training would."""
    directory = as_directory(str(model or base_model(config)))
    tokenizer, offline = load_tokenizer(config, directory), without_hub(directory)
    network = AutoConfig.from_pretrained(directory, local_files_only=offline)
    generation = None
    with suppress(OSError):  # not every model has one
        generation = GenerationConfig.from_pretrained(directory, local_files_only=offline)
    renderer, template = make_renderer(config, directory, tokenizer, network, generation)
    return parts_of(config, plan, tokenizer, renderer, template, network)


def parts_of(
    config: RunConfig, plan: Plan, tokenizer: Any, renderer: Renderer, template: TemplateReport, network_config: Any
) -> Parts:
    env = make_env(silent_collector(config, plan, renderer), plan.train_rows[0]) if plan.train_rows else None
    if isinstance(env, ToolEnv):
        template = verify_template(renderer, env.tool_schemas)
    return Parts(
        config=config,
        plan=plan,
        tokenizer=tokenizer,
        renderer=renderer,
        template=template,
        vocabulary=getattr(network_config.get_text_config(), "vocab_size", None),
        env=env,
    )


def run_quick(parts: Parts) -> list[Finding]:
    found: list[Finding] = []
    for check in QUICK:
        try:
            found += check(parts)
        except AgentR1Error as error:
            found.append(refused(_name(check), error))
        except Exception as error:  # noqa: BLE001 (checks call demonstrations, tools and formats, which are user code)
            found.append(red(_name(check), explain(error).message, "Correct the code that raised this"))
    return found


def _name(check: Callable[[Parts], list[Finding]]) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")


def check_prefix(parts: Parts) -> list[Finding]:
    name, context = (
        "template keeps prefixes",
        "each turn is computed from scratch, and what was sampled is rendered anew",
    )
    fix = "Set model.chat_template to a template that only appends, such as chatml_tools"
    if not parts.template.extends:
        return [yellow(name, f"a next user message is not appended: {context}", fix)]
    if parts.plan.task.calls_tools and not parts.template.extends_after_tool:
        return [yellow(name, f"a tool's result is not appended: {context}", fix)]
    return [green(name, "further turns are appended to what the model saw and said")]


def check_tools_shown(parts: Parts) -> list[Finding]:
    name = "template shows tools"
    if not parts.plan.task.calls_tools:
        return []
    if not parts.template.tools_shown:
        return [
            yellow(
                name,
                "the prompt is the same with and without tool schemas, so the model cannot know its tools",
                "Describe the tools in the system message, or set model.chat_template=chatml_tools",
            )
        ]
    if not parts.template.tool_role:
        return [
            yellow(
                name,
                'messages of role "tool" do not appear in the prompt, so results are not seen',
                "Set task.env_kwargs.tool_role=user, or a template with a tool role in model.chat_template",
            )
        ]
    return [green(name, "schemas and results are in the prompt")]


def check_stop_token(parts: Parts) -> list[Finding]:
    """Training ends every response with the first stop token; a prompt must end a reply with one of them too."""
    renderer, name = parts.renderer, "stop token is trained"
    asked: list[Message] = [{"role": "user", "content": "Ping?"}]
    said: list[Message] = [*asked, {"role": "assistant", "content": "probe"}, *asked]
    stops = [parts.tokenizer.convert_ids_to_tokens(stop) for stop in renderer.stop_ids]
    before = renderer.render(Observation(messages=asked))
    with suppress(DataError):
        after = renderer.render(Observation(messages=said))[len(before) :]
        if not set(after) & set(renderer.stop_ids):
            return [
                yellow(
                    name,
                    f"responses end with {stops[0]!r}, which the chat template never writes after a reply",
                    "Set the tokenizer's eos_token to what ends a turn in the template, or change model.chat_template",
                )
            ]
    return [green(name, f"responses end with {stops[0]!r}, and sampling stops at {', '.join(map(repr, stops))}")]


def check_special_tokens(parts: Parts) -> list[Finding]:
    name, tokenizer = "pad and end tokens", parts.tokenizer
    ids, size = set(tokenizer.get_vocab().values()), parts.vocabulary
    if size is not None and max(ids, default=0) >= size:
        return [
            red(
                name,
                f"the tokenizer has ids up to {max(ids)}, the model embeds {size}: the others are index errors",
                "Use the tokenizer that the model was made with, or resize the model's embedding",
            )
        ]
    if tokenizer.eos_token_id is None:
        return [
            yellow(
                name,
                "the tokenizer has no eos_token; the end of a turn was found by trying the chat template",
                "Set eos_token in tokenizer_config.json: other programs that load the model need it",
            )
        ]
    if tokenizer.pad_token_id in parts.renderer.stop_ids:
        return [
            green(name, f"padding is {tokenizer.pad_token!r}, as the end; nothing is padded here, so it is trained")
        ]
    return [
        green(name, f"end {tokenizer.eos_token!r}, padding {tokenizer.pad_token!r}, ids up to {max(ids, default=0)}")
    ]


def check_text_survives(parts: Parts) -> list[Finding]:
    """Environments and rewards read decoded text, and demonstrations are encoded."""
    name, renderer = "text survives the tokenizer", parts.renderer
    texts = [PROSE]
    if parts.config.sft.demos is not None:
        few = parts.config.model_copy(update={"sft": parts.config.sft.model_copy(update={"count": 4})})
        texts = [text for _, said in load_demos(few)[:4] for text in said]
    for text in texts:
        read = renderer.decode(renderer.encode_response(text))
        if read != text:
            return [
                red(
                    name,
                    f"{text[:80]!r} is read back as {read[:80]!r}",
                    "Use a tokenizer that keeps case and whitespace and knows every character (byte-level BPE)",
                )
            ]
    return [green(name, f"{len(texts)} texts are read back as written")]


def check_tool_calls(parts: Parts) -> list[Finding]:
    """Write calls of every tool, through the tokenizer, and read them back."""
    name, env = "tool calls are read back", parts.env
    if not isinstance(env, ToolEnv) or not parts.plan.task.calls_tools:
        return []
    agent, written = RandomAgent(0, env), 0
    for schema in env.tool_schemas:
        tool, refusal = schema["function"], ""
        for _ in range(DRAWS):
            arguments = agent.arguments(tool, WORDS)
            try:
                text = env.tool_format.write_call(tool["name"], arguments)
            except ValueError as error:  # not every format can write every value
                refusal = str(error)
                continue
            written, refusal = written + 1, ""
            read = parts.renderer.decode(parts.renderer.encode_response(text))
            calls = [event for event in env.tool_format.parse(read)[1] if isinstance(event, ParsedCall)]
            given = [
                (each.name, env.tool_format.convert_arguments(each.arguments, tool["parameters"])) for each in calls
            ]
            if given != [(tool["name"], arguments)]:
                return [
                    red(
                        name,
                        f"{text!r:.160} is read as {given!r:.120}",
                        "Correct the tool's name or schema, the call format or the tokenizer: tools would get "
                        "something else than the model says",
                    )
                ]
        if refusal:
            return [
                yellow(
                    name,
                    f"the call format cannot write a call of {tool['name']!r}: {refusal}",
                    "Rename the tool or simplify its parameters, or set task.env_kwargs.tool_format",
                )
            ]
    return [green(name, f"{written} calls of {len(env.tool_schemas)} tools, in the format {env.tool_format.form[:60]}")]


def check_call_format(parts: Parts) -> list[Finding]:
    """With the format `auto`, a template that no format reads is an error before this."""
    if not parts.plan.task.calls_tools:
        return []
    name, found = "call format matches the template", template_format(parts.renderer)
    if found.name is None and found.written:
        return [
            yellow(
                name,
                f"the template shows calls that no known format reads, so not the one set: {found.written[:100]!r}",
                "Register a format with register_format, or set a matching template in model.chat_template",
            )
        ]
    return [green(name, str(found))]


def check_longest_row(parts: Parts) -> list[Finding]:
    """The first prompts of the longest rows, as far as the row tells: an env may add to it."""
    name, rows = "longest row fits the context", [*parts.plan.train_rows, *parts.plan.test_rows]
    tools = parts.env.tool_schemas if parts.env is not None else []
    longest = sorted((row for row in rows if row.prompt), key=lambda row: -len(json.dumps(row.prompt, default=str)))
    sizes = []
    for row in longest[:LONGEST_ROWS]:
        with suppress(DataError, ValueError, TypeError):  # an env may show the row in another way
            sizes.append((len(parts.renderer.render(Observation(messages=row.prompt), tools)), row.row_id))
    return judge_room(name, sizes, len(rows), parts.config.rollout)


def judge_room(name: str, sizes: Sequence[tuple[int, str]], total: int, limits: RolloutConfig) -> list[Finding]:
    """Whether first prompts, the longest of `total`, leave room for a response. A few among thousands may be too long:
    their episodes fail, and training goes on with the others."""
    context, response = limits.max_context_tokens, limits.max_response_tokens
    for room, level in ((0, red), (response, yellow)):
        long = [each for each in sizes if each[0] + max(room, 1) > context]
        if long and (len(long) == len(sizes) or len(long) > RARE * total):
            size, row_id = max(long)
            evidence = f"the prompt of row {row_id!r} has {size} of {context} tokens (rollout.max_context_tokens)"
            left = f"{context - size} are left for a response of up to {response} (rollout.max_response_tokens)"
            fix = f"Set rollout.max_context_tokens to at least {size + response}, or drop the row"
            return [level(name, f"{evidence}: {left if size < context else 'nothing can be sampled'}", fix)]
    fitting = [size for size, _ in sizes if size + response <= context]
    others = f"; {len(sizes) - len(fitting)} of {total} rows are too long" if len(fitting) < len(sizes) else ""
    return [green(name, f"prompts have up to {max(fitting)} of {context} tokens{others}")] if fitting else []


def check_rows(parts: Parts) -> list[Finding]:
    problems = row_problems(parts.plan)
    counted = f"{len(parts.plan.train_rows)} rows for training, {len(parts.plan.test_rows)} held out"
    fix = "Remove the rows from the file or function that task.rows names"
    return [yellow("rows", problem, fix) for problem in problems] or [green("rows", counted)]


def check_sampling(parts: Parts) -> list[Finding]:
    name, rollout = "sampling explores", parts.config.rollout
    told = f"temperature {rollout.temperature:g}, {rollout.group_size} attempts per row"
    if rollout.temperature < NARROW:
        return [yellow(name, f"{told}: attempts at a row will be alike", "Set rollout.temperature=1")]
    if rollout.temperature > WIDE:
        return [yellow(name, f"{told}: most of what is sampled will be noise", "Set rollout.temperature=1")]
    return [green(name, told)]


def check_learning_rate(parts: Parts) -> list[Finding]:
    name, config = "learning rate", parts.config
    lr, pretrained = config.learner.lr, config.model.path is not None and config.lora is None
    high = HIGH_PRETRAINED_LR if pretrained else HIGH_LR
    if lr > high:
        what = "all weights of a pretrained model" if pretrained else "this model"
        return [
            yellow(name, f"learner.lr={lr:g} is far above what is usual for {what} ({high:g})", "Set learner.lr=1e-6")
        ]
    return [green(name, f"learner.lr={lr:g}")]


def row_problems(plan: Plan) -> list[str]:
    """Duplicate ids, and test rows that are training rows, are errors wherever rows are read."""
    found = []
    asked = [_question(row) for row in plan.train_rows]
    repeated = len(asked) - len(set(asked))
    if 2 * repeated > len(asked):
        found.append(f"{repeated} of {len(asked)} training rows repeat the prompt of another row")
    known = set(asked)
    common = sum(_question(row) in known for row in plan.test_rows if row.prompt)
    if common:
        found.append(f"{common} of {len(plan.test_rows)} test rows have the prompt of a training row")
    missing = sum(row.ground_truth is None for row in [*plan.train_rows, *plan.test_rows])
    if 0 < missing < len(plan.train_rows) + len(plan.test_rows):
        found.append(f"{missing} rows have no reward_model.ground_truth, while others do")
    return found


def _question(row: TaskRow) -> str:
    return json.dumps([row.prompt, row.env_kwargs], default=str, sort_keys=True)


QUICK: tuple[Callable[[Parts], list[Finding]], ...] = (
    check_prefix,
    check_tools_shown,
    check_stop_token,
    check_special_tokens,
    check_text_survives,
    check_tool_calls,
    check_call_format,
    check_longest_row,
    check_rows,
    check_sampling,
    check_learning_rate,
)
