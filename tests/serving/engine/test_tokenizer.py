import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from model.card import TextAssets
from model.errors import CheckpointError
from model.hf_folder import read_hf_folder
from serving.engine.tokenizer import Tokenizer
from serving.errors import InvalidRequest
from sharding.checkpoint import read_card
from tests.model_files import GOLDEN, TIED

EXPECTED = json.loads((GOLDEN / "smollm2_tokenizer.json").read_text())


@pytest.fixture(scope="module")
def assets() -> TextAssets:
    return read_hf_folder(TIED).text


def test_text_and_back(assets):
    tokenizer = Tokenizer(assets)
    text = "Hello world, 你好 😀\n"
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(ids) + detokenizer.finish() == text
    assert tokenizer.vocab_size == 320
    assert tokenizer.encode("") == []


def test_bos_goes_in_front_of_text_but_not_of_chats(assets):
    plain = Tokenizer(assets)
    with_bos = Tokenizer(dataclasses.replace(assets, add_bos=True))
    messages = [{"role": "user", "content": "hi"}]
    assert with_bos.encode("hi") == [0, *plain.encode("hi")]
    assert with_bos.encode_chat(messages) == plain.encode_chat(messages)


def test_chats_go_through_the_template(assets):
    tokenizer = Tokenizer(assets)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "<|user|>hi<|end|><|assistant|>"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|user|>hi<|end|>"
    ids = tokenizer.encode_chat(messages)
    assert (ids[0], ids[-2], ids[-1]) == (2, 1, 3)  # the marks are single tokens


def test_a_model_without_template_takes_no_chats(assets):
    tokenizer = Tokenizer(dataclasses.replace(assets, chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_cutting_and_padding_of_the_file_are_ignored(assets):
    data = json.loads(assets.tokenizer_json)
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|begin|>",
    }  # fmt: skip
    tokenizer = Tokenizer(dataclasses.replace(assets, tokenizer_json=json.dumps(data)))
    assert tokenizer.encode("a b c d e") == Tokenizer(assets).encode("a b c d e")


def test_broken_assets_are_refused(assets):
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        Tokenizer(dataclasses.replace(assets, tokenizer_json="{"))
    with pytest.raises(CheckpointError, match="'<s>' is not in its tokenizer"):
        Tokenizer(dataclasses.replace(assets, add_bos=True, bos_token="<s>"))


def test_many_threads_get_what_one_gets(assets):
    tokenizer = Tokenizer(assets)
    texts = [f"text number {index} 你好 {index * 7919}" for index in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def smollm2(demo_model) -> Tokenizer:
    return Tokenizer(read_card(demo_model).text)


@pytest.mark.e2e
@pytest.mark.parametrize("case", EXPECTED["texts"], ids=lambda case: ascii(case["text"][:16]))
def test_texts_equal_transformers(smollm2, case):
    assert smollm2.encode(case["text"]) == case["ids"]


@pytest.mark.e2e
@pytest.mark.parametrize("case", EXPECTED["chats"], ids=lambda case: ascii(case["messages"][-1]["content"][:16]))
def test_chats_equal_transformers(smollm2, case):
    assert smollm2.render_chat(case["messages"]) == case["text"]
    assert smollm2.read_chat(case["messages"], with_control_tokens=True)[0] == case["ids"]


@pytest.mark.e2e
def test_digits_are_single_tokens(smollm2):
    """What is lost where the model's tokenizer is taken for a plain GPT-2 one."""
    detokenizer = smollm2.detokenizer()
    pieces = [detokenizer.push([token_id]) for token_id in smollm2.encode("in 1234, 56")]
    assert pieces == ["in", " ", "1", "2", "3", "4", ",", " ", "5", "6"]


def test_chats_with_tools_take_the_template_for_tools(assets):
    text = dataclasses.replace(
        assets, chat_template="plain {{ pad_token }}", tool_template="tools {{ eos_token }}{{ tools[0].name }}",
        named_tokens={"pad_token": "<pad>", "eos_token": "<|end|>"},
    )  # fmt: skip
    tokenizer = Tokenizer(text)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "plain <pad>"
    assert tokenizer.render_chat(messages, [{"name": "f"}]) == "tools <|end|>f"
    only_tools = Tokenizer(dataclasses.replace(text, chat_template=None))
    assert only_tools.render_chat(messages, [{"name": "f"}]) == "tools <|end|>f"
    with pytest.raises(InvalidRequest, match="no chat template"):
        only_tools.render_chat(messages)
