import pytest

from serving.replica.thought_count import ThoughtCount


@pytest.mark.parametrize(
    ("tokens", "in_thought", "count"),
    [
        (["<think>", "a", "b", "</think>", "c", "</think>"], False, 4),
        (["\n", "<thi", "nk>", "a"], False, 4),
        (["a", "</th", "", "ink>", "c"], True, 4),
        (["a", "<think>", "b", "</think>"], False, 0),
        (["<th", "e"], False, 0),
        (["a"] * 50, True, 50),
        (["</think>", "a"], True, 1),
    ],
)
def test_tokens_up_to_the_end_of_the_thought(tokens, in_thought, count):
    thoughts = ThoughtCount(in_thought=in_thought)
    for token in tokens:
        thoughts.see(token)
    assert thoughts.num_tokens == count
