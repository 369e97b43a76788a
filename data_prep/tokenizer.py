"""The tokenizer as data preparation sees it: text to ids, end-of-document id, vocabulary size, identity.

Reads `tokenizer.json` with the `tokenizers` library, so that no command here pays for importing transformers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from data_prep.errors import InputError
from data_prep.files import read_json


class TextTokenizer:
    """A tokenizer directory that `AutoTokenizer` loads, or a `tokenizer.json`.

    Special tokens in the text are encoded as ordinary text: a document that mentions "<|endoftext|>" does not end
    there. No template is applied; documents get exactly one end-of-document id, and no beginning one.

    Attributes:
        vocab_size: ids lie in 0 .. vocab_size - 1, added tokens included.
        end_token, end_id: the end-of-document token, None when the tokenizer names none.
        special_tokens: strings that would be control tokens.
        definition, sha256: tokenizer.json and its hash.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
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
        self.end_token = self._end_token(file.parent)
        self.end_id = None if self.end_token is None else self._tokenizer.token_to_id(self.end_token)

    def _end_token(self, directory: Path) -> str | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (directory / name).is_file():
                token = read_json(directory / name).get("eos_token")
                if token is not None:
                    return token["content"] if isinstance(token, dict) else token
        return None

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts back to back, length of each)."""
        documents = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.fromiter(map(len, documents), dtype=np.int32, count=len(documents))
        flat = np.fromiter((i for ids in documents for i in ids), dtype=np.uint32, count=int(lengths.sum()))
        return flat, lengths

    def decode(self, ids) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


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
