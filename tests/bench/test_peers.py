import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from model.gguf_file import read_gguf
from model.hf_folder import read_hf_folder
from tests.bench.load import Answer
from tests.bench.mixed import ANSWERS, INTERACTIVE, PROMPTS, SLOTS, arrivals, is_good
from tests.bench.peer_measure import PREFIX_STREAMS
from tests.bench.peer_models import DTYPES, gguf_file, hf_folder
from tests.bench.peer_servers import Home, Launch, Other
from tests.bench.peers import choose, parse, visits
from tests.model_files import write_tiny_gguf


def test_a_server_that_fits_its_slots_is_started_for_each_level():
    options = parse(["--levels", "1", "8", "32"])
    found = list(visits(True, "float32", options))
    assert [(visit.launch.slots, visit.wanted.levels, visit.wanted.prefix) for visit in found] == [
        (1, (1,), False), (8, (8,), True), (32, (32,), False), (32, (), False),
    ]  # fmt: skip
    assert found[-1].wanted.protected_s and found[-1].wanted.rates


def test_others_are_started_once_for_all_levels():
    found = list(visits(False, "float32", parse(["--levels", "1", "64", "--parts", "levels"])))
    assert [(visit.launch.slots, visit.wanted.levels, visit.wanted.prefix) for visit in found] == [(64, (1, 64), False)]
    found = list(visits(False, "float32", parse(["--parts", "prefix"])))
    assert [(visit.launch.slots, visit.wanted.levels, visit.wanted.prefix) for visit in found] == [(8, (), True)]


def test_who_waits_for_whom_is_asked_once_unless_it_is_asked_for():
    assert [visit.wanted.protected_s for visit in visits(False, "bfloat16", parse([]))] == [0.0]
    assert all(visit.wanted.rates for visit in visits(False, "bfloat16", parse(["--parts", "mixed"])))


def test_what_runs_at_once_is_warmed_up():
    every, one = visits(False, "float32", parse(["--levels", "1"]))
    assert (every.wanted.streams, one.wanted.streams) == ({1, PREFIX_STREAMS}, {INTERACTIVE, SLOTS})


def test_any_server_joins_with_a_command():
    peer = Other("mine", "serve --port {port} --slots {slots} --most {context} --type {dtype}")
    assert peer.command(Launch("float32", 8, 640), 4_000) == [
        "sh", "-c", "exec serve --port 4000 --slots 8 --most 640 --type float32",
    ]  # fmt: skip


def test_a_peer_that_is_not_known_is_refused_by_name(tmp_path):
    with pytest.raises(SystemExit, match="no such peer: nobody; known: podstream, vllm"):
        choose(parse(["--peers", "podstream,nobody"]), Home(tmp_path, Console()))


@settings(max_examples=10)
@given(st.integers(0, 99), st.sampled_from([0.5, 4.0]))
def test_arrivals_keep_their_bounds_and_are_the_same_for_every_server(seed, rate):
    found = arrivals(random.Random(seed), rate, 40)
    assert found == arrivals(random.Random(seed), rate, 40)
    assert [arrival.at_s for arrival in found] == sorted(arrival.at_s for arrival in found)
    assert all(PROMPTS[0] <= len(arrival.ask.prompt) <= PROMPTS[1] for arrival in found)
    assert all(ANSWERS[0] <= arrival.ask.max_tokens <= ANSWERS[1] for arrival in found)


@pytest.mark.parametrize(
    ("chunks_s", "tokens", "good"),
    [([1.9, 2.0], 2, True), ([2.1, 2.2], 2, False), ([1.0, 3.0], 5, False), ([1.0], 1, True), ([], 0, False)],
)
def test_good_is_a_prompt_first_token_and_then_a_steady_pace(chunks_s, tokens, good):
    assert is_good(Answer(0.0, chunks_s, tokens)) is good


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_formats_hold_the_weights_of_the_source(tmp_path, dtype):
    source = read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"))
    folder = read_hf_folder(hf_folder(tmp_path / "out" / "hf", lambda: source, dtype))
    file = read_gguf(gguf_file(tmp_path / "out" / "copy.gguf", lambda: source, dtype))
    assert folder.config == file.config == source.config
    assert folder.text == file.text == source.text
    assert folder.generation == file.generation == source.generation
    assert folder.dtype == file.dtype == dtype
    for name, tensor in source.tensors.items():
        weight = tensor.read()
        rounded = weight.astype(DTYPES[dtype]).astype(np.float32)
        assert np.array_equal(folder.tensors[name].read().astype(np.float32), rounded)
        assert np.array_equal(file.tensors[name].read(), rounded if weight.ndim > 1 else weight)
