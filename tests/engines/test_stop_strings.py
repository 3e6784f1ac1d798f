"""Stop strings, token by token, against the text of all tokens so far."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fr_lightning.engines.stop_strings import NoDecoder, StopStrings, decoder_of

DECODER = decoder_of("embedded")


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), start=st.integers(0, 30), length=st.integers(1, 6))
def test_the_token_that_completes_a_string_is_the_first_whose_whole_text_holds_it(seed, start, length):
    rng = random.Random(seed)
    tokens = [rng.randrange(DECODER.get_vocab_size()) for _ in range(60)]
    text = DECODER.decode(tokens, skip_special_tokens=False)
    string = text[start : start + length]
    if not string or "\ufffd" in string:
        return  # bytes that are no character yet become one with the next token
    watch = StopStrings(DECODER, ["not there at all", string], prompt=[1, 2, 3])
    found = next(count for count, token in enumerate(tokens, 1) if watch.completed_by(token))
    assert found == next(n for n in range(1, 61) if string in DECODER.decode(tokens[:n], skip_special_tokens=False))


def test_characters_of_several_tokens_and_special_tokens():
    word = DECODER.encode("naïve 猫 🦊!", add_special_tokens=False).ids

    def kept(string: str) -> list[int]:
        watch = StopStrings(DECODER, [string], prompt=word)
        return word[: next((count for count, token in enumerate(word, 1) if watch.completed_by(token)), None)]

    assert kept("猫 🦊") == word[:-1]
    assert DECODER.decode(kept("ï")) == "naï"
    assert kept("never") == word
    end = DECODER.token_to_id("<|im_end|>")
    assert StopStrings(DECODER, ["<|im_end|>"], prompt=[]).completed_by(end)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(NoDecoder, match=str(tmp_path)):
        decoder_of(str(tmp_path))
