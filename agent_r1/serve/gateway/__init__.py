"""The gateway: train agents that were written elsewhere. See docs/gateway.md."""

from agent_r1.serve.gateway.client import ClientSettings as ClientSettings
from agent_r1.serve.gateway.flow import agent_reward as agent_reward
