"""mC4 in German, Spanish, French and Russian: web pages, cleaned step by step as one's own crawl would be.

`python -m data_prep.corpora.mc4 --output DIR`; needs spaCy (rules and MinHash count words), fastText with the package
fasteners (language), and the network, or --source.

Ten files a language: 7 million pages, 40 GB of text, 7 billion tokens before cleaning, estimated; ODC-By. Takes up to 90 GB
of disk and 175 core-hours, 18 hours on 10 cores. docs/corpora.md says where these are from.

Its makers have kept pages with three lines of 200 characters, left out pages with bad words and repeated lines, and told
languages apart with cld3. Here come language (fastText's lid.176, which is downloaded at the first use),
Gopher's repetition and quality rules, FineWeb's quality rules, and MinHash. Each language has a directory of its own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from data_prep.corpora.prepare import add_arguments, prepare, require, source_files
from data_prep.errors import InputError, OneLineParser, run_command

SOURCE = "hf://datasets/allenai/c4@1588ec454efa1a09f29cd18ddd04fe05fc8653a2/multilingual"
# The first ten files of a language: of 2,048 (de, es, fr) or 4,096 (ru).
FILES = "c4-{}.tfrecord-0000?-of-*.json.gz"


@dataclass(frozen=True)
class Language:
    """One language and the bounds of its quality rules, those that FineWeb-2's makers found for it.

    Attributes:
        words: datatrove's name for whose words are counted.
        weight: share of the run's tokens, for `data.files` of a recipe.
        stop_words: of which a page must have two.
        word_length: bounds of the mean, characters.
        alphabetic_words: least share of words that have a letter.
        punctuated_lines: least share of lines that end in punctuation.
        lines_per_word: most.
    """

    words: str
    weight: float
    stop_words: str
    word_length: tuple[int, int]
    alphabetic_words: float
    punctuated_lines: float
    lines_per_word: float


LANGUAGES = {
    "de": Language(
        "deu", 0.25, "der und die in von im den des mit das er dem als wurde für", (0, 15), 0.774, 0.0, 0.152
    ),
    "es": Language("spa", 0.3, "de la en el y a que del los se por un con una las su", (4, 14), 0.825, 0.3, 0.171),
    "fr": Language(
        "fra", 0.25, "de la le et à en l' des du les est d' un une il dans par au", (2, 11), 0.812, 0.1, 0.185
    ),
    "ru": Language(
        "rus", 0.2, "в и на с по из был к не от что за для его как а он также до после", (3, 11), 0.713, 0.231, 0.139
    ),
}


def filters(code: str, check_language: bool) -> list:
    """datatrove's filters for the pages of one language, in FineWeb's order."""
    from datatrove.pipeline.filters import (
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
        LanguageFilter,
    )

    language = LANGUAGES[code]
    shortest, longest = language.word_length
    return [
        *([LanguageFilter(code)] if check_language else []),
        GopherRepetitionFilter(language=language.words),
        GopherQualityFilter(
            min_avg_word_length=shortest,
            max_avg_word_length=longest,
            max_non_alpha_words_ratio=language.alphabetic_words,
            stop_words=language.stop_words.split(),
            language=language.words,
        ),
        FineWebQualityFilter(
            line_punct_thr=language.punctuated_lines,
            short_line_thr=1,  # off, as in FineWeb-2
            char_duplicates_ratio=0.1,
            new_line_ratio=language.lines_per_word,
            language=language.words,
        ),
    ]


def fetch_language_model() -> None:
    """Have fastText's model downloaded to datatrove's cache. Raises InputError when it can't be."""
    from datatrove.pipeline.filters import LanguageFilter

    try:
        LanguageFilter().model.model  # noqa: B018 - loads it
    except Exception as error:  # its download's, or fastText's
        raise InputError(
            f"fastText's lid.176 can't be had: {error}; with --language_filter off it is not needed"
        ) from None


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.corpora.mc4", description=__doc__.splitlines()[0])
    add_arguments(parser, SOURCE)
    parser.add_argument("--languages", nargs="+", choices=LANGUAGES, default=list(LANGUAGES), help="default: all four")
    parser.add_argument(
        "--language_filter",
        choices=["on", "off"],
        default="on",
        help="off: believe the source's labels; fastText's model, which is downloaded, is not needed then",
    )
    arguments = parser.parse_args(argv)
    check_language = arguments.language_filter == "on"
    require("datatrove", "spacy", *(["fasttext", "fasteners"] if check_language else []))
    from datatrove.pipeline.readers import JsonlReader

    if check_language:
        fetch_language_model()
    else:
        print("language filter: off, the source's own labels are believed")
    lines = []
    for code in arguments.languages:
        pattern = FILES.format(code)
        files = source_files(arguments.source, pattern)
        reader = JsonlReader(arguments.source, glob_pattern=pattern, id_key="url", limit=arguments.limit)
        settings = {"language_filter": arguments.language_filter}
        folder = arguments.output / code
        train = prepare(
            arguments, folder, [reader, *filters(code, check_language)], LANGUAGES[code].words, files, settings
        )
        lines.append(f"    - {{path: {train}, weight: {LANGUAGES[code].weight}}}")
    print("for the recipe:\ndata:\n  files:", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
