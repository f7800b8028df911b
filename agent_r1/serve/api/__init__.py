"""`agent-r1 serve`: a model, or a trained agent with its tools, behind OpenAI's chat-completions API."""
