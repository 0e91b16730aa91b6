"""From the prompt fields of a body to token ids that the engine can take as they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.messages import EngineInfo
from server.echo import Echo, echo_of_ids, echo_of_text
from server.errors import ApiError, BadRequest, ContextTooLong, EngineFailure, Unavailable
from server.protocol import MAX_PROMPTS, Message
from server.text.chat_template import Rendered
from server.text.encoding import Encoded, EncodeJob
from server.text.limits import Limits
from server.text.process import JobRefused, ProcessFailed, Stopped, TextProcessError
from server.text.service import TEMPLATE_LIMITS, TemplateBroken, TextService, limits_for, reason
from server.token_ids import first_bad
from server.tokenizer import TextTooLong, Tokenizer, TokenizerError
from server.tools.body import Tool
from server.tools.calls import ToolFormat

MAX_BAD_WORD_CHARS = 2**14  # of all of them; each is encoded twice

log = logging.getLogger("pagekv")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text to repeat if that was asked for."""

    token_ids: tuple[int, ...]
    echo: Echo | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template spells. `continues` leaves the last message open; `variables` are the template's."""

    messages: Sequence[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    add_generation_prompt: bool = True
    tools: Sequence[Tool] = ()


class PromptEncoder:
    """Turns text into ids, and conversations into text, beside the event loop (server/text)."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo, tool_format: ToolFormat) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._tool_format = tool_format
        self._texts = TextService(tokenizer)

    async def warm_up(self) -> None:
        await self._texts.warm_up()

    def close(self) -> None:
        self._texts.close()

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

    async def chat(self, chat: Chat, *, keep: int | None = None) -> Prompt:
        """The conversation as the model's chat template spells it, or the last `keep` tokens of that. Raises
        BadRequest."""
        encoded = await self._bounded(replace(as_job(await self.render(chat)), keep=keep), "messages")
        if not encoded.ids:
            raise BadRequest("The messages give an empty prompt.", param="messages", code="empty_prompt")
        return Prompt(tuple(encoded.ids))

    async def count(self, chat: Chat) -> int:
        """How many tokens it has, whether or not they fit. Raises BadRequest."""
        return (await self._encoded(replace(as_job(await self.render(chat)), limit=0), "messages")).total

    async def chat_json(self, chat: Chat, *, with_names: bool) -> bytes:
        """As `tokens_json`. Raises BadRequest."""
        return await self._as_json(as_job(await self.render(chat)), "messages", with_names)

    async def tokens_json(self, text: str, *, add_special_tokens: bool, with_names: bool) -> bytes:
        """The members `count`, `tokens` and `token_strs` of an answer, for a text that may have more tokens than the
        model has room for. Raises BadRequest."""
        return await self._as_json(EncodeJob(text, add_special_tokens), "prompt", with_names)

    async def render(self, chat: Chat) -> Rendered:
        """Its text; a template that knows no tools gets them, and their calls, written out. Raises ApiError."""
        variables = {"add_generation_prompt": chat.add_generation_prompt, **chat.variables}
        if chat.continues:
            refuse_nothing_to_continue(chat.messages[-1])
            variables["continue_final_message"] = True
        if self._tokenizer.takes_tools and chat.tools:
            variables["tools"] = [tool.for_template() for tool in chat.tools]
        try:
            return await self._texts.render(lambda: self._conversation(chat), variables)
        except TemplateBroken as error:
            raise BadRequest(str(error), param="messages", code="invalid_messages") from error
        except TextProcessError as error:
            # a template may refuse roles or their order, in words of its own
            words = "The model's chat template cannot spell these messages"
            raise no_result(error, TEMPLATE_LIMITS, "messages", words) from error

    async def decode(self, token_ids: Sequence[int], param: str) -> str:
        """Their text, special tokens included. Raises BadRequest for an id outside the vocabulary."""
        check_ids(token_ids, self._info.vocab_size, param)
        return await self._texts.in_pool(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    async def bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The token sequences that spell these words. Raises BadRequest."""
        if not words:
            return []
        if sum(map(len, words)) > MAX_BAD_WORD_CHARS:
            message = f"Invalid 'bad_words': they have more than {MAX_BAD_WORD_CHARS} characters together."
            raise BadRequest(message, param="bad_words", code="invalid_value")
        try:
            return await self._texts.in_pool(lambda: spell_bad_words(words, self._tokenizer))
        except TokenizerError as error:
            raise BadRequest(f"Invalid 'bad_words': {error}", param="bad_words", code="invalid_value") from error

    def _conversation(self, chat: Chat) -> list[dict[str, Any]]:
        conversation = [message.for_template() for message in chat.messages]
        return conversation if self._tokenizer.takes_tools else self._tool_format.as_text(conversation, chat.tools)

    async def _encode(self, prompt: str | list[int], param: str, echo: bool, keep: int | None) -> Prompt:
        if not prompt:
            raise BadRequest(f"Invalid {param!r}: the prompt is empty.", param=param, code="empty_prompt")
        if isinstance(prompt, list):
            return await self._ids(prompt, param, echo, keep)
        encoded = await self._bounded(EncodeJob(prompt, keep=keep, with_offsets=echo), param)
        if not encoded.ids:
            raise BadRequest(f"Invalid {param!r}: the prompt has no tokens.", param=param, code="empty_prompt")
        return Prompt(tuple(encoded.ids), echo_of_text(prompt, encoded) if echo else None)

    async def _ids(self, ids: list[int], param: str, echo: bool, keep: int | None) -> Prompt:
        kept = ids[-keep:] if keep else ids
        self._refuse_more(len(kept), param)  # ahead of looking at each of them
        await asyncio.sleep(0)  # others may be answered between one prompt and the next
        check_ids(kept, self._info.vocab_size, param)
        if not echo:
            return Prompt(tuple(kept))
        return Prompt(tuple(kept), await self._texts.in_pool(lambda: echo_of_ids(kept, self._tokenizer)))

    async def _bounded(self, job: EncodeJob, param: str) -> Encoded:
        """Tokens that fit the model; a text that cannot fit is not encoded. Raises ApiError."""
        limit = self._info.max_model_len
        if job.keep is None:
            text = job.text if job.mark is None else job.text.replace(job.mark, "")
            try:
                self._tokenizer.refuse_long(text, limit)
            except TextTooLong as error:
                raise ContextTooLong(error.least, None, limit, param=param, least=True) from error
        encoded = await self._encoded(replace(job, limit=limit), param)
        self._refuse_more(encoded.total if job.keep is None else min(encoded.total, job.keep), param)
        return encoded

    def _refuse_more(self, count: int, param: str) -> None:
        if count > self._info.max_model_len:
            raise ContextTooLong(count, None, self._info.max_model_len, param=param)

    async def _encoded(self, job: EncodeJob, param: str) -> Encoded:
        with named_faults(param, job.text):
            return await self._texts.encode(job)

    async def _as_json(self, job: EncodeJob, param: str, with_names: bool) -> bytes:
        with named_faults(param, job.text):
            return await self._texts.tokens_json(job, with_names=with_names)


@contextlib.contextmanager
def named_faults(param: str, text: str) -> Iterator[None]:
    """Why a text could not be encoded, as an error that names `param`."""
    try:
        yield
    except TokenizerError as error:
        raise BadRequest(f"Invalid {param!r}: {error}", param=param, code="invalid_value") from error
    except TextProcessError as error:
        raise no_result(error, limits_for(text), param, f"Invalid {param!r}: the text cannot be tokenized") from error


def no_result(error: TextProcessError, limits: Limits, param: str, words: str) -> ApiError:
    """The answer to a client whose text a process gave no result for."""
    if isinstance(error, JobRefused):
        return BadRequest(str(error), param=param, code="invalid_messages" if param == "messages" else "invalid_value")
    if isinstance(error, Stopped):
        return Unavailable("The server is shutting down.")
    if isinstance(error, ProcessFailed):
        log.error("%s", error)
        return EngineFailure("The server failed to work on the text of this request.")
    return BadRequest(f"{words}: {reason(error, limits)}.", param=param, code="text_too_costly")


def as_job(rendered: Rendered) -> EncodeJob:
    """A chat template writes all special tokens there are."""
    return EncodeJob(rendered.text, add_special_tokens=False, mark=rendered.mark)


def refuse_nothing_to_continue(message: Message) -> None:
    content = message.for_template()["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    if not any(text.strip() for text in texts):
        told = "Invalid 'continue_final_message': the last message has no text to continue."
        raise BadRequest(told, param="continue_final_message", code="invalid_value")


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
    index = first_bad(ids, vocab_size)
    if index is None:
        return
    path = f"{param}[{index}]"
    if type(ids[index]) is not int:
        raise BadRequest(f"Invalid {path!r}: a token id is an integer.", param=path, code="invalid_value")
    message = f"Invalid {path!r}: token id {ids[index]} is outside the vocabulary of {vocab_size} tokens."
    raise BadRequest(message, param=path, code="invalid_token_id")


def room_for_output(
    prompt_tokens: int, wanted: int | None, default: int | None, info: EngineInfo, param: str, *, clamps: bool = False
) -> int:
    """Tokens to generate at most: `wanted`, which must fit, or `default` (None: all) as far as the context has room.
    With `clamps` also `wanted` is taken as far as there is room.

    Raises ContextTooLong.
    """
    room = info.max_model_len - prompt_tokens
    if clamps and wanted is not None and room > 0:
        wanted = min(wanted, room)
    if room < (wanted or 1):
        raise ContextTooLong(prompt_tokens, wanted or None, info.max_model_len, param=param)
    if wanted is not None:
        return wanted
    return room if default is None else min(default, room)
