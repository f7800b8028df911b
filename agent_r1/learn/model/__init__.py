"""The network that is trained: layers, attention, output head, adapters, memory."""
