"""Token files on S3, against moto's server: the real client, the real protocol, on this machine."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from data_prep.errors import InputError
from data_prep.remote import RemoteFiles
from data_prep.samples import DataSpec, SampleStream
from data_prep.token_file import open_tokens
from tests.conftest import REPOSITORY, random_documents, write_tokens


@pytest.fixture
def bucket(s3, request):
    name = f"test-{xxhash.xxh3_64_hexdigest(request.node.name.encode())}"
    s3.mkdir(name)
    return name


def upload(s3, bucket, folder: Path, checksums=True) -> str:
    """Send every file of `folder` to the bucket, each pair with a record of its checksums."""
    for index in folder.glob("*.idx"):
        files = {suffix: index.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")}
        sums = {suffix: f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}" for suffix, content in files.items()}
        if checksums:
            index.with_suffix(".json").write_text(json.dumps({"checksums": sums, "max_token_id": 63}))
    for path in folder.iterdir():
        s3.put_file(str(path), f"{bucket}/{path.name}")
    return f"s3://{bucket}"


def stream(url, cache, limit=None, **more):
    files = ((url, 1.0),)
    return SampleStream(DataSpec(files, 8, "epoch", 1, 100, 64, cache_dir=str(cache), cache_limit_gib=limit, **more))


def kept(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())


def test_samples_are_those_of_the_local_files(s3, bucket, tmp_path):
    documents = random_documents(40)
    write_tokens(tmp_path / "data" / "one", documents)
    for number, part in enumerate((documents[:5], documents[5:])):
        write_tokens(tmp_path / "data" / f"two_0000{number}_of_00002", part)
    local = SampleStream(DataSpec(((str(tmp_path / "data" / "one"), 1.0),), 8, "epoch", 1, 100, 64))
    url = upload(s3, bucket, tmp_path / "data")
    for name in ("one", "two"):
        remote = stream(f"{url}/{name}", tmp_path / "cache")
        assert all((local.sample(n) == remote.sample(n)).all() for n in range(100))
        print_of_it = remote.fingerprint()
        assert stream(f"{url}/{name}", tmp_path / "another").fingerprint() == print_of_it


def test_only_the_index_comes_before_the_first_sample_and_everything_comes_once(s3, bucket, tmp_path, caplog):
    caplog.set_level("INFO")
    write_tokens(tmp_path / "data" / "a", random_documents(40))
    url = upload(s3, bucket, tmp_path / "data")
    one = stream(f"{url}/a", tmp_path / "cache")
    one.check(8), one.fingerprint()
    fetched = [record.message for record in caplog.records if record.message.startswith("fetching")]
    assert sorted(fetched) == [f"fetching {url}/a.idx", f"fetching {url}/a.json"]
    one.sample(0)
    stream(f"{url}/a", tmp_path / "cache").sample(0)
    assert caplog.text.count(f"fetching {url}/a.bin") == 1 and caplog.text.count("fetching") == 3


def test_ranks_of_a_node_download_once(s3, bucket, tmp_path):
    write_tokens(tmp_path / "data" / "a", [np.arange(60)] * 20_000)
    url = upload(s3, bucket, tmp_path / "data")
    program = (
        "import logging, sys; logging.basicConfig(level='INFO', format='%(message)s', stream=sys.stdout)\n"
        "from data_prep.remote import RemoteFiles; from data_prep.token_file import open_tokens\n"
        "print(open_tokens(sys.argv[1], RemoteFiles(sys.argv[2])).document(7).tolist())"
    )
    command = [sys.executable, "-c", program, f"{url}/a", str(tmp_path / "cache")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) for _ in range(3)]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert all(output.splitlines()[-1] == str(list(range(60))) for output in outputs)
    assert "".join(outputs).count(f"fetching {url}/a.bin") == 1


def test_a_damaged_upload_is_told_by_its_checksum(s3, bucket, tmp_path):
    prefix = write_tokens(tmp_path / "data" / "a", random_documents(40))
    url = upload(s3, bucket, tmp_path / "data")
    content = bytearray(prefix.with_suffix(".bin").read_bytes())
    content[100] ^= 1
    s3.pipe_file(f"{bucket}/a.bin", bytes(content))
    with pytest.raises(InputError, match=r"a\.bin does not have the checksum in the record beside it, xxh3_128:"):
        stream(f"{url}/a", tmp_path / "cache").sample(0)
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_a_download_that_was_cut_short_or_damaged_is_fetched_again(s3, bucket, tmp_path, monkeypatch):
    write_tokens(tmp_path / "data" / "a", random_documents(40))
    url = upload(s3, bucket, tmp_path / "data")
    from fsspec.implementations.cached import WholeFileCacheFileSystem

    download, spoiled = WholeFileCacheFileSystem._get_cached_file_before_open, []

    def spoil_the_first(self, path, **options):
        download(self, path, **options)
        if path.endswith(".bin") and not spoiled:
            spoiled.append(path)
            os.truncate(self._check_file(path)[1], 10)

    monkeypatch.setattr(WholeFileCacheFileSystem, "_get_cached_file_before_open", spoil_the_first)
    expected = SampleStream(DataSpec(((str(tmp_path / "data" / "a"), 1.0),), 8, "epoch", 1, 100, 64)).sample(3)
    assert (stream(f"{url}/a", tmp_path / "cache").sample(3) == expected).all() and spoiled


def test_a_changed_file_is_fetched_again_and_the_old_content_stays_mapped(s3, bucket, tmp_path):
    write_tokens(tmp_path / "data" / "a", [[1] * 50] * 4)
    url = upload(s3, bucket, tmp_path / "data")
    before = open_tokens(f"{url}/a", RemoteFiles(tmp_path / "cache"))
    assert before.document(0).tolist() == [1] * 50
    write_tokens(tmp_path / "data" / "a", [[2] * 70] * 4)
    upload(s3, bucket, tmp_path / "data")
    s3.invalidate_cache()
    after = open_tokens(f"{url}/a", RemoteFiles(tmp_path / "cache"))
    assert after.document(0).tolist() == [2] * 70 and before.document(3).tolist() == [1] * 50


def test_the_limit_refuses_a_run_that_can_not_fit_and_removes_what_was_longest_unused(s3, bucket, tmp_path):
    for number, name in enumerate("abc"):
        write_tokens(tmp_path / "data" / name, [[number] * 60] * 1000)  # 120 kB of ids, 20 kB of index
    url = upload(s3, bucket, tmp_path / "data")
    cache, room_for_two = tmp_path / "cache", 320_000 / 2**30
    with pytest.raises(InputError, match="remote data take .* more than data.cache_limit_gib .*: raise it"):
        SampleStream(
            DataSpec(
                tuple((f"{url}/{name}", 1.0) for name in "abc"), 8, "epoch", 1, 9, 64, None,
                cache_dir=str(cache), cache_limit_gib=room_for_two,
            )
        ).check(1)  # fmt: skip
    for name in "abac":
        assert stream(f"{url}/{name}", cache, room_for_two).sample(0)[0] == "abc".index(name)
        assert kept(cache) < 325_000
    held = [path.read_bytes()[0] for path in (cache / "files").rglob("*") if path.stat().st_size == 120_000]
    assert sorted(held) == [0, 2]  # b went: a was used after it


def test_reading_ahead_brings_the_files_in_the_order_of_the_phases(s3, bucket, tmp_path, caplog):
    caplog.set_level("INFO")
    for name in "ab":
        write_tokens(tmp_path / "data" / name, random_documents(40))
    url = upload(s3, bucket, tmp_path / "data")
    one = stream(f"{url}/b", tmp_path / "cache", phases=((50, ((f"{url}/a", 1.0),)),))
    one.prefetch()
    for thread in threading.enumerate():
        if thread.name == "prefetch":
            thread.join()
    fetched = [record.message for record in caplog.records if record.message.endswith(".bin")]
    assert fetched == [f"fetching {url}/b.bin", f"fetching {url}/a.bin"]


def test_what_is_not_there_or_not_allowed_is_one_line(s3, bucket, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=rf"s3://{bucket}/no\.idx does not exist"):
        stream(f"s3://{bucket}/no", tmp_path / "cache")
    with pytest.raises(InputError, match="nosuch://x/a.* can't be read: .*[Pp]rotocol"):
        stream("nosuch://x/a", tmp_path / "cache")
