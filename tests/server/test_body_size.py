"""How many values a body may hold: counted without parsing, exactly where it is JSON."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server import body_size
from server.body import parse_body, parse_object
from server.body_size import MAX_OBJECTS, MAX_STRINGS, MAX_VALUES, check_body_size
from server.errors import BadRequest
from server.protocol import CompletionBody
from server.tokenize_protocol import DetokenizeBody

LIMIT = 4 * 2**20  # bytes of a body


def repeated(item: str) -> bytes:
    """A body of about LIMIT bytes whose prompt is a list of one item over and over."""
    return b'{"prompt":[' + b",".join([item.encode()] * (LIMIT // (len(item) + 1) - 8)) + b"]}"


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (repeated("1"), "values"),
        (repeated("[]"), "objects and lists"),
        (repeated("{}"), "objects and lists"),
        (repeated('""'), "strings"),
        (repeated('{"":0}'), "strings"),
        (repeated("[[[[1]]]]"), "objects and lists"),
        (repeated('{"type":"text","text":"x"}'), "strings"),
        (b'{"prompt":{' + b",".join(b'"%d":0' % index for index in range(300_000)) + b"}}", "strings"),
        (b'{"prompt":' + b"[" * LIMIT, "objects and lists"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_many_values_are_refused_before_they_are_parsed(raw: bytes, kind: str) -> None:
    began = time.process_time()
    with pytest.raises(BadRequest, match=rf"The body has \d+ {kind}; at most \d+ are accepted") as refused:
        parse_body(raw, CompletionBody)
    assert refused.value.code == "request_too_large"
    assert time.process_time() - began < 0.2, "parsing these lists takes 0.4 s on a quiet machine"


@pytest.mark.parametrize(
    "text",
    ["[{,:" * 10**6, '","[{' * 600_000, "\\" * 10**6, '\\"[' * 400_000, '\\\\"' * 400_000, "a,b\n" * 10**6],
    ids=["brackets", "quotes", "backslashes", "escaped quotes", "both", "table"],
)
def test_a_long_text_is_one_value(text: str) -> None:
    assert parse_object(orjson.dumps({"prompt": text})) == {"prompt": text}


def test_as_many_values_as_fields_may_have() -> None:
    check_body_size(orjson.dumps({"tokens": list(range(2**20))}))
    check_body_size(orjson.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 4096}))


def count(value: Any) -> tuple[int, int, int]:
    """Objects and lists, strings, and commas by which values are separated."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    objects, strings, commas = (sum(each) for each in zip((0, 0, 0), *map(count, items), strict=True))
    return objects + 1, strings, commas + max(len(value) - 1, 0)


texts = st.text(st.sampled_from('a"\\[]{},:\n\u00e9'))
values = st.recursive(
    st.integers(0, 2**40) | texts | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=15,
)


@settings(deadline=None, max_examples=15)
@given(value=st.dictionaries(texts, values, min_size=1))
def test_the_counts_are_exact(value: dict[str, Any]) -> None:
    seen: dict[str, int] = {}

    def note(found: int, _: int, kind: str) -> None:
        seen[kind] = found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_size, "FEW", 0)
        patch.setattr(body_size, "refuse_more", note)
        check_body_size(orjson.dumps(value))
    objects, strings, commas = count(value)
    assert seen == {"objects and lists": objects, "strings": strings, "values": commas + 1}
    assert objects < MAX_OBJECTS and strings < MAX_STRINGS and commas < MAX_VALUES


@pytest.mark.parametrize(
    ("ids", "at", "message"),
    [
        ([*range(100_000), -1, -2], 100_000, "a token id is 0 or more"),
        ([*range(70_000), 1.5], 70_000, "a token id is an integer"),
        ([True], 0, "a token id is an integer"),
        ([1, "2", None], 1, "a token id is an integer"),
    ],
)
def test_the_first_bad_id_is_named(ids: list[Any], at: int, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        parse_body(orjson.dumps({"tokens": ids}), DetokenizeBody)
    assert refused.value.param == f"tokens[{at}]"


def test_a_million_ids_are_validated_at_the_speed_of_parsing() -> None:
    raw = orjson.dumps({"tokens": list(range(2**20))})
    began = time.process_time()
    assert len(parse_body(raw, DetokenizeBody).tokens) == 2**20
    assert time.process_time() - began < 0.6, "0.15 s on a quiet machine"
    with pytest.raises(BadRequest, match="at most 1048576 token ids") as refused:
        parse_body(orjson.dumps({"tokens": [1] * (2**20 + 1)}), DetokenizeBody)
    assert refused.value.param == "tokens"
