"""The tokenizer as data preparation sees it: text to ids, end-of-document id, vocabulary size, identity.

Reads `tokenizer.json` with the `tokenizers` library, so that no command here pays for importing transformers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

from data_prep.errors import InputError


class TextTokenizer:
    """A tokenizer directory that `AutoTokenizer` loads, or a `tokenizer.json`.

    Special tokens in the text are encoded as ordinary text: a document that mentions "<|endoftext|>" does not end
    there. No template is applied; documents get exactly one end-of-document id, and no beginning one.

    Attributes:
        vocab_size: ids lie in 0 .. vocab_size - 1, added tokens included.
        end_token, end_id: the end-of-document token, None when the tokenizer names none.
        special_tokens: strings that would be control tokens.
        sha256: hash of tokenizer.json.
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
        self.sha256 = hashlib.sha256(raw).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = [token.content for token in added.values() if token.special]
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.end_token = self._end_token(file.parent)
        self.end_id = None if self.end_token is None else self._tokenizer.token_to_id(self.end_token)

    def _end_token(self, directory: Path) -> str | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (directory / name).is_file():
                token = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token")
                if token is not None:
                    return token["content"] if isinstance(token, dict) else token
        return None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
