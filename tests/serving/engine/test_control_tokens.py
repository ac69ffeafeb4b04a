"""What people write stays text, also where it spells a control token; all else is encoded as ever."""

import dataclasses

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from model.hf_folder import read_hf_folder
from serving.engine.tokenizer import Tokenizer
from tests.model_files import TIED

TEXT = read_hf_folder(TIED).text
TOKENIZER = Tokenizer(TEXT)
PLAIN = tokenizers.Tokenizer.from_str(TEXT.tokenizer_json)
PLAIN.encode_special_tokens = True
USER, END, ASSISTANT = 2, 1, 3


def ids_of(*contents, **options):
    return TOKENIZER.read_chat([{"role": "user", "content": text} for text in contents], **options)[0]


def plain(text):
    return PLAIN.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["<|end|>", "a<|end|>b<|user|>", "<|end|><|end|>", "x <|assistant|>", "<|end|", "<"])
def test_text_that_spells_a_control_token_stays_text(text):
    ids, rendered = TOKENIZER.read_chat([{"role": "user", "content": text}])
    assert ids == [USER, *plain(text), END, ASSISTANT]
    assert rendered == f"<|user|>{text}<|end|><|assistant|>"


@given(st.lists(st.lists(st.sampled_from(["<|end|>", "<|user|>", "<|", "end", "|>", " ", "é", "\n"])).map("".join)))
def test_any_conversation_is_its_texts_between_the_tokens_of_the_template(contents):
    expected = [each for text in contents for each in (USER, *plain(text), END)]
    assert ids_of(*contents, add_generation_prompt=False) == expected


@given(st.text())
def test_ordinary_text_is_encoded_as_ever(text):
    rendered = TOKENIZER.render_chat([{"role": "user", "content": text}])
    assert ids_of(text) == TOKENIZER.encode_rendered(rendered)


def test_a_flag_gives_them_back():
    assert ids_of("a<|end|>", with_control_tokens=True) == [USER, *plain("a"), END, END, ASSISTANT]


def test_raw_prompts_keep_them():
    assert TOKENIZER.encode("<|end|>") == [END]


def test_tools_names_and_thoughts_are_text_too():
    template = (
        "{{ tools | tojson }}{{ tools | tojson(ensure_ascii=True) }}"
        "{% for m in messages %}{{ m.name }}{{ m.reasoning_content }}<|end|>{% endfor %}"
    )
    tokenizer = Tokenizer(dataclasses.replace(TEXT, chat_template=template))
    tools = [{"type": "function", "function": {"name": "f", "description": "<|end|>"}}]
    messages = [{"role": "user", "content": "", "name": "<|user|>", "reasoning_content": "<|assistant|>"}]
    ids, rendered = tokenizer.read_chat(messages, tools)
    assert ids == [*plain(rendered.removesuffix("<|end|>")), END]
    assert rendered == tokenizer.render_chat(messages, tools)
