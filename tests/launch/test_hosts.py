import re

import pytest

from data_prep.errors import InputError
from launch import hosts


def test_lines_that_deepspeed_reads(tmp_path):
    from deepspeed.launcher.runner import fetch_hostfile

    file = tmp_path / "hosts"
    file.write_bytes(b"# ours\r\na slots=4 # the first\r\n\n\tb\tslots=8\n  c slots=2 max_slots=2\n")
    assert hosts.read_host_file(file) == {"a": 4, "b": 8, "c": 2} == fetch_hostfile(str(file))
    assert hosts.devices_per_node({"a": 4, "b": 8}) == 4 and hosts.devices_per_node({"a": 8}) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=4\na slots=4\n", "hosts:2: host a stands twice"),
        ("a lots=4\n", "hosts:1: 'a lots=4' is not NAME slots=N"),
        ("a slots = 4\n", "is not NAME slots=N"),
        ("\na\n", "hosts:2: 'a' is not NAME slots=N"),
        ("a slots=0\n", "hosts:1: host a has slots=0"),
        ("\ufeffa slots=4\n", "hosts:1: begins with a byte order mark"),
        ("# none\n", "hosts names no host"),
    ],
)
def test_lines_that_it_refuses(tmp_path, text, message):
    (tmp_path / "hosts").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(message)):
        hosts.read_host_file(tmp_path / "hosts")
    with pytest.raises(InputError, match="--hostfile nowhere does not exist"):
        hosts.read_host_file("nowhere")
