"""Texts held to a grammar, by a real engine on a tiny random network: what it says by itself matches nothing."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler import guided, masks
from scheduler.commands import CommandRefused, EngineBusy, PrepareGrammar, SetVocabulary
from scheduler.compiled import CompiledGrammars
from scheduler.engine import Engine
from scheduler.guided import GrammarFault, Guides
from scheduler.machine import allocated_memory
from scheduler.messages import FinishReason, GenerationRequest, Grammar, GrammarKind, RequestOutput, SamplingParams
from scheduler.vocabulary import Vocabulary
from tests.recovery.harness import make_engine
from tests.server.real import save_chat_model
from tests.server.tiny_tokenizers import byte_level, sentencepiece, vocabulary

PROMPT = tuple(range(40, 60))
CODE = Grammar(GrammarKind.REGEX, r"[a-c]{3}-[0-9]{2,4}")
WORD = Grammar(GrammarKind.CHOICE, json.dumps(["été", 'say "no"', "中文"]))
PERSON = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"年": {"enum": [1, null]}}, "required": ["年"], "additionalProperties": false}',
)
SUM = Grammar(GrammarKind.GRAMMAR, 'start: term ("+" term)~2\nterm: /[0-9]/ | "(" term ")"')
GBNF = Grammar(GrammarKind.GRAMMAR, 'root ::= "x" digit digit\ndigit ::= [0-9]')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guided")
    save_chat_model(path)
    return path


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    yield from started(make_engine(model))


@pytest.fixture
def small(model: Path) -> Iterator[Engine]:
    """Two of the tests' requests do not fit at once for long."""
    yield from started(make_engine(model, num_blocks=8, max_model_len=120))


def started(engine: Engine) -> Iterator[Engine]:
    engine.command(SetVocabulary(vocabulary(byte_level())))
    yield engine
    engine.guides.close()


def request(
    name: str, grammar: Grammar | None, max_tokens: int = 60, seed: int = 0, **params: object
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, **params)  # type: ignore[arg-type]
    return GenerationRequest(name, PROMPT, sampling, grammar=grammar)


def run(engine: Engine, *requests: GenerationRequest) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {each.request_id: [] for each in requests}
    for each in requests:
        assert engine.add(each) is None
    for _ in range(1000):
        if not engine.has_work:
            engine.scheduler.check_integrity()
            return outputs
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    raise AssertionError("the engine does not come to an end")


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text(outputs: list[RequestOutput]) -> str:
    return str(byte_level().decode(tokens(outputs), skip_special_tokens=True))


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (CODE, lambda text: re.fullmatch(CODE.text, text)),
        (WORD, lambda text: text in json.loads(WORD.text)),
        (PERSON, lambda text: json.loads(text) in ({"年": 1}, {"年": None})),
        (SUM, lambda text: re.fullmatch(r"\(*\d\)*\+\(*\d\)*\+\(*\d\)*", text) and isinstance(eval(text), int)),
        (GBNF, lambda text: re.fullmatch(r"x\d\d", text)),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_each_kind_of_grammar_holds_and_ends_by_itself(engine: Engine, grammar: Grammar, matches: object) -> None:
    engine.command(PrepareGrammar(grammar))
    names = [f"request {seed}" for seed in range(6)]
    outputs = run(engine, *(request(name, grammar, 400, seed) for seed, name in enumerate(names)))
    for name in names:
        assert matches(text(outputs[name])), text(outputs[name])  # type: ignore[operator]
        assert outputs[name][-1].finish_reason is FinishReason.STOP
    assert len({text(outputs[name]) for name in names}) > 1


def test_a_guided_request_changes_nothing_for_its_company(engine: Engine) -> None:
    alone = run(engine, request("alone", None, 20, seed=5))["alone"]
    guided_alone = run(engine, request("guided", CODE, seed=3))["guided"]
    together = run(engine, request("free", None, 20, seed=5), request("a", CODE, seed=3), request("b", WORD, seed=3))
    assert tokens(together["free"]) == tokens(alone)
    assert tokens(together["a"]) == tokens(guided_alone)


def test_a_preempted_request_goes_on_where_it_was(engine: Engine, small: Engine) -> None:
    long = Grammar(GrammarKind.REGEX, "([a-z][0-9]){24}")
    wanted = {f"request {seed}": text(run(engine, request("r", long, 60, seed))["r"]) for seed in (1, 2, 3)}
    outputs = run(small, *(request(f"request {seed}", long, 60, seed) for seed in (1, 2, 3)))
    assert small.stats().preemptions > 0
    assert {name: text(each) for name, each in outputs.items()} == wanted
    assert all(re.fullmatch(long.text, each) for each in wanted.values())


def test_a_text_that_is_complete_is_followed_by_end_of_sequence_alone(engine: Engine) -> None:
    end = engine.info.eos_token_ids[0]
    for params, finish in (
        ({"min_tokens": 12}, FinishReason.STOP),
        ({"ignore_eos": True, "max_tokens": 12}, FinishReason.LENGTH),
    ):
        outputs = run(engine, request("r", WORD, **params))["r"]  # type: ignore[arg-type]
        assert text(outputs) in json.loads(WORD.text)
        assert len(tokens(outputs)) == 12 and tokens(outputs)[-1] == end
        assert outputs[-1].finish_reason is finish


def test_the_minimum_is_used_for_text_while_there_is_a_choice(engine: Engine) -> None:
    digits = Grammar(GrammarKind.REGEX, "[0-9]{1,20}")
    for seed in range(5):
        outputs = run(engine, request("r", digits, seed=seed, min_tokens=10))["r"]
        assert len(text(outputs)) >= 10


def test_a_request_that_is_aborted_leaves_nothing_behind(engine: Engine) -> None:
    assert engine.add(request("r", CODE)) is None
    engine.step()
    guide = weakref.ref(engine.scheduler.running[0].guide)  # type: ignore[arg-type]
    assert guide() is not None
    engine.abort("r")
    gc.collect()
    assert guide() is None


def test_a_mask_that_gets_no_processor_fails_its_own_request_as_busy(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    hold(engine, monkeypatch, WORD, lambda: free.wait(30))
    collect = masks.PendingMasks.collect
    monkeypatch.setattr(masks.PendingMasks, "collect", lambda pending: collect(pending, 0.2))
    try:
        outputs = run(engine, request("slow", WORD), request("quick", CODE), request("free", None, 5))
    finally:
        free.set()
    (failure,) = outputs["slow"]
    assert failure.finish_reason is FinishReason.ERROR and "0.2 s" in str(failure.error)
    assert failure.busy and not failure.unmeetable
    assert re.fullmatch(CODE.text, text(outputs["quick"])) and len(tokens(outputs["free"])) == 5
    assert engine.stats().failed_steps == 0


def test_a_mask_that_takes_too_much_work_is_its_own_requests_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "MAX_WORK", 0.05)
    hold(engine, monkeypatch, WORD, lambda: spin(0.5))
    outputs = run(engine, request("slow", WORD), request("quick", CODE), request("free", None, 5))
    (failure,) = outputs["slow"]
    assert failure.unmeetable and not failure.busy and "processor time" in str(failure.error)
    assert re.fullmatch(CODE.text, text(outputs["quick"])) and len(tokens(outputs["free"])) == 5


def test_a_mask_that_only_waits_is_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where others have the processor: the time on the wall is no measure of work."""
    monkeypatch.setattr(masks, "MAX_WORK", 0.05)
    hold(engine, monkeypatch, WORD, lambda: time.sleep(0.3))
    assert text(run(engine, request("slow", WORD))["slow"]) in json.loads(WORD.text)


def hold(engine: Engine, monkeypatch: pytest.MonkeyPatch, grammar: Grammar, before: Callable[[], object]) -> None:
    """Have `before` run ahead of every mask of this grammar."""
    advance = engine.guides._advance
    compiled = engine.guides.prepare(grammar)

    def held(guide: guided.Guide, unseen: list[int]) -> masks.TokenMask:
        if guide._compiled is compiled:
            before()
        return advance(guide, unseen)

    monkeypatch.setattr(engine.guides, "_advance", held)


def spin(seconds: float) -> None:
    """Work for so long, whatever else runs; like llguidance, without the interpreter's lock."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 10_000)


def test_masks_nobody_came_to_are_computed_by_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    for _ in range(guided.MASK_THREADS):
        engine.guides._workers.submit(free.wait, 30)
    collect = masks.PendingMasks.collect
    monkeypatch.setattr(masks.PendingMasks, "collect", lambda pending: collect(pending, 0.01))
    try:
        assert re.fullmatch(CODE.text, text(run(engine, request("r", CODE))["r"]))
    finally:
        free.set()


def test_a_grammar_is_compiled_once_for_all_who_name_it(engine: Engine) -> None:
    assert engine.guides.prepare(CODE) is engine.guides.prepare(Grammar(CODE.kind, CODE.text))


def test_a_grammar_that_was_forgotten_is_compiled_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.guides, "_compiled", CompiledGrammars(1, 10**9))
    oldest = engine.guides.prepare(CODE)
    engine.guides.prepare(PERSON).result()
    assert engine.guides.prepare(CODE) is not oldest
    assert re.fullmatch(CODE.text, text(run(engine, request("r", CODE))["r"]))


def test_what_is_kept_is_measured(engine: Engine) -> None:
    kept = engine.guides._compiled
    sizes = []
    for grammar in (CODE, Grammar(GrammarKind.CHOICE, json.dumps([f"word {index}" for index in range(1000)]))):
        before = kept._bytes
        engine.command(PrepareGrammar(grammar))
        sizes.append(kept._bytes - before)
        kept.check_integrity()
    assert sizes[0] < 200_000 and 500_000 < sizes[1] < 5_000_000


def test_grammars_that_come_by_the_hundred_keep_no_more_memory_than_is_allowed(engine: Engine) -> None:
    engine.guides._compiled = kept = CompiledGrammars(50, 2**20)
    for index in range(60):
        engine.command(PrepareGrammar(Grammar(GrammarKind.REGEX, rf"y{index}(\w+ ){{1,300}}z")))
        kept.check_integrity()
    before = allocated_memory()
    for index in range(60):
        engine.command(PrepareGrammar(Grammar(GrammarKind.REGEX, rf"z{index}(\w+ ){{1,300}}z")))
    assert allocated_memory() - before < 2**20


def test_a_grammar_behind_too_much_work_is_refused_and_may_come_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guided, "MAX_WORK_AHEAD", 0.05)
    engine.guides._compilers.submit(time.sleep, 0.2)  # all of them are handed in meanwhile
    first, second, third = (Grammar(GrammarKind.CHOICE, f'["{index}"]') for index in range(3))
    compiled, late = engine.guides.prepare(first), engine.guides.prepare(second)
    answer = engine.guides.command(PrepareGrammar(third))
    compile = engine.guides._compile
    monkeypatch.setattr(engine.guides, "_compile", lambda grammar: (spin(0.1), compile(grammar))[1])
    compiled.result()
    for refused in (late, answer):
        with pytest.raises(EngineBusy):
            refused.result()
    engine.command(PrepareGrammar(second))


SCHEMA, REGEX, GRAMMAR = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.GRAMMAR


@pytest.mark.parametrize(
    ("kind", "bad", "told"),
    [
        (SCHEMA, '{"type": "strin"}', "strin"),
        (SCHEMA, '{"type":', "EOF|expected"),
        (SCHEMA, '{"uniqueItems": true, "type": "array"}', "uniqueItems"),
        (SCHEMA, '{"type": "array", "contains": {}}', "contains"),
        (SCHEMA, '{"not": {"type": "string"}}', "not"),
        (SCHEMA, '{"type": "string", "x-guidance": {"lenient": true}, "format": "nosuch"}', "nosuch"),
        (SCHEMA, '{"$ref": "https://example.com/schema.json"}', "example.com"),
        (SCHEMA, '{"$ref": "#/$defs/gone"}', "gone"),
        (SCHEMA, '{"$ref": "#"}', "no text"),
        (SCHEMA, '{"enum": []}', "nsatisfiable"),
        (SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        (SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        (SCHEMA, '{"items":' * 300 + "{}" + "}" * 300, "recursion"),
        (REGEX, "(", "unclosed"),
        (REGEX, "[^\\s\\S]", "no text"),
        (REGEX, "((a{1000}){1000}){1000}", "too many"),
        (GRAMMAR, "start: nobody", "nobody"),
        (GRAMMAR, "not a grammar", "::="),
        (GRAMMAR, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "deep"),
        (GRAMMAR, 'start: "a"{1000000}', "items"),
        (GRAMMAR, "", "root"),
    ],
)
def test_a_bad_grammar_is_refused_soon_and_told_why(engine: Engine, kind: GrammarKind, bad: str, told: str) -> None:
    started = time.perf_counter()
    with pytest.raises(CommandRefused, match=told) as refusal:
        engine.command(PrepareGrammar(Grammar(kind, bad)))
    assert time.perf_counter() - started < 5
    assert len(str(refusal.value)) < 500 and "\n" not in str(refusal.value)


def test_without_a_vocabulary_there_are_no_guided_requests(model: Path) -> None:
    engine = make_engine(model)
    with pytest.raises(CommandRefused, match="vocabulary"):
        engine.command(PrepareGrammar(CODE))
    assert run(engine, request("r", CODE))["r"][-1].finish_reason is FinishReason.ERROR
    engine.command(SetVocabulary(vocabulary(byte_level())))
    engine.command(PrepareGrammar(CODE))
    engine.guides.close()


def test_a_vocabulary_nobody_can_read_is_refused(engine: Engine) -> None:
    with pytest.raises(CommandRefused, match="tokenizer"):
        engine.command(SetVocabulary(Vocabulary((b"a",), frozenset(), '{"model": "no such thing"}')))


def test_a_model_without_end_of_sequence_is_not_held_to_a_grammar() -> None:
    guides = Guides(400, ())
    with pytest.raises(GrammarFault, match="end-of-sequence"):
        guides.set_vocabulary(vocabulary(byte_level())).result()
    guides.close()


def test_a_vocabulary_with_byte_fallback_spells_what_it_has_no_token_for() -> None:
    tokenizer = sentencepiece()
    guides = Guides(len(tokenizer) + 5, (tokenizer.eos_token_id,))
    guides.set_vocabulary(vocabulary(tokenizer)).result()
    guide = guides.open(WORD)
    spelt: list[int] = []
    wanted = "中文".encode()
    for byte in wanted:
        mask = guides.start([("r", guide, spelt[-1:])]).collect().masks["r"]
        token = tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>")
        assert mask[token // 32] >> token % 32 & 1
        spelt.append(token)
    mask = guides.start([("r", guide, spelt[-1:])]).collect().masks["r"]
    end = tokenizer.eos_token_id
    assert mask[end // 32] == 1 << end % 32 and not mask[1:].any()
    guides.close()
