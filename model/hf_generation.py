"""What the files of a Hugging Face folder say about answers: where they end, and how their tokens are chosen."""

import tokenizers

from model.card import GenerationDefaults, TextAssets
from model.fields import Fields

UNSUPPORTED = {
    "bad_words_ids": (), "begin_suppress_tokens": (), "constraints": (), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (), "force_words_ids": (), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "guidance_scale": (1,), "min_length": (0,), "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,), "num_beams": (1,), "penalty_alpha": (0,), "sequence_bias": (), "stop_strings": (),
    "suppress_tokens": (), "top_h": (), "typical_p": (1,), "watermarking_config": (),
}  # fmt: skip
"""Fields of generation_config.json that change answers and are not followed, and the values that change nothing beside
null, false and what is empty. Limits of length are the client's business."""


def generation_defaults(
    config: Fields, generation: Fields, text: TextAssets, vocab_size: int
) -> tuple[GenerationDefaults, list[str]]:
    """Also a sentence about each thing that is not followed. Sampling numbers count only where the authors turn
    sampling on, but a repetition penalty always. Raises CheckpointError naming the file.
    """
    sampling = generation if generation.flag("do_sample") else Fields({}, generation.where)
    ends, notes = _end_tokens(config, generation, text, vocab_size)
    defaults = GenerationDefaults(
        eos_token_ids=ends,
        temperature=sampling.number("temperature", least=0, most=2),
        top_k=None if sampling.get("top_k") == -1 else sampling.count("top_k", least=0),
        top_p=sampling.number("top_p", above=0, most=1),
        min_p=sampling.number("min_p", least=0, most=1),
        repetition_penalty=generation.number("repetition_penalty", above=0, most=10),
    )
    return defaults, [*notes, *_not_followed(generation)]


def _end_tokens(
    config: Fields, generation: Fields, text: TextAssets, vocab_size: int
) -> tuple[tuple[int, ...], list[str]]:
    """The union of all that the files name: answers that do not end are worse than those that end as somebody said."""
    named = [
        *config.token_ids("eos_token_id"),
        *config.object("text_config").token_ids("eos_token_id"),
        *generation.token_ids("eos_token_id"),
        *_own_end(text),
    ]
    ends = tuple(dict.fromkeys(token_id for token_id in named if token_id < vocab_size))
    if ends:
        return ends, []
    return ends, [f"{config.where}, beside it and its tokenizer name no end token: answers end with their limits only"]


def _own_end(text: TextAssets) -> list[int]:
    if text.eos_token is None:
        return []
    token_id = tokenizers.Tokenizer.from_str(text.tokenizer_json).token_to_id(text.eos_token)
    return [] if token_id is None else [token_id]


def _not_followed(generation: Fields) -> list[str]:
    return [
        f"{generation.where}: {name} is not followed"
        for name, neutral in UNSUPPORTED.items()
        if (value := generation.get(name)) and value not in neutral
    ]
