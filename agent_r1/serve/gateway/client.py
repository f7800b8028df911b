"""Connection data for an agent: addresses, keys, and the environment variables that clients read."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "policy"  # any name is accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Settings for the client of one episode. Both the addresses and the key name the session; either is enough."""

    base_url: str  # base URL of OpenAI's API
    anthropic_base_url: str
    api_key: str
    model: str = MODEL
    row_file: str = ""  # a file with the row as JSON, for a command

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the official clients of OpenAI and Anthropic and most frameworks read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # text that differs in every request
            "AGENT_R1_MODEL": self.model,
            **({"AGENT_R1_ROW": self.row_file} if self.row_file else {}),
        }
