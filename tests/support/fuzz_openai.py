"""What the engine is fuzzed with: sampling parameters, and requests of the OpenAI routes."""

from typing import Any

VOCAB = 1024
"""Of the tiny models."""

_number, _integer = {"type": "number"}, {"type": "integer"}
_tokens = {"type": "array", "items": {"type": "integer", "minimum": -1, "maximum": VOCAB}}
_words = {"type": "array", "items": {"type": "string"}, "maxItems": 4}
SAMPLING = {
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 12},
    "min_tokens": _integer,
    "temperature": {"type": "number", "minimum": -1, "maximum": 3},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1.1},
    "top_k": _integer,
    "min_p": {"type": "number", "minimum": -0.1, "maximum": 1.1},
    "presence_penalty": _number,
    "frequency_penalty": {"type": "number", "minimum": -3, "maximum": 3},
    "repetition_penalty": _number,
    "seed": _integer,
    "stop": {"anyOf": [{"type": "string"}, _words]},
    "stop_token_ids": _tokens,
    "include_stop_str_in_output": {"type": "boolean"},
    "ignore_eos": {"type": "boolean"},
    "logit_bias": {"type": "object", "additionalProperties": _number, "maxProperties": 3},
    "allowed_token_ids": _tokens,
    "bad_words": _words,
    "logprobs": {"type": "integer", "minimum": -1, "maximum": 25},
    "prompt_logprobs": {"type": "integer", "minimum": -1, "maximum": 25},
    "thinking_token_budget": _integer,
    "repetition_detection": {
        "type": "object",
        "additionalProperties": False,
        "properties": dict.fromkeys(
            ("max_pattern_size", "min_pattern_size", "min_count"), _integer
        ),
    },
    "structured_outputs": {
        "type": "object",
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
        "properties": {
            "regex": {"enum": ["[a-c]+", "(", ""]},
            "choice": _words,
            "json": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "type": {"enum": ["string", "integer", "object", "nothing"]},
                    "default": _integer,
                },
            },
        },
    },
}

HEADERS = [
    {"name": "X-Rollout-On-Pause", "in": "header", "schema": {"enum": ["wait", "return"]}},
    {
        "name": "X-Rollout-Timeout-S",
        "in": "header",
        "schema": {"type": "number", "minimum": 1, "maximum": 100},
    },
]
CLOSE = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0.01, "maximum": 1},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "seed": {"type": "integer", "minimum": 0, "maximum": 1 << 62},
    "stop": _words,
    "stream": {"type": "boolean"},
    "ignore_eos": {"type": "boolean"},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "logit_bias": {"type": "object", "additionalProperties": False, "properties": {"5": _number}},
}
_text = {"type": "string", "maxLength": 40}
_prompt_tokens = {
    "type": "array", "minItems": 1, "maxItems": 20,
    "items": {"type": "integer", "minimum": 0, "maximum": VOCAB - 1},
}  # fmt: skip
_message = {
    "type": "object", "required": ["role", "content"], "additionalProperties": False,
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _text},
}  # fmt: skip


def openai_document(*, close: bool) -> dict[str, Any]:
    """By vLLM's request models; or ``close`` to what an agent sends, so that it is generated."""
    schemas: dict[str, Any] = {}

    def route(*models: dict[str, Any]) -> dict[str, Any]:
        for model in models:
            schemas.update(model.pop("$defs", {}))
        content = {"application/json": {"schema": {"anyOf": list(models)}}}
        answers = {"200": {"description": "ok"}, "4XX": {"description": "refused"}}
        body = {"required": True, "content": content}
        headers = [] if close else HEADERS
        return {"post": {"parameters": headers, "requestBody": body, "responses": answers}}

    def of(model: Any) -> dict[str, Any]:
        return dict(model.model_json_schema(ref_template="#/components/schemas/{model}"))

    def request(name: str, schema: Any, **more: Any) -> dict[str, Any]:
        return {
            "type": "object", "required": [name], "additionalProperties": False,
            "properties": CLOSE | {name: schema} | more,
        }  # fmt: skip

    if close:
        top = {"type": "integer", "minimum": 0, "maximum": 5}
        messages = {"type": "array", "minItems": 1, "maxItems": 3, "items": _message}
        prompt = {"anyOf": [_text | {"minLength": 1}, _prompt_tokens]}
        paths = {
            "/v1/completions": route(
                request("prompt", prompt, logprobs=top, echo={"type": "boolean"})
            ),
            "/v1/chat/completions": route(
                request("messages", messages, logprobs={"const": True}, top_logprobs=top)
            ),
        }
    else:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.serve.tokenize.protocol import (
            DetokenizeRequest,
            TokenizeChatRequest,
            TokenizeCompletionRequest,
        )

        paths = {
            "/v1/completions": route(of(CompletionRequest)),
            "/v1/chat/completions": route(of(ChatCompletionRequest)),
            "/tokenize": route(of(TokenizeCompletionRequest), of(TokenizeChatRequest)),
            "/detokenize": route(of(DetokenizeRequest)),
        }
    info = {"title": "openai", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
