"""Chat templates of our own, each with the calls, results and demands of one model family, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from agent_r1.tokens.rendering import Renderer


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family writes a conversation. `c` is a call and `m` a message."""

    user: str = "<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    said: str = "<|im_start|>assistant\n{{ m.content }}<|im_end|>\n"
    before_calls: str = "<|im_start|>assistant\n{{ m.content or '' }}"
    call: str
    after_calls: str = "<|im_end|>\n"
    result: str = "<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
    next: str = "<|im_start|>assistant\n"
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    eos: str = "<|im_end|>"
    calls_if: str = "m.tool_calls"
    thinks: bool = False

    @property
    def template(self) -> str:
        return (
            "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
            f"{{% for m in messages %}}{{% if m.role == 'user' %}}{self.user}{{% elif {self.calls_if} %}}"
            f"{self.before_calls}{{% for c in m.tool_calls %}}{self.call}{{% endfor %}}{self.after_calls}"
            f"{{% elif m.role == 'assistant' %}}{self.said}{{% elif m.role == 'tool' %}}{self.result}{{% endif %}}"
            f"{{% endfor %}}{{% if add_generation_prompt %}}{self.next}{{% endif %}}"
        )


MISTRAL = {
    "user": "[INST] {{ m.content }}[/INST]",
    "said": "{% if loop.previtem.role == 'tool' and messages[loop.index0 - 2].tool_calls is not defined %}"
    "{{ raise_exception('roles must alternate') }}{% endif %} {{ m.content }}</s>",
    "result": "{% if m.tool_call_id | length != 9 %}{{ raise_exception('an id has 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
    "after_calls": "]</s>",
    "next": "",
    "special": ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    "eos": "</s>",
}
DEEPSEEK = {
    "user": "<｜User｜>{{ m.content }}",
    "said": "<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>",
    "after_calls": "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "result": "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
    "special": (
        *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
    ),
    "eos": "<｜end▁of▁sentence｜>",
}

FAMILIES: dict[str, Family] = {
    "hermes": Family(call="<tool_call>\n{{ c.function | tojson }}\n</tool_call>"),
    "qwen3_coder": Family(
        call="<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "glm45": Family(
        call="\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
        next="<|im_start|>assistant\n<think>",
        thinks=True,
    ),
    "llama3_json": Family(call='{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'),
    "pythonic": Family(
        before_calls="<|im_start|>assistant\n{{ m.content or '' }}[",
        call="{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}",
        after_calls="]<|im_end|>\n",
    ),
    "mistral": Family(
        **{  # type: ignore[arg-type]
            **MISTRAL,
            "before_calls": "[TOOL_CALLS] [",
            "call": '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{% if c.id | length != 9 %}'
            "{{ raise_exception('an id has 9 characters') }}{% endif %}{% if not loop.last %}, {% endif %}",
        }
    ),
    "mistral_v11": Family(
        **{  # type: ignore[arg-type]
            **MISTRAL,
            "before_calls": "{{ m.content or '' }}",
            "call": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
            "after_calls": "</s>",
        }
    ),
    "deepseek_v3": Family(
        **{  # type: ignore[arg-type]
            **DEEPSEEK,
            "call": "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + "
            "c.function.arguments + '\n```<｜tool▁call▁end｜>' }}",
            "calls_if": "m.role == 'assistant' and m.content is none",
            "before_calls": "<｜Assistant｜><｜tool▁calls▁begin｜>",
            "next": "<｜Assistant｜><think>\n",
            "thinks": True,
        }
    ),
    "deepseek_v31": Family(
        **{  # type: ignore[arg-type]
            **DEEPSEEK,
            "before_calls": "<｜Assistant｜>{% if m.content is not none %}{{ '' + m.content }}{% endif %}"
            "<｜tool▁calls▁begin｜>",
            "call": "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + "
            "'<｜tool▁call▁end｜>' }}",
            "next": "<｜Assistant｜></think>",
        }
    ),
    "kimi_k2": Family(
        before_calls="<|im_start|>assistant\n{{ m.content or '' }}<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
        "<|tool_call_end|>",
        after_calls="<|tool_calls_section_end|><|im_end|>",
        result="<|im_start|>tool\n## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
        special=(
            *("<|im_start|>", "<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
}


def renderer_with(template: str, special: tuple[str, ...] = Family.special, eos: str = "<|im_end|>") -> Renderer:
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return Renderer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template))


@cache
def family_renderer(name: str) -> Renderer:
    family = FAMILIES[name]
    return renderer_with(family.template, family.special, family.eos)
