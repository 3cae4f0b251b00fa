"""A made-up language for tiny models: phrases of two to six words; which phrase comes next depends
on the two before it, one time in eight on nothing.

A head has to know that table as its target does. Copying knows only what was said already, and
little of it comes again.
"""

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 640
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
END = SPECIAL.index("<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS, PHRASES, CLASSES, NOISE = 200, 360, 4, 0.12


class Language:
    def __init__(self, seed: int) -> None:
        r = random.Random(seed)
        syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
        self.words = r.sample([a + b for a in syllables for b in syllables], WORDS)
        self.phrases = []
        for _ in range(PHRASES):
            words = " ".join(r.choices(self.words, k=r.randint(2, 6)))
            self.phrases.append(words + r.choice([",", ",", ";", ".\n"]))
        # One permutation for each class of the phrase before the last: none is commoner than
        # another.
        self.table = [r.sample(range(PHRASES), PHRASES) for _ in range(CLASSES)]

    def text(self, r: random.Random, phrases: int) -> str:
        before, last = r.randrange(PHRASES), r.randrange(PHRASES)
        text = ""
        for _ in range(phrases):
            text += (" " if text and text[-1] != "\n" else "") + self.phrases[last]
            known = r.random() >= NOISE
            following = self.table[before % CLASSES][last] if known else r.randrange(PHRASES)
            before, last = last, following
        return text

    def tokenizer(self) -> Tokenizer:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=list(SPECIAL),
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        text = self.text(random.Random(1), 4000)
        made.train_from_iterator([" ".join(self.words) + " "] * 4 + [text], trainer)
        return made
