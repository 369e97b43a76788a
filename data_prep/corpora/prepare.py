"""What the corpus scripts share: clean, remove near-duplicates, tokenize, split. Every step but the last two is datatrove's.

A script gives `prepare` the reader and filters of one corpus. In the output directory appear

    cleaned/       what the filters left, JSONL
    unique/        that without near-duplicates: the text that is tokenized
    train_text_document.{bin,idx,json}, validation_text_document.{bin,idx,json}
    minhash/, logs/    signatures and datatrove's records; not needed once the token files are there

A killed run goes on with the same command: finished tasks are not done again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter, defaultdict
from pathlib import Path

from data_prep import split_tokens, tokenize_files
from data_prep.errors import InputError
from data_prep.files import make_directory, read_json, write_json
from data_prep.tokenizer import TextTokenizer

# One tokenizer for all corpora, as a run that blends token files needs: 128,256 ids, those of Llama 3; not gated.
TOKENIZER = "marin-community/marin-tokenizer"


def add_arguments(parser, source: str) -> None:
    """The options of every corpus script. `source` is the corpus's own address, the default of --source."""
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--source", default=source, help="local folder of the same schema (default, over the network: %(default)s)"
    )
    parser.add_argument("--limit", type=int, default=-1, help="documents to read a task (default: all)")
    parser.add_argument(
        "--tasks", type=int, help="pieces of the work, at most one a source file (default: one a source file)"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="tasks at a time (default: one a core)"
    )
    parser.add_argument("--tokenizer", default=TOKENIZER, help="directory or name on the hub (default: %(default)s)")
    parser.add_argument(
        "--validation_fraction", type=float, default=0.001, help="share of the documents (default: %(default)s)"
    )


def require(*modules: str) -> None:
    """Raise InputError, naming what to install, when a module that a datatrove block needs is missing."""
    packages = {"fasttext": "fasttext-numpy2-wheel"}
    missing = [packages.get(module, module) for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"{' and '.join(missing)} not installed; pip install {' '.join(missing)}")


def source_files(folder: str, pattern: str) -> list[str]:
    """Names of the files in `folder` (local, or any address that fsspec knows) that match `pattern`."""
    from datatrove.io import get_datafolder

    try:
        files = get_datafolder(folder).list_files(glob_pattern=pattern)
    except Exception as error:  # each remote file system has its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"--source {folder} can't be listed: {reason}; without network, give a local folder") from None
    if not files:
        raise InputError(f"--source {folder} holds no file that matches {pattern}")
    return files


def claim(output: Path, settings: dict) -> None:
    """Note in `output` what it is made from. Raises InputError when it was begun with other settings."""
    noted = make_directory(output, "output directory") / "settings.json"
    if not noted.exists():
        return write_json(noted, settings)
    begun = read_json(noted)
    for key in settings:
        if settings[key] != begun.get(key):
            raise InputError(
                f"{output} was begun with {key} {begun.get(key)}, not {settings[key]}; choose another --output or remove it"
            )


def run_stage(name: str, pipeline: list, logs: Path, tasks: int, workers: int) -> None:
    """Run one datatrove pipeline, and print per filter how many documents came and how many stayed."""
    from datatrove.executor import LocalPipelineExecutor

    LocalPipelineExecutor(pipeline, tasks=tasks, workers=min(workers, tasks), logging_dir=str(logs / name)).run()
    counts: dict[str, Counter] = defaultdict(Counter)
    for path in sorted((logs / name / "stats").iterdir()):
        for block in json.loads(path.read_text()):
            counts[block["name"]].update({key: block["stats"].get(key, 0) for key in ("forwarded", "dropped")})
    for block, count in counts.items():
        if total := count.total():
            title = re.sub(r".*?: \W*", "", block, count=1)  # of "FILTER: (emoji) Gopher Quality"
            print(f"{name}: {title}: {count['forwarded']:,} of {total:,} documents stay")


def remove_near_duplicates(folder: Path, language: str, tasks: int, workers: int) -> None:
    """MinHash over folder/cleaned into folder/unique: of documents that share 5-grams of words to 0.72 or so, one stays."""
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig

    config = MinhashConfig(
        hash_config=HashConfig(hash_fc="sha1")
    )  # xxhash 4 takes bytes alone, datatrove gives it text
    cleaned, minhash, logs = str(folder / "cleaned"), folder / "minhash", folder / "logs"
    signatures, buckets, removed = (str(minhash / name) for name in ("signatures", "buckets", "removed"))
    # The first and the last stage must read the same documents in the same order: same folder, same tasks.
    run_stage(
        "signatures",
        [JsonlReader(cleaned), MinhashDedupSignature(signatures, config, language)],
        logs,
        tasks,
        workers,
    )
    run_stage("buckets", [MinhashDedupBuckets(signatures, buckets, config=config)], logs, config.num_buckets, workers)
    run_stage("clusters", [MinhashDedupCluster(buckets, removed, config)], logs, 1, 1)
    run_stage(
        "unique",
        [JsonlReader(cleaned), MinhashDedupFilter(removed), JsonlWriter(str(folder / "unique"))],
        logs,
        tasks,
        workers,
    )


def prepare(arguments, folder: Path, cleaning: list, language: str, files: list[str], settings: dict) -> Path:
    """Make `folder` from a corpus.

    Args:
        cleaning: datatrove's reader of the source, then the filters.
        language: whose words MinHash compares, as datatrove names languages ("eng").
        files: of the source.
        settings: of the script, beyond the common options, that decide the result.

    Returns:
        The prefix of the training file.
    """
    from datatrove.pipeline.writers import JsonlWriter

    tasks = arguments.tasks or len(files)
    if not 1 <= tasks <= len(files):
        raise InputError(f"--tasks {tasks} does not lie between 1 and the {len(files)} source files")
    common = {"source": str(arguments.source), "limit": arguments.limit, "tasks": tasks}
    TextTokenizer(str(arguments.tokenizer))  # what is wrong with it shows now, not after hours
    claim(folder, {**common, **settings})
    run_stage("cleaned", [*cleaning, JsonlWriter(str(folder / "cleaned"))], folder / "logs", tasks, arguments.workers)
    if not any((folder / "cleaned").glob("*")):
        raise InputError(f"the filters left no document of --source {arguments.source}")
    remove_near_duplicates(folder, language, tasks, arguments.workers)
    tokenize_files.main(
        ["--input", str(folder / "unique"), "--output_prefix", str(folder / "all")]
        + ["--tokenizer", str(arguments.tokenizer), "--workers", str(arguments.workers)]
    )
    train = folder / "train_text_document"
    split_tokens.main(
        [str(folder / "all_text_document"), "--train_prefix", str(train)]
        + ["--validation_prefix", str(folder / "validation_text_document")]
        + ["--validation_fraction", str(arguments.validation_fraction), "--overwrite"]
    )
    return train
