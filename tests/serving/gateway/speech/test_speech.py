"""What answers say, and the law: however the text is cut on its way, it says the same."""

import dataclasses
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.dialect import ToolDialect
from serving.gateway.speech.pieces import Content, Reasoning, ToolArguments, ToolStart
from serving.gateway.speech.speech import SpeechPlan
from serving.request import FinishReason

HERMES, LLAMA3, MISTRAL, GEMMA = ToolDialect.HERMES, ToolDialect.LLAMA3, ToolDialect.MISTRAL, ToolDialect.GEMMA
NAMES = frozenset({"f", "g"})


def hear(plan, texts, *, in_thought=False, reason=FinishReason.STOP):
    """(content, reasoning, [(name, arguments)], finish_reason) of an answer that comes in these texts."""
    speech = plan.new_speech(in_thought=in_thought)
    pieces = [piece for text in texts for piece in speech.push(text)] + list(speech.finish())
    content, reasoning, calls = "", "", []
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolStart(index, call_id, name):
                assert index == len(calls) and call_id
                calls.append([name, ""])
            case ToolArguments(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
    return content, reasoning, [tuple(call) for call in calls], speech.finish_reason(reason)


def says(dialect, text, **fields):
    content, _, calls, reason = hear(SpeechPlan(dialect, NAMES, **fields), [text])
    return content, calls, reason


ONE = [("f", '{"a": 1}')]
TWO = [("f", '{"a": 1}'), ("g", "{}")]


@pytest.mark.parametrize(
    ("dialect", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", ONE),
        (HERMES, 'Wait.\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n', "Wait.", ONE),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ONE),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}</tool_call>', "", TWO),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call><tool_call>{"name":"g"}', "", TWO),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', "", [("f", '{"a": "</tool_call>"}')]),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", ONE),
        (LLAMA3, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', "", ONE),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", TWO),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", TWO),
        (MISTRAL, 'Well [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "Well", ONE),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', "", TWO),
        (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "", ONE),
        (GEMMA, "<start_function_call>call:f{a:1}<end_function_call>", "", [("f", '{"a":1}')]),
        (GEMMA, 'ok <|tool_call>call:g{}<tool_call|><|tool_call>call:f{a:<|"|>x, {y}<|"|>}<tool_call|>', "ok",
         [("g", "{}"), ("f", '{"a":"x, {y}"}')]),
        (GEMMA, "<start_function_call>call:f{l:[1,<escape>q<escape>,],o:{t:true,w:word}}<end_function_call>", "",
         [("f", '{"l":[1,"q"],"o":{"t":true,"w":"word"}}')]),
    ],
)  # fmt: skip
def test_calls_are_told_apart_from_content(dialect, text, content, calls):
    assert says(dialect, text) == (content, calls, "tool_calls")


@pytest.mark.parametrize("dialect", [HERMES, LLAMA3, MISTRAL, GEMMA])
@pytest.mark.parametrize(
    "text",
    [
        "  plain  text \n",
        '{"answer": 3}',
        '{"name": "stranger", "parameters": {}}',
        'x <tool_call>{"name": "stranger", "arguments": {}}</tool_call> y',
        "a <tool_call> b",
        "[TOOL_CALLS] none",
        "[TOOL_CALLS][3]",
        "<start_function_call>call:f{a:<end_function_call>",
        "<start_function_call>call:stranger{}<end_function_call>",
        "a < b <",
        "<to",
        '<tool_call>{"name": "stranger',
        "<start_function_call>call:stranger{a:1",
        "[TOOL_CALLS]stranger",
        '{"name": "stranger", "a',
        "",
    ],
)
def test_what_is_no_call_of_a_known_tool_stays_content(dialect, text):
    assert says(dialect, text) == (text, [], "stop")


def test_a_call_that_breaks_off_is_told_as_far_as_it_came():
    content, _, calls, reason = hear(
        SpeechPlan(HERMES, NAMES), ['<tool_call>{"name": "f", "arguments": {"a": [1'], reason=FinishReason.LENGTH
    )
    assert (content, calls, reason) == ("", [("f", '{"a": [1')], "length")


ARGUMENTS = {"a": [1, {"b": '}]\\"é'}], "c": None}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = f'{{"name": "look", "arguments": {WRITTEN}}}'
OTHER = '{"name": "lookup", "arguments": {}}'
AS_GEMMA = '{a:[1,{b:<escape>}]\\"é<escape>}],c:null}'
WHOLE = {
    "required": (SpeechPlan(must_call=True), f"[{CALL}, {OTHER}]"),
    "named": (SpeechPlan(forced_name="look"), WRITTEN),
    "hermes": (SpeechPlan(HERMES), f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>"),
    "hermes, two in one": (SpeechPlan(HERMES), f"<tool_call>{CALL}\n{OTHER}</tool_call>"),
    "llama3": (SpeechPlan(LLAMA3), f"{CALL.replace('arguments', 'parameters')}; {OTHER}"),
    "llama3 with a tag and a type": (SpeechPlan(LLAMA3), '<|python_tag|>{"type": "function", ' + CALL[1:]),
    "mistral": (SpeechPlan(MISTRAL), f"[TOOL_CALLS][{CALL}, {OTHER}]"),
    "mistral, named": (SpeechPlan(MISTRAL), f"[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{WRITTEN}[TOOL_CALLS]lookup{{}}"),
    "gemma": (SpeechPlan(GEMMA), f"<start_function_call>call:look{AS_GEMMA}<end_function_call>"
              "<start_function_call>call:lookup{}<end_function_call>"),
    "gemma, new marks": (SpeechPlan(GEMMA), f"<|tool_call>call:look{AS_GEMMA}<tool_call|>"),
}  # fmt: skip


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_of_calls_may_be_cut_anywhere(name, reason):
    """By a limit or a stop string: no mark or bracket is content, nothing is made up, and a call that is not whole is
    no reason. `reason` is that of the engine, which knows nothing of calls."""
    plan, text = WHOLE[name]
    plan = dataclasses.replace(plan, names=frozenset({"look", "lookup"}))
    _, _, whole, last_reason = hear(plan, [text])
    assert [json.loads(arguments) for _, arguments in whole] == [ARGUMENTS, {}][: len(whole)]
    assert last_reason == ("stop" if plan.forced_name else "tool_calls")
    for end in range(len(text)):
        content, _, calls, told_reason = hear(plan, list(text[:end]), reason=reason)
        assert content in unmistakable(text[:end]), text[:end]
        for (called, arguments), (true_name, true_arguments) in zip(calls, whole, strict=False):
            assert called == true_name and true_arguments.startswith(arguments), text[:end]
        if told_reason == "tool_calls":
            assert reason is FinishReason.STOP and calls and calls == whole[: len(calls)], text[:end]
        else:
            assert told_reason == reason, text[:end]


def unmistakable(text):
    """Of a mark's first three letters nobody can say what they will be."""
    return ("", text) if len(text) < 4 and text[:1] in "<[" and text[:2] != "[{" else ("",)


@pytest.mark.parametrize("name", ["hermes", "mistral", "gemma", "required"])
def test_a_stop_string_between_whole_calls_leaves_them_as_the_reason(name):
    plan, text = WHOLE[name]
    plan = dataclasses.replace(plan, names=frozenset({"look", "lookup"}))
    second = {"hermes": "\n<tool_call>\n{", "mistral": ", {", "gemma": "<start_function_call>", "required": ", {"}[name]
    content, _, calls, reason = hear(plan, [text[: text.rindex(second)]])
    assert (content, [called for called, _ in calls], reason) == ("", ["look"], "tool_calls")


def test_a_thought_that_is_cut_calls_nothing():
    for plan in (SpeechPlan(names=NAMES, forced_name="f", thinks=True), SpeechPlan(HERMES, NAMES, thinks=True)):
        assert hear(plan, ["hm"], in_thought=True, reason=FinishReason.LENGTH) == ("", "hm", [], "length")


def test_without_arguments_a_whole_call_has_none_and_a_cut_one_has_not_said():
    assert says(HERMES, '<tool_call>{"name": "g"}') == ("", [("g", "{}")], "tool_calls")
    assert says(HERMES, '<tool_call>{"name": "g"') == ("", [("g", "")], "stop")
    assert says(HERMES, '<tool_call>{"name": "g", "arguments": nul') == ("", [("g", "")], "stop")
    assert says(HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"') == ("", ONE, "tool_calls")


def test_without_parallel_calls_the_first_one_counts():
    assert says(MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', max_calls=1) == ("", ONE, "tool_calls")
    for end in ("", "g", 'g{"a": '):
        assert says(MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]' + end, max_calls=1) == ("", ONE, "tool_calls"), (
            "of what is not told nothing can be cut"
        )


def test_a_required_call_is_a_list_and_a_named_one_its_arguments():
    forced = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert says(HERMES, forced, must_call=True) == ("", TWO, "tool_calls")
    assert says(HERMES, "[", must_call=True) == ("", [], "stop"), "never tool_calls without a call, nor its bracket"
    assert says(HERMES, '{"a": 1}', forced_name="f") == ("", ONE, "stop"), "as OpenAI's table has it"


@pytest.mark.parametrize(
    ("text", "in_thought", "content", "reasoning"),
    [
        ("<think>\nhm\n</think>\n\nyes\n", False, "yes\n", "hm"),
        ("\n<think></think>yes", False, "yes", ""),
        ("hm\n</think>\n\nyes", True, "yes", "hm"),
        ("<think>hm</think>yes", True, "yes", "hm"),
        ("hm", True, "", "hm"),
        ("<think> a < b", False, "", "a < b"),
        ("no <think>x</think>", False, "no <think>x</think>", ""),
        (" <thin", False, " <thin", ""),
    ],
)
def test_thoughts_are_told_apart_from_content(text, in_thought, content, reasoning):
    assert hear(SpeechPlan(thinks=True), [text], in_thought=in_thought)[:3] == (content, reasoning, [])
    assert hear(SpeechPlan(), [text])[0] == text, "but only those of a model that thinks"


def test_a_thought_may_come_before_a_call():
    text = '<think>use f</think>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert hear(SpeechPlan(HERMES, NAMES, thinks=True), [text]) == ("", "use f", ONE, "tool_calls")


WORDS = [
    "<tool_call>", "</tool_call>", '{"name": "f", ', '{"name": "g"}', '"arguments": ', '"parameters": {"a": [1, "}"]}',
    '{"b": "\\"<"}', "}", "]", "[", ";", "\n", " ", '"', "\\", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "f",
    "<|python_tag|>", "<start_function_call>", "<end_function_call>", "call:f{a:<escape>x<escape>}", "é🙂", "text", "3",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
PLANS = st.builds(
    SpeechPlan,
    dialect=st.sampled_from(ToolDialect),
    names=st.sampled_from([NAMES, frozenset()]),
    max_calls=st.sampled_from([None, 1]),
    must_call=st.booleans(),
    forced_name=st.sampled_from([None, None, "f"]),
    thinks=st.booleans(),
)


@settings(max_examples=250, deadline=None)
@given(PLANS, TEXTS, st.booleans(), st.data())
@example(SpeechPlan(HERMES, NAMES), '<tool_call>{"name": "f", "arguments": {"b": "\\"<"}}', False, None)
def test_any_cut_of_the_text_says_the_same(plan, text, in_thought, data):
    whole = hear(plan, [text], in_thought=in_thought)
    assert hear(plan, list(text), in_thought=in_thought) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert hear(plan, parts, in_thought=in_thought) == whole


@settings(max_examples=200, deadline=None)
@given(PLANS, TEXTS)
def test_nothing_is_lost_but_marks_and_white_space_where_nothing_is_called(plan, text):
    """Of an answer that ends within a call that had no name yet, all before it is there."""
    content, reasoning, calls, _ = hear(plan, [text])
    if not calls and not reasoning and "<think>" not in text:
        speech = plan.new_speech()
        speech.push(text)
        speech.finish()
        assert text.startswith(content) if speech.is_cut else content == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\{}', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1), VALUES, max_size=3), st.sampled_from([HERMES, LLAMA3, MISTRAL]))
def test_any_arguments_arrive_as_they_were_written(arguments, dialect):
    written = json.dumps(arguments, ensure_ascii=False)
    call = f'{{"name": "f", "arguments": {written}}}'
    text = {HERMES: f"<tool_call>{call}</tool_call>", LLAMA3: call, MISTRAL: f"[TOOL_CALLS][{call}]"}[dialect]
    assert hear(SpeechPlan(dialect, NAMES), list(text)) == ("", "", [("f", written)], "tool_calls")


def test_a_long_answer_in_one_piece_takes_no_time():
    """What a slow reader left in its inbox comes at once."""
    written = "{" + ",".join(f'"{i}":{{}}' for i in range(4_000)) + "}"
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert hear(SpeechPlan(HERMES, NAMES), [text])[2] == [("f", written)]
