"""From the prompt fields of a body to token ids that the engine can take as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from scheduler.messages import EngineInfo
from server.echo import Echo, echo_of_ids
from server.errors import BadRequest, ContextTooLong
from server.protocol import MAX_PROMPTS, Message
from server.tokenizer import TextTooLong, Tokenizer, TokenizerError
from server.tools.body import Tool
from server.tools.calls import ToolFormat

TOKENIZER_THREADS = 2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text to repeat if that was asked for."""

    token_ids: tuple[int, ...]
    echo: Echo | None = None

    def keep_last(self, keep: int | None) -> Prompt:
        """Only the last `keep` tokens of it; None keeps all."""
        if keep is None or len(self.token_ids) <= keep:
            return self
        return Prompt(self.token_ids[-keep:], None if self.echo is None else self.echo.keep_last(keep))


class PromptEncoder:
    """Turns text into ids on a small pool of threads, so that a long prompt does not hold up the event loop."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo, tool_format: ToolFormat) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._tool_format = tool_format
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prompts(self, value: Any, *, echo: bool = False, keep: int | None = None) -> list[Prompt]:
        """Each prompt of a body's field, none empty, all ids within the vocabulary; of each its last `keep` tokens.

        Raises BadRequest.
        """
        return [await self._encode(prompt, param, echo, keep) for prompt, param in split_prompts(value)]

    async def one_prompt(self, value: Any) -> Prompt:
        """As `prompts`, where several make no sense."""
        named = split_prompts(value)
        if len(named) > 1:
            message = f"Invalid 'prompt': one prompt is wanted here, not {len(named)}."
            raise BadRequest(message, param="prompt", code="too_many_prompts")
        return await self._encode(*named[0], False, None)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        keep: int | None = None,
        bounded: bool = True,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] = (),
        **template: Any,
    ) -> Prompt:
        """The conversation as the model's chat template spells it, or the last `keep` tokens of that. If `bounded`, a
        text that cannot fit is not encoded. `continues` leaves the last message open; `variables` and `template` are
        the template's. One that knows no tools gets them, and their calls, written out.

        Raises BadRequest.
        """
        conversation = [message.for_template() for message in messages]
        if not self._tokenizer.takes_tools:
            conversation = self._tool_format.as_text(conversation, tools)
        elif tools:
            template["tools"] = [tool.for_template() for tool in tools]
        if continues:
            refuse_nothing_to_continue(conversation)
            template["continue_final_message"] = True
        template |= {"add_generation_prompt": add_generation_prompt, **(variables or {})}
        limit = self._info.max_model_len if bounded and not keep else None
        try:
            ids = await self._in_pool(lambda: self._tokenizer.apply_chat_template(conversation, limit, **template))
        except TextTooLong as error:
            raise ContextTooLong(error.least, None, self._info.max_model_len, param="messages", least=True) from error
        except TokenizerError as error:  # a template may refuse roles or their order, in words of its own
            raise BadRequest(str(error), param="messages", code="invalid_messages") from error
        if not ids:
            raise BadRequest("The messages give an empty prompt.", param="messages", code="empty_prompt")
        return Prompt(tuple(ids)).keep_last(keep)

    async def text(self, text: str, add_special_tokens: bool) -> list[int]:
        """Its token ids; none for an empty one. Raises BadRequest."""
        try:
            return await self._in_pool(lambda: self._tokenizer.encode(text, add_special_tokens))
        except TokenizerError as error:
            raise BadRequest(f"Invalid 'prompt': {error}", param="prompt", code="invalid_value") from error

    async def decode(self, token_ids: Sequence[int], param: str) -> str:
        """Their text, special tokens included. Raises BadRequest for an id outside the vocabulary."""
        check_ids(token_ids, self._info.vocab_size, param)
        return await self._in_pool(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    async def bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The token sequences that spell these words. Raises BadRequest."""
        if not words:
            return []
        try:
            return await self._in_pool(lambda: spell_bad_words(words, self._tokenizer))
        except TokenizerError as error:
            raise BadRequest(f"Invalid 'bad_words': {error}", param="bad_words", code="invalid_value") from error

    async def _encode(self, prompt: str | list[int], param: str, echo: bool, keep: int | None) -> Prompt:
        if not prompt:
            raise BadRequest(f"Invalid {param!r}: the prompt is empty.", param=param, code="empty_prompt")
        if isinstance(prompt, list):
            check_ids(prompt, self._info.vocab_size, param)
            kept = prompt[-keep:] if keep else prompt
            repeated = await self._in_pool(lambda: echo_of_ids(kept, self._tokenizer)) if echo else None
            return Prompt(tuple(kept), repeated)
        limit = None if keep else self._info.max_model_len
        try:
            ids, offsets = await self._in_pool(lambda: self._tokenizer.encode_with_offsets(prompt, max_tokens=limit))
        except TextTooLong as error:
            raise ContextTooLong(error.least, None, self._info.max_model_len, param=param, least=True) from error
        except TokenizerError as error:
            raise BadRequest(f"Invalid {param!r}: {error}", param=param, code="invalid_value") from error
        if not ids:
            raise BadRequest(f"Invalid {param!r}: the prompt has no tokens.", param=param, code="empty_prompt")
        made = Prompt(tuple(ids), Echo(prompt, tuple(ids), tuple(offsets)) if echo else None)
        return made.keep_last(keep)

    async def _in_pool(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def refuse_nothing_to_continue(conversation: Sequence[Mapping[str, Any]]) -> None:
    content = conversation[-1].get("content")
    if not (isinstance(content, str) and content.strip()):
        message = "Invalid 'continue_final_message': the last message has no text to continue."
        raise BadRequest(message, param="continue_final_message", code="invalid_value")


def spell_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token sequences that spell each word: as the beginning of a text, and after a space where that makes it as
    many tokens with another first one (vLLM's rule)."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (tuple(tokenizer.encode(lead + word.lstrip(), False)) for lead in ("", " "))
        if plain:
            sequences[plain] = None
        if spaced and len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences[spaced] = None
    return list(sequences)


def split_prompts(value: Any) -> list[tuple[str | list[int], str]]:
    """Prompts with the path of each: a string, a list of strings, a list of ids, or a list of lists of ids."""
    if isinstance(value, str):
        return [(value, "prompt")]
    if not isinstance(value, list):
        raise BadRequest(
            "Invalid 'prompt': a string, a list of strings, a list of token ids or a list of such lists is wanted.",
            param="prompt",
            code="invalid_value",
        )
    if not value:
        raise BadRequest("Invalid 'prompt': the prompt is empty.", param="prompt", code="empty_prompt")
    if not isinstance(value[0], (str, list)):
        return [(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        message = f"Invalid 'prompt': at most {MAX_PROMPTS} prompts are supported in one request, not {len(value)}."
        raise BadRequest(message, param="prompt", code="too_many_prompts")
    kind = type(value[0])
    for index, prompt in enumerate(value):
        if type(prompt) is not kind:
            param = f"prompt[{index}]"
            raise BadRequest(f"Invalid {param!r}: not of the kind of prompt[0].", param=param, code="invalid_value")
    return [(prompt, f"prompt[{index}]") for index, prompt in enumerate(value)]


def check_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    """Every id is an integer in [0, vocab_size); the first that is not is named with its index."""
    for index, token_id in enumerate(ids):
        if type(token_id) is not int:
            path = f"{param}[{index}]"
            raise BadRequest(f"Invalid {path!r}: a token id is an integer.", param=path, code="invalid_value")
        if not 0 <= token_id < vocab_size:
            path = f"{param}[{index}]"
            message = f"Invalid {path!r}: token id {token_id} is outside the vocabulary of {vocab_size} tokens."
            raise BadRequest(message, param=path, code="invalid_token_id")


def room_for_output(prompt_tokens: int, wanted: int | None, default: int | None, info: EngineInfo, param: str) -> int:
    """Tokens to generate at most: `wanted`, which must fit, or `default` (None: all) as far as the context has room.

    Raises ContextTooLong.
    """
    room = info.max_model_len - prompt_tokens
    if room < (wanted or 1):
        raise ContextTooLong(prompt_tokens, wanted or None, info.max_model_len, param=param)
    if wanted is not None:
        return wanted
    return room if default is None else min(default, room)
