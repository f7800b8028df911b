"""The gateway: train agents that were written elsewhere. See docs/gateway.md."""
