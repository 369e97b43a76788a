"""FineWeb-Edu's sample of 10 billion tokens: English web pages that a classifier rates as educational.

`python -m data_prep.corpora.fineweb_edu --output DIR`; needs spaCy (MinHash compares words) and the network, or --source.

9,672,101 documents, 28.5 GB of Parquet, 46 GB of text, 10 billion tokens (GPT-2's); ODC-By 1.0. Takes 120 GB of disk and
55 core-hours, 4 hours on 14 cores. docs/corpora.md says where these are from.

Its makers have kept English (fastText score of at least 0.65), applied Gopher's, C4's and FineWeb's quality rules and an
educational score of at least 3, so no filter is run here. They removed near-duplicates within each crawl only: between
crawls, MinHash is left to do.
"""

from __future__ import annotations

import sys

from data_prep.corpora.prepare import add_arguments, prepare, require, source_files
from data_prep.errors import OneLineParser, run_command

SOURCE = "hf://datasets/HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9/sample/10BT"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.corpora.fineweb_edu", description=__doc__.splitlines()[0])
    add_arguments(parser, SOURCE)
    arguments = parser.parse_args(argv)
    require("datatrove", "spacy")
    from datatrove.pipeline.readers import ParquetReader

    files = source_files(arguments.source, "*.parquet")
    reader = ParquetReader(arguments.source, glob_pattern="*.parquet", limit=arguments.limit, read_metadata=False)
    prepare(arguments, arguments.output, [reader], "eng", files, {})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
