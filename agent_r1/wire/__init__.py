"""OpenAI's chat completions on the wire: between bytes and neutral types. Knows no engine, model or HTTP library.

    body --parse--> ChatRequest --(a model answers)--> ChatAnswer --write--> JSON or server-sent events

`request_body.py` reads bytes, `chat_request.py` and `chat_messages.py` the request and its conversation, `reply.py` a
model's response. `chat_answer.py` writes answers, `api_error.py` refusals.
"""
