"""Thirty schemas of the kinds that applications send: forms, records, trees, unions, other alphabets."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(required: str = "*", **properties: Any) -> Schema:
    """An object whose members are all required (`*`), or those named, and which has no others."""
    names = list(properties) if required == "*" else required.split()
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def array(items: Schema, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def text(high: int = 24) -> Schema:
    return {"type": "string", "maxLength": high}


def whole(low: int = 0, high: int = 1000) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def pattern(regex: str) -> Schema:
    return {"type": "string", "pattern": regex}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


BOOL: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}

SCHEMAS: dict[str, Schema] = {
    "person": obj(name=text(), age=whole(0, 130), email=pattern(r"^[a-z]{1,8}@[a-z]{1,8}\.(com|org)$")),
    "address": obj(
        "street city",
        street=text(),
        number=whole(1, 999),
        city=text(16),
        postcode=pattern(r"^[A-Z]{2}[0-9]{4}$"),
        country=enum("DE", "FR", "JP", "US"),
    ),
    "sentiment": obj(label=enum("positive", "negative", "neutral"), confidence={"type": "number"}),
    "weather call": obj(
        name={"const": "get_weather"}, arguments=obj(location=text(), unit=enum("celsius", "fahrenheit"))
    ),
    "order": obj(
        id=pattern(r"^ORD-\d{6}$"),
        lines=array(obj(sku=pattern(r"^[A-Z]{3}\d{2}$"), quantity=whole(1, 99), price=whole(0, 9999)), 1, 3),
        paid=BOOL,
    ),
    "two shared definitions": {
        **obj(billing=ref("address"), shipping=ref("address"), buyer=ref("person")),
        "$defs": {"address": obj(street=text(), city=text()), "person": obj(name=text(), tax_id=pattern(r"^\d{9}$"))},
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": obj(value=whole(0, 9), children=array(ref("node"), 0, 1))},
    },
    "linked list": {
        **obj(head=ref("cell")),
        "$defs": {"cell": {"anyOf": [NULL, obj(item=enum("a", "b"), next=ref("cell"))]}},
    },
    "unicode keys": obj(**{"名前": text(12), "年齢": whole(0, 99), "größe": enum("klein", "groß"), "🦊": BOOL}),
    "unicode enum": obj(city=enum("Zürich", "Łódź", "北京", "Αθήνα", "😀"), greeting={"const": "¡Hola! 你好"}),
    "escaped keys": obj(**{'quo"ted': BOOL, "back\\slash": BOOL, "new\nline": BOOL, "slash/~tilde": whole(0, 9)}),
    "any of": obj(
        payment={
            "anyOf": [
                obj(kind={"const": "card"}, last4=pattern(r"^\d{4}$")),
                obj(kind={"const": "cash"}),
                obj(kind={"const": "iban"}, iban=pattern(r"^[A-Z]{2}\d{10}$")),
            ]
        }
    ),
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"id": whole()}, "required": ["id"]},
            {"type": "object", "properties": {"tag": enum("x", "y")}, "required": ["tag"]},
        ],
        "properties": {"id": {}, "tag": {}},
        "additionalProperties": False,
    },
    "nullable": obj(nickname={"type": ["string", "null"], "maxLength": 8}, parent={"anyOf": [whole(), NULL]}),
    "enum with null": obj(answer=enum("yes", "no", None), rank=enum(1, 2, None)),
    "default null": obj("id", id=whole(), note={"type": ["string", "null"], "default": None, "maxLength": 10}),
    "tuple": obj(
        point={
            "type": "array",
            "prefixItems": [whole(0, 99), whole(0, 99), enum("m", "km")],
            "items": False,
            "minItems": 3,
        }
    ),
    "matrix": obj(rows=array(array(whole(0, 9), 2, 2), 2, 2)),
    "dates": obj(
        day={"type": "string", "format": "date"},
        at={"type": "string", "format": "date-time"},
        id={"type": "string", "format": "uuid"},
    ),
    "network": obj(host={"type": "string", "format": "ipv4"}, port=whole(1, 65535)),
    "ranges": obj(
        level={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
        ratio={"type": "number", "minimum": 0, "maximum": 1},
        step={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    ),
    "map of numbers": {
        "type": "object",
        "additionalProperties": whole(0, 9),
        "minProperties": 1,
        "maxProperties": 2,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": BOOL},
        "properties": {"name": text(8)},
        "required": ["name"],
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "top level array": array(obj(term=text(10), page=whole(1, 500)), 1, 2),
    "top level enum": enum("north", "south", "east", "west"),
    "phone and colour": obj(
        phone=pattern(r"^\+[1-9]\d{6,10}$"), colour=pattern("^#[0-9a-f]{6}$"), code=pattern("^(?:[A-Z]\\d){3}$")
    ),
    "deep": obj(a=obj(b=obj(c=obj(d=obj(e=obj(f=obj(g=obj(h=whole(0, 5))))))))),
    "optional only": obj("", first=whole(0, 9), second=BOOL, third=enum("z")),
    "chain of thought": obj(
        steps=array(obj(explanation=text(40), output=text(20)), 1, 2), final_answer=text(20), certain=BOOL
    ),
    "ticket": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/ticket",
        "title": "Ticket",
        "description": "What a support desk keeps.",
        **obj(
            title={**text(20), "title": "Title", "examples": ["It broke"]},
            priority=enum("low", "medium", "high"),
            labels={**array(enum("bug", "feature", "question"), 0, 2)},
            assignee={"anyOf": [ref("user"), NULL]},
            history=array(obj(at=whole(), by=ref("user")), 0, 1),
        ),
        "$defs": {"user": obj(login=pattern("^[a-z][a-z0-9-]{0,9}$"), admin={**BOOL, "default": False})},
    },
}
