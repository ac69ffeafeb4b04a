import time

from hypothesis import given
from hypothesis import strategies as st

from serving.engine.stop_strings import StopStrings


def run(stops, pieces):
    """Everything shown, and whether a stop string was met."""
    strings = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, hit = strings.push(piece)
        shown += text
        if hit:
            return shown, True
    return shown + strings.finish(), False


def reference(stops, text):
    """Read letter by letter; the first stop string to be complete ends the text, the longest if several are."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - len(max(done, key=len))], True
    return text, False


def test_a_stop_string_over_several_pieces():
    strings = StopStrings(["\n\nUser:"])
    assert strings.push("Hello.\n") == ("Hello.", False)
    assert strings.push("\nUs") == ("", False)
    assert strings.push("er: hi") == ("\n\n"[:0], True)


def test_what_was_held_back_for_nothing_is_shown():
    strings = StopStrings(["STOP"])
    assert strings.push("a ST") == ("a ", False)
    assert strings.push("") == ("", False)
    assert strings.push("ART") == ("START", False)
    assert strings.push("S") == ("", False)
    assert strings.finish() == "S"
    assert strings.finish() == ""


def test_without_stop_strings_everything_passes():
    assert run([], ["a", "", "b"]) == ("ab", False)


def test_the_first_to_be_complete_wins():
    assert run(["abc", "b"], ["xabc"]) == ("xa", True)
    assert run(["ab", "b"], ["xab"]) == ("x", True)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_any_split_shows_the_same(stops, pieces):
    assert run(stops, pieces) == reference(stops, "".join(pieces))


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), pieces=st.lists(st.text("ab"), max_size=9))
def test_no_part_of_a_stop_string_is_ever_shown(stops, pieces):
    strings, shown = StopStrings(stops), ""
    final, _ = reference(stops, "".join(pieces))
    for piece in pieces:
        text, hit = strings.push(piece)
        shown += text
        assert final.startswith(shown)
        if hit:
            return


def test_work_per_piece_does_not_grow_with_the_answer():
    def seconds(num_pieces):
        strings = StopStrings(["a" * 255 + "b", "zzz"])
        start = time.perf_counter()
        for _ in range(num_pieces):
            strings.push("aaxx")
        return time.perf_counter() - start

    few, many = min(seconds(500) for _ in range(3)), min(seconds(5000) for _ in range(3))
    assert many < 40 * few
