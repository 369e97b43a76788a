"""codeparrot-clean: Python files of GitHub, of which the permissively licensed ones are kept.

`python -m data_prep.corpora.codeparrot --output DIR`; needs spaCy (MinHash compares words) and the network, or --source.

5,361,373 files, 50 GB of text, 12 to 14 billion tokens before the licences are looked at (estimated); each file has a
licence of its own. Takes up to 130 GB of disk and 24 core-hours. docs/corpora.md says where these are from.

Its makers have removed exact copies, automatically generated files, and files with lines of over 100 characters on average
or over 1,000 at most or with less than a quarter of letters and digits. Left to do are licences and near-duplicates.
"""

from __future__ import annotations

import sys

from data_prep.corpora.prepare import add_arguments, prepare, require, source_files
from data_prep.errors import OneLineParser, run_command

SOURCE = "hf://datasets/codeparrot/codeparrot-clean@35a59fb025bc0a102f7d96eac09d145b896d487b"
# Of the licences there, those that put no condition on works made from the code but to name its authors.
PERMISSIVE = {"apache-2.0", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "isc", "mit", "unlicense"}


def is_permissive(document) -> bool:
    return document.metadata["license"] in PERMISSIVE


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.corpora.codeparrot", description=__doc__.splitlines()[0])
    add_arguments(parser, SOURCE)
    arguments = parser.parse_args(argv)
    require("datatrove", "spacy")
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader

    files = source_files(arguments.source, "*.json.gz")
    reader = JsonlReader(
        arguments.source, glob_pattern="*.json.gz", text_key="content", id_key="hash", limit=arguments.limit
    )
    # Words of English prose: spaCy's rules for them take identifiers and punctuation apart, which is all that counts here.
    prepare(arguments, arguments.output, [reader, LambdaFilter(is_permissive)], "eng", files, {})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
