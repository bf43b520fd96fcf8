"""A SentencePiece model in T5's layout, small enough to be trained inside a test."""

from pathlib import Path

PIECES = 160

SENTENCES = """\
The house stands on a hill above the river, and its windows look to the south.
Every number says its precision mode, its packing, and how many tokens were seen.
In 1913 the bridge was 1,250 feet long; by 1957 it carried 40,000 cars a day (or more).
She asked: "Where do the streams of the two valleys meet?" Nobody knew, so they walked on.
A low-rank layer multiplies by two thin matrices; the latent between them is what is copied.
Copper, tin & zinc cost £3.50 a pound -- 20% less than last year's price!
Don't mix up the quick brown fox with the lazy dog: one jumps, the other sleeps.
for i in range(10): total += weights[i] * values[i]  # a sum of products
The café's naïve owner, José Núñez, served crème brûlée at Zürich's oldest hotel.
Questions remain... Why is the sky blue? How deep is the ocean? What is it that we know?
Yesterday evening the committee voted against the proposal by a margin of five to four.
Meanwhile, far below, the engines were running at half their usual speed.
""".splitlines()


def train(folder: Path, **options) -> Path:
    """Write ``folder/small.model``, by default a unigram model with T5's normalisation, and return its path."""
    import sentencepiece

    path = folder / "small.model"
    settings = {
        "model_type": "unigram", "vocab_size": PIECES, "character_coverage": 0.98, "num_threads": 1, "minloglevel": 2,
        "normalization_rule_name": "nmt_nfkc", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1,
    }  # fmt: skip
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 3), model_writer=file, **settings | options
        )
    return path
