"""From a body to what the engine would be handed: its prompts as ids, and how each goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.messages import CacheControl, GenerationRequest, Grammar, GrammarKind, PrefixPin, SamplingParams
from server.errors import BadRequest
from server.prompt import Chat, Prompt, room_for_output
from server.protocol import MAX_CHOICES, ChatBody, CompletionBody, GenerationBody
from server.sampling import sampling_params
from server.state import ServerState
from server.structured.body import grammar_of, schema_grammar
from server.tools.wish import CallWish

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions


@dataclass(frozen=True, slots=True)
class Prepared:
    """One prompt of a body. `echo_only`: nothing is to be generated, but for the token that an engine always makes."""

    prompt: Prompt
    params: SamplingParams
    echo_only: bool = False
    prefix_pins: tuple[PrefixPin, ...] = ()
    grammar: Grammar | None = None
    tools: CallWish | None = None  # calls are looked for in the text


async def prepare_completion(server: ServerState, body: CompletionBody) -> list[Prepared]:
    """Raises ApiError."""
    server.models.adapter(body.model)  # an unknown one is refused before its prompt is looked at
    prompts = await server.encoder.prompts(body.prompt, echo=body.echo, keep=kept_tokens(server, body))
    refuse_shared_report(body, prompts)
    refuse_crowd(body, len(prompts))
    grammar = await plain_grammar(server, body)
    bad_words = await server.encoder.bad_words(body.bad_words)
    prepared = []
    for prompt in prompts:
        room = room_for_output(
            len(prompt.token_ids),
            body.wanted_tokens,
            DEFAULT_MAX_TOKENS,
            server.info,
            "prompt",
            clamps=server.settings.clamps_max_tokens,
        )
        params = sampling_params(body, max(room, 1), server.info, bad_words)
        prepared.append(Prepared(prompt, params, echo_only=room == 0, grammar=grammar))
    return prepared


async def prepare_chat(server: ServerState, body: ChatBody) -> Prepared:
    """Raises ApiError."""
    server.models.adapter(body.model)
    wish = CallWish.of(body.tools, body.tool_choice, body.parallel_tool_calls) if body.may_call else None
    grammar = await plain_grammar(server, body) if wish is None else await call_grammar(server, body, wish)
    prompt = await chat_prompt(server, body)
    room = room_for_output(
        len(prompt.token_ids),
        body.wanted_tokens,
        None,
        server.info,
        "messages",
        clamps=server.settings.clamps_max_tokens,
    )
    params = sampling_params(body, room, server.info, await server.encoder.bad_words(body.bad_words))
    return Prepared(prompt, params, grammar=grammar, tools=wish)


async def plain_grammar(server: ServerState, body: GenerationBody) -> Grammar | None:
    """What the whole text must match. Raises BadRequest."""
    wanted = grammar_of(body.response_format, body.structured_outputs)
    return None if wanted is None else await server.grammars.prepare(*wanted)


async def call_grammar(server: ServerState, body: ChatBody, wish: CallWish) -> Grammar | None:
    """What a text with calls must match. A schema at fault is named, so each is compiled by itself first. Raises
    BadRequest."""
    answer = grammar_of(body.response_format, None)
    for index in wish.enforced:
        param, schema = f"tools[{index}].function.parameters", body.tools[index].function.arguments
        await server.grammars.prepare(*schema_grammar(schema, param))
        if schema["type"] != "object":
            message = f"Invalid {param!r}: the arguments of a function are an object, not of type {schema['type']!r}."
            raise BadRequest(message, param=param, code="invalid_value")
    if answer is not None:
        await server.grammars.prepare(*answer)
    text = wish.grammar(server.tool_format, None if answer is None else answer[0].text)
    return None if text is None else await server.grammars.prepare(Grammar(GrammarKind.GRAMMAR, text), "tools")


async def chat_prompt(server: ServerState, body: ChatBody) -> Prompt:
    """The prompt alone. Raises ApiError."""
    return await server.encoder.chat(chat_of(body), keep=kept_tokens(server, body))


def chat_of(body: ChatBody) -> Chat:
    """What of the body is the chat template's."""
    return Chat(
        body.messages,
        variables=body.template_variables,
        continues=body.continue_final_message,
        add_generation_prompt=body.generation_prompt,
        tools=body.tools,
    )


def kept_tokens(server: ServerState, body: GenerationBody) -> int | None:
    """How many of a prompt's last tokens are kept; None for all of them, however many there are."""
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    return max(server.info.max_model_len - max(body.wanted_tokens or 1, 1), 1)


def refuse_crowd(body: GenerationBody, prompts: int) -> None:
    if prompts * body.n > MAX_CHOICES:
        message = f"Invalid 'n': {prompts} prompts make {prompts * body.n} choices, and {MAX_CHOICES} are the most."
        raise BadRequest(message, param="n", code="invalid_value")


def refuse_shared_report(body: GenerationBody, prompts: Sequence[Prompt]) -> None:
    if body.cache_report and len(prompts) > 1:
        message = f"Invalid 'cache_report': it is of one prompt, and there are {len(prompts)}."
        raise BadRequest(message, param="cache_report", code="invalid_value")


def engine_request(
    server: ServerState,
    body: GenerationBody,
    prepared: Prepared,
    request_id: str,
    *,
    report: bool = False,
    choice: int = 0,
    after: str | None = None,
) -> GenerationRequest:
    """What the engine gets, to be handed over before anything else is awaited. Raises UnknownModel.

    `choice` is which of the prompt's choices this is; `after` is the request of the first one, which computes the
    prompt for all of them, and scores it. A prompt whose tokens are scored must be computed, so it opts out of reading.
    """
    cache = body.cache
    params = replace(prepared.params, choice=choice)
    if after is not None:
        params = replace(params, prompt_logprobs=None)
    scored = params.prompt_logprobs is not None
    return GenerationRequest(
        request_id,
        prepared.prompt.token_ids,
        params,
        body.priority,
        cache_salt=body.cache_salt,
        adapter=server.models.adapter(body.model),
        cache=CacheControl(
            read=cache.read and not scored,
            write=cache.write,
            ttl=cache.ttl,
            pin=cache.pin,
            prefix_pins=prepared.prefix_pins,
        ),
        report=report,
        after=after,
        grammar=prepared.grammar,
    )
