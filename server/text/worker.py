"""A process that renders chat templates or encodes long texts, one job at a time, for the server that started it.

    python -m server.text.worker        jobs come on standard input, results go to standard output (frames.py)

The first frame says what the process is for, and is answered like a job. A job that runs over its time or memory ends
the process, which is how its memory is given back and its threads are freed; the server then starts another one.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

import orjson

from server.text.encoding import NOT_UNICODE, Encoded, EncodeJob, EncoderSource, TextEncoder
from server.text.frames import Frame, read_frame, write_frame
from server.text.limits import OUT_OF_MEMORY, Limits, begin_job, end_job, limit_memory, memory_of

if TYPE_CHECKING:  # jinja2 is for those that render
    from server.text.chat_template import ChatTemplate

Handler = Callable[[bytes], bytes]


class JobFault(Exception):
    """The message is the job's answer."""


def main() -> None:
    jobs, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not write into the results
    opening = read_frame(jobs)
    if opening is None:
        return
    setup: dict[str, Any] = orjson.loads(opening.payload)
    limits = Limits(**setup["limits"])
    make = (
        prepare_templates(setup["template"], limits) if "template" in setup else prepare_texts(setup["encoder"], limits)
    )
    made: list[Handler] = []

    def start(_: bytes) -> bytes:
        made.append(make())
        return b""

    if not answer(start, b"", limits, results):
        return
    resident = memory_of("VmRSS") or 0
    while (frame := read_frame(jobs)) is not None:
        if not answer(made[0], frame.payload, limits, results, resident):
            return


def answer(handle: Handler, job: bytes, limits: Limits, results: IO[bytes], resident: int | None = None) -> bool:
    """Whether the process may take another job. `resident` is how many bytes it had before the first."""
    begin_job(limits)
    try:
        payload, fault = handle(job), False
    except JobFault as error:
        payload, fault = str(error).encode("utf-8", "replace"), True
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, MemoryError) or "memory" in str(error):
            os._exit(OUT_OF_MEMORY)
        raise
    end_job()
    grown = 0 if resident is None else (memory_of("VmRSS") or 0) - resident
    last = grown > limits.kept or (resident is None and fault)
    write_frame(results, Frame(payload, fault, last))
    return not last


def prepare_templates(described: dict[str, Any], limits: Limits) -> Callable[[], Handler]:
    """Compiling a template runs parts of it, so that is done within the limits, too."""
    from server.text.chat_template import ChatTemplate, TemplateFault, TemplateSource

    limit_memory(limits)

    def make() -> Handler:
        try:
            return template_handler(ChatTemplate(TemplateSource(**described)))
        except TemplateFault as error:
            raise JobFault(str(error)) from None

    return make


def template_handler(template: ChatTemplate) -> Handler:
    from server.text.chat_template import Forms, TemplateFault

    def handle(job: bytes) -> bytes:
        asked = orjson.loads(job)
        if "messages" not in asked:
            return orjson.dumps(template.find_forms())
        try:
            return orjson.dumps(template.render(asked["messages"], asked["variables"], Forms(**asked["forms"])))
        except TemplateFault as error:
            raise JobFault(str(error)) from None
        except (TypeError, UnicodeError):
            raise JobFault(NOT_UNICODE) from None

    return handle


def prepare_texts(described: dict[str, Any], limits: Limits) -> Callable[[], Handler]:
    texts = {int(id): text for id, text in described.pop("special_texts").items()}

    def make() -> Handler:
        encoder = TextEncoder.load(EncoderSource(**described, special_texts=texts))
        limit_memory(limits)
        return text_handler(encoder)

    return make


def text_handler(encoder: TextEncoder) -> Handler:
    def handle(job: bytes) -> bytes:
        asked = orjson.loads(job)
        as_json = asked.pop("as_json", None)
        try:
            encoded = encoder.encode(EncodeJob(**asked))
        except (TypeError, UnicodeError):
            raise JobFault(NOT_UNICODE) from None
        if as_json is None:
            return pack(encoded)
        return tokens_json(encoder, encoded.ids, with_names=as_json["with_names"])

    return handle


def tokens_json(encoder: TextEncoder, ids: list[int], *, with_names: bool) -> bytes:
    """The members of /tokenize's answer that may be large, as JSON without the braces around."""
    names = encoder.names(ids) if with_names else None
    return orjson.dumps({"count": len(ids), "tokens": ids, "token_strs": names})[1:-1]


def pack(encoded: Encoded) -> bytes:
    """The total and how many ids there are, of 8 bytes each; then ids and offsets, of 4."""
    return (
        encoded.total.to_bytes(8, "little")
        + len(encoded.ids).to_bytes(8, "little")
        + array("I", encoded.ids).tobytes()
        + array("I", encoded.offsets).tobytes()
    )


def unpack(payload: bytes) -> Encoded:
    total, kept = (int.from_bytes(payload[start : start + 8], "little") for start in (0, 8))
    numbers = array("I", payload[16:])
    return Encoded(total, numbers[:kept].tolist(), numbers[kept:].tolist())


if __name__ == "__main__":
    main()
