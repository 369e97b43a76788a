"""The tokenizer as data preparation sees it: text to ids, end-of-document id, vocabulary size, identity.

Reads `tokenizer.json` with the `tokenizers` library, so that no command here pays for importing transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from data_prep.errors import InputError
from data_prep.files import read_json

# tokenizers takes over 100 bytes a token while it encodes, so longer texts are cut into segments of about SEGMENT bytes.
SEGMENT = 1 << 20
# A text is refused when it is longer than this and no place to cut it is found over so many bytes.
LONGEST_SEGMENT = 1 << 22
# Where standard pre-tokenizers part: before a space or newline between words, or before what follows a word.
PLACES = re.compile(r"(?<=\w)(?:(?=[ \n]\w)|(?=[^\w\s]))")
WINDOW = 256  # characters on both sides of a place
PLACES_TRIED = 1000
HUB_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]


def tokenizer_directory(name: str | Path) -> Path:
    """The local path of a tokenizer; a name of the Hugging Face hub is downloaded into the hub's own cache."""
    path = Path(name)
    if path.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(str(name), allow_patterns=HUB_FILES))
    except Exception as error:  # of the hub, of the network, of a cache that can't be written
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(
            f"tokenizer {name} does not exist here, and the Hugging Face hub gives none of that name: {reason}"
        ) from None


class TextTokenizer:
    """A tokenizer directory that `AutoTokenizer` loads, a `tokenizer.json`, or a name of the Hugging Face hub.

    Special tokens in the text are encoded as ordinary text: a document that mentions "<|endoftext|>" does not end
    there. No template is applied; documents get exactly one end-of-document id, and no beginning one.

    Args:
        eod_token: the end-of-document token; by default the eos_token that the files beside tokenizer.json name.

    Attributes:
        path, name: where it is on this machine, and what it is called: the hub's name, or the absolute path.
        vocab_size: ids lie in 0 .. vocab_size - 1, added tokens included.
        end_token, end_id: the end-of-document token, None when the tokenizer names none.
        special_tokens: strings that would be control tokens.
        definition, sha256: tokenizer.json and its hash.
    """

    def __init__(self, path: str | Path, eod_token: str | None = None):
        self.path = tokenizer_directory(path)
        self.name = str(Path(path).resolve()) if Path(path).exists() else str(path)
        file = self.path / "tokenizer.json" if self.path.is_dir() else self.path
        if not file.is_file():
            raise InputError(
                f"tokenizer {file} does not exist; give a directory with tokenizer.json (save_pretrained makes one)"
            )
        raw = file.read_bytes()
        try:
            self._tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{file} is not a tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.definition = raw
        self.sha256 = hashlib.sha256(raw).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = [token.content for token in added.values() if token.special]
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._common_start = os.path.commonprefix(self.special_tokens)
        self.end_token = eod_token or self._end_token(file.parent)
        self.end_id = None if self.end_token is None else self._tokenizer.token_to_id(self.end_token)

        if eod_token and self.end_id is None:
            raise InputError(f"--eod_token {eod_token} is not in the vocabulary of {file}")

    def _end_token(self, directory: Path) -> str | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (directory / name).is_file():
                token = read_json(directory / name).get("eos_token")
                if token is not None:
                    return token["content"] if isinstance(token, dict) else token
        return None

    def mentions_special(self, text: str) -> bool:
        """Whether the text holds what would be a control token."""
        return self._common_start in text and any(token in text for token in self.special_tokens)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts back to back, length of each)."""
        parts, lengths = [np.empty(0, np.uint32)], []
        for batch in _batches(texts):
            documents = [
                encoding.ids for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            ]
            lengths += map(len, documents)
            parts.append(np.fromiter(chain.from_iterable(documents), dtype=np.uint32))
        return np.concatenate(parts), np.array(lengths, dtype=np.int32)

    def segments(self, text: str) -> list[str] | None:
        """The text cut into pieces of bounded length that give the same ids; None where it can't be cut so."""
        width = _width(text)
        usual, most = SEGMENT // width, LONGEST_SEGMENT // width
        # Finding places takes long, and most texts that are not ASCII are nearly so: those are measured.
        if len(text) <= usual or len(text) <= SEGMENT and len(text.encode()) <= SEGMENT:
            return [text]
        found, first = [], 0
        while self._tokenizer.pre_tokenizer is not None and len(text) - first > usual:
            places = (match.start() for match in PLACES.finditer(text, first + usual, first + most))
            place = next((place for place in islice(places, PLACES_TRIED) if self._parts_at(text, place)), None)
            if place is None:
                break
            found.append(text[first:place])
            first = place
        return [*found, text[first:]] if len(text) - first <= most else None

    def _parts_at(self, text: str, place: int) -> bool:
        """Whether the ids before and after `place` don't depend on each other.

        The model sees one pre-token at a time. So the normalizer must do the same to both sides apart, the pre-tokenizer
        must part there, and nothing else may change: on windows that begin and end at different distances, so that
        where a window begins does not decide it.
        """
        for distance in (WINDOW, WINDOW - 1, WINDOW // 2 + 1, WINDOW // 4):
            before, after = text[max(place - distance, 0) : place], text[place : place + distance]
            sides, whole = [self._pre_tokens(before), self._pre_tokens(after)], self._pre_tokens(before + after)
            if whole != sides[0] + sides[1] or not sides[0] or not sides[1]:
                return False
            one, other, both = (
                self._tokenizer.encode(part, add_special_tokens=False).ids for part in (before, after, before + after)
            )
            if one + other != both:
                return False
        return True

    def _pre_tokens(self, text: str) -> list[str]:
        normalizer = self._tokenizer.normalizer
        text = text if normalizer is None else normalizer.normalize_str(text)
        return [piece for piece, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    def decode(self, ids) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _width(text: str) -> int:
    """The most bytes of UTF-8, so about the most tokens, that one of its characters can take."""
    return 1 if text.isascii() else 4


def _batches(texts: list[str]) -> Iterator[list[str]]:
    """Runs of texts of about SEGMENT bytes."""
    first = size = 0
    for number, text in enumerate(texts, 1):
        size += len(text) * _width(text)
        if size >= SEGMENT or number == len(texts):
            yield texts[first:number]
            first, size = number, 0


class GigatokenEncoder:
    """The same ids as `tokenizer.encode`, by gigatoken: a hundred times faster where it supports the tokenizer.

    Whether it does is for `choose_encoder` to find out: what a foreign tokenizer makes gigatoken raise is not documented.
    """

    def __init__(self, tokenizer: TextTokenizer):
        import gigatoken

        definition = json.loads(tokenizer.definition)
        # gigatoken always takes special tokens in the text for control tokens; without them they are text.
        definition["added_tokens"] = [token for token in definition.get("added_tokens", []) if not token["special"]]
        definition["post_processor"] = None
        self._tokenizer = gigatoken.Tokenizer.from_json(json.dumps(definition))

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        layout = self._tokenizer.encode_batch(texts).layout
        offsets = np.asarray(layout.offsets.data)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets).astype(np.int32)


def choose_encoder(tokenizer: TextTokenizer, engine: str, sample: list[str]):
    """(encoder, note): gigatoken where it gives the same ids on `sample`, else the tokenizer itself, and why.

    Args:
        engine: "auto", or "gigatoken" or "tokenizers" to insist; a gigatoken that can't be had is then an InputError.
    """
    if engine == "tokenizers":
        return tokenizer, None
    try:
        encoder = GigatokenEncoder(tokenizer)
        same = all(
            (a == b).all() if a.shape == b.shape else False
            for a, b in zip(encoder.encode(sample), tokenizer.encode(sample), strict=True)
        )
        reason = None if same else "it gives other ids than tokenizers on the first records"
    except Exception as error:  # whatever a foreign tokenizer makes it raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if reason is None:
        return encoder, None
    if engine == "gigatoken":
        raise InputError(f"--engine gigatoken can't be used with {tokenizer.path}: {reason}; leave --engine out")
    return tokenizer, f"note: tokenizers is used instead of the faster gigatoken: {reason}"
