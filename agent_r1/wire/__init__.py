"""OpenAI's chat completions on the wire: between bytes and neutral types. Knows no engine, model or HTTP library.

    body --parse--> ChatRequest --(a model answers)--> ChatAnswer --write--> JSON or server-sent events

`api_error.py` is how everything is refused, `request_body.py` reads bytes, `chat_request.py` what is asked,
`chat_messages.py` its conversation, `reply.py` reads a model's response, `chat_answer.py` what is answered.
"""
