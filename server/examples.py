"""What is sent to each route, and what comes back: the examples of the OpenAPI document, all of them tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

UNSAID = {"system_fingerprint": None, "service_tier": None, "kv_transfer_params": None}
MODEL = "smollm2"
HEADER: Json = {"created": 1767225600, "model": MODEL}
ASK: Json = {"model": MODEL, "messages": [{"role": "user", "content": "The capital of France?"}]}
HASH = "9b0e4d5a3f1c2b7e8d6a5c4b3f2e1d0c"


@dataclass(frozen=True, slots=True)
class Example:
    """One exchange. `request` is the body, None where there is none; `response` is JSON or text, None for no content.
    `events` is what is sent instead with stream=true."""

    request: Json | None = None
    response: Any = None
    events: str | None = None


def usage(prompt: int, completion: int, cached: int) -> Json:
    details = {"cached_tokens": cached}
    total = prompt + completion
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    return tokens | {"prompt_tokens_details": details}


def card(name: str, root: str, parent: str | None) -> Json:
    card = {"id": name, "object": "model", "created": 1767225600, "owned_by": "pagekv"}
    return card | {"root": root, "parent": parent, "max_model_len": 8192}


COMPLETION = Example(
    {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0},
    {
        "id": "cmpl-6f2a",
        "object": "text_completion",
        **HEADER,
        **UNSAID,
        "choices": [
            {
                "index": 0,
                "text": " Paris.",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
                "prompt_token_ids": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": usage(5, 4, 0),
    },
    'data: {"id":"cmpl-6f2a","object":"text_completion","created":1767225600,"model":"smollm2",'
    '"choices":[{"index":0,"text":" Paris","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
    "data: [DONE]\n\n",
)

CHAT = Example(
    ASK | {"max_completion_tokens": 16, "temperature": 0},
    {
        "id": "chatcmpl-6f2a",
        **HEADER,
        "object": "chat.completion",
        **UNSAID,
        "prompt_token_ids": None,
        "prompt_logprobs": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Paris.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "usage": usage(36, 3, 32),
    },
    'data: {"id":"chatcmpl-6f2a","created":1767225600,"model":"smollm2","object":"chat.completion.chunk",'
    '"choices":[{"index":0,"delta":{"content":"Paris"},"logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n",
)

RESPONSE = Example(
    {"model": MODEL, "instructions": "Answer in one word.", "input": "The capital of France?", "temperature": 0},
    {
        "id": "resp_6f2a",
        "object": "response",
        "created_at": 1767225600,
        "model": MODEL,
        "status": "completed",
        "completed_at": 1767225601,
        "error": None,
        "incomplete_details": None,
        "output": [
            {
                "id": "msg_6f2a",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}],
            }
        ],
        "usage": {
            "input_tokens": 41,
            "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 9},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 44,
        },
        "instructions": "Answer in one word.",
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 0.0,
        "top_p": 1.0,
        "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "background": False,
        "user": None,
        "safety_identifier": None,
        "prompt_cache_key": None,
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "top_logprobs": 0,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
    },
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,'
    '"item_id":"msg_6f2a","output_index":0,"content_index":0,"delta":"Paris","logprobs":[]}\n\n',
)

MESSAGE = Example(
    {
        "model": MODEL,
        "max_tokens": 16,
        "system": [{"type": "text", "text": "Answer in one word.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "The capital of France?"}],
    },
    {
        "id": "msg_6f2a",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Paris."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 17,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 24,
            "cache_creation": {"ephemeral_5m_input_tokens": 24, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 3,
            "service_tier": "standard",
        },
    },
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    '"delta":{"type":"text_delta","text":"Paris"}}\n\n',
)

EFFECT: Json = {"blocks": 3, "bytes": 4423680, "by_tier": {"device": 3}}

PLAN: Json = {
    "prompt_tokens": 20,
    "valid_prefix": 16,
    "computed": [[16, 20]],
    "reused": 16,
    "copied": 0,
    "loaded": 0,
    "pending": 0,
    "blocks": [
        {
            "index": 0,
            "start": 0,
            "end": 16,
            "hash": HASH,
            "status": "reused",
            "tier": "device",
            "reason": None,
            "first_difference": None,
        },
        {
            "index": 1,
            "start": 16,
            "end": 20,
            "hash": None,
            "status": "computed",
            "tier": None,
            "reason": "never_seen",
            "first_difference": None,
        },
    ],
}

EXAMPLES: dict[tuple[str, str], Example] = {
    ("post", "/v1/completions"): COMPLETION,
    ("post", "/v1/chat/completions"): CHAT,
    ("post", "/v1/responses"): RESPONSE,
    ("post", "/v1/messages"): MESSAGE,
    ("post", "/v1/messages/count_tokens"): Example(ASK, {"input_tokens": 36}),
    ("get", "/v1/models"): Example(response={"object": "list", "data": [card(MODEL, "/models/smollm2.gguf", None)]}),
    ("get", "/v1/models/{name}"): Example(response=card("poet", "/adapters/poet", MODEL)),
    ("post", "/tokenize"): Example(
        {"model": MODEL, "prompt": "The capital", "return_token_strs": True},
        {"count": 2, "max_model_len": 8192, "tokens": [504, 3575], "token_strs": ["The", "Ġcapital"]},
    ),
    ("post", "/detokenize"): Example({"model": MODEL, "tokens": [504, 3575]}, {"prompt": "The capital"}),
    ("post", "/v1/completions/render"): Example(
        {"model": MODEL, "prompt": "The capital"}, [{"model": MODEL, "token_ids": [504, 3575]}]
    ),
    ("post", "/v1/chat/completions/render"): Example(ASK, {"model": MODEL, "token_ids": [1, 4093, 198, 504, 3575]}),
    ("post", "/v1/cache/plan"): Example({"model": MODEL, "prompt": "The capital of France is"}, PLAN),
    ("post", "/v1/cache/drop"): Example({"model": MODEL, "prompt": "The capital of France is", "blocks": [0]}, EFFECT),
    ("post", "/v1/cache/invalidate"): Example({"cache_salt": "tenant-7"}, EFFECT),
    ("post", "/v1/load_lora_adapter"): Example(
        {"lora_name": "poet", "lora_path": "/adapters/poet"}, "Success: LoRA adapter 'poet' added successfully."
    ),
    ("post", "/v1/unload_lora_adapter"): Example(
        {"lora_name": "poet"}, "Success: LoRA adapter 'poet' removed successfully."
    ),
    ("get", "/health"): Example(response={"status": "ok"}),
    ("get", "/version"): Example(response={"version": "0.1.0"}),
    ("get", "/load"): Example(response={"server_load": 2}),
    ("post", "/reset_prefix_cache"): Example(),
    ("get", "/metrics"): Example(response='vllm:num_requests_running{model_name="smollm2"} 2.0\n'),
}

BAD_REQUEST: Json = {
    "error": {
        "message": "Missing field: 'prompt' is required.",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "missing_required_parameter",
    }
}
MESSAGES_BAD_REQUEST: Json = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "Missing field: 'max_tokens' is required."},
}
