import argparse
import re
import socket
from pathlib import Path
from unittest import mock

import pytest
from deepspeed.launcher import runner

from data_prep.errors import InputError
from launch import check, run
from recipes.training import loop
from tests.conftest import make_tiny, write_tokens


def test_command_line_is_split_at_the_script():
    options, launcher, script, arguments = run.split_command(
        [
            "--num_accelerators",
            "2",
            "--no_local_rank",
            "--master_port=1234",
            "recipes/pretrain.py",
            "--recipe",
            "demo",
            "a=b",
        ]
    )
    assert options == {"--num_accelerators": "2", "--no_local_rank": "", "--master_port": "1234"}
    assert launcher == ["--num_accelerators", "2", "--no_local_rank", "--master_port=1234"]
    assert (script, arguments) == ("recipes/pretrain.py", ["--recipe", "demo", "a=b"])


def test_options_are_those_of_the_installed_launcher():
    parsers = []
    with mock.patch.object(argparse.ArgumentParser, "parse_args", lambda self, args=None: parsers.append(self)):
        runner.parse_args([])
    actions = [a for a in parsers[0]._actions if a.option_strings and "--help" not in a.option_strings]
    flags = {s for a in actions if a.nargs == 0 for s in a.option_strings}
    assert flags == set(run.FLAGS)
    assert {s for a in actions for s in a.option_strings} - flags == set(run.WITH_VALUE)


def test_groups_stay_on_a_host_of_the_file(tiny, tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=3\nb slots=3\n")
    assert run.world_size_of({"--hostfile": str(hosts)}) == 6
    assert run.hosts_of({"-H": str(hosts), "--include": "a"}) is None
    tensor = ["ds.tensor_parallel.autotp_size=2", "ds.train_micro_batch_size_per_gpu=1", "global_batch_size=6"]
    arguments, options = ["--recipe", str(tiny), *tensor], {"--hostfile": str(hosts)}
    crossing = "tensor parallel size 2 does not divide the 3 devices of a node: groups would cross nodes"
    with pytest.raises(InputError, match=crossing):
        run.check_script("recipes/pretrain.py", arguments, options, "cpu")
    assert run.check_script("recipes/pretrain.py", [*arguments, "--allow_cross_node"], options, "cpu").name == "tiny"

    # and so say the ranks, by the environment that torchrun gives them
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 3, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    told = []
    monkeypatch.setattr(loop.faults, "refuse_before_start", lambda error: told.append(str(error)) or 2)
    assert loop.run("recipes/pretrain.py", "", None, arguments) == 2
    assert len(told) == 1 and crossing in told[0]


def test_misspelt_launcher_option():
    # deepspeed itself would take the abbreviation, and the check would not know the number of ranks
    with pytest.raises(InputError, match="--num_accelerator is no option .* did you mean --num_accelerators?"):
        run.split_command(["--num_accelerator", "2", "recipes/pretrain.py"])


def test_world_size(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert run.world_size_of({}) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run.world_size_of({"--num_gpus": "8"}) == 8
    assert run.world_size_of({"--num_gpus": "8", "--hostfile": "x"}) is None and run.world_size_of({}) is None
    with pytest.raises(InputError, match="--num_accelerators zero is not a positive number"):
        run.world_size_of({"--num_accelerators": "zero"})


@pytest.mark.parametrize("port", ["0", "70000", "abc", "-1"])
def test_bad_ports(port):
    with pytest.raises(InputError, match=f"--master_port {port} is not a port number"):
        run.check_launcher({"--master_port": port})


def test_taken_port_and_a_free_one():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(InputError, match=f"--master_port {port} can't be used: Address already in use"):
            run.check_launcher({"--master_port": port})
    assert 0 < run.check_launcher({}) < 65536


def test_missing_script_and_host_file():
    for command, message in (
        ([], None),
        (["--num_gpus"], "launcher option --num_gpus has no value"),
        (["--num_gpus", "2"], "no script given"),
        (["nothing.py"], "script nothing.py does not exist"),
        (["recipes/demo.yaml"], "recipes/demo.yaml is no Python script; the script comes first"),
        (["--hostfile", "nowhere", str(Path(__file__))], "--hostfile nowhere does not exist"),
    ):
        if message is None:
            assert run.main([]) == 0
            continue
        with pytest.raises(InputError, match=re.escape(message)):
            run.main(command)


def test_check_describes_a_good_run(tiny, capsys):
    assert check.main([str(tiny), "schedule.steps=5", "--world_size", "2", "data.prefetch_steps=3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tiny: llama, 20,640 parameters, ZeRO stage 1, fp32",
        "5 steps of 128 tokens = 640 tokens",
        "global batch 8 = micro batch 2 x accumulation 2 x data parallel 2 on 2 ranks",
        "ok",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.files=nowhere"], "nowhere.idx does not exist"),
        (
            ["--world_size", "3"],
            "global_batch_size 8 is not divisible by train_micro_batch_size_per_gpu 2 x data-parallel size 3",
        ),
        (["--world_size", "8"], "use a global_batch_size of 16"),
        (["data.seq_length=5000"], "too few for one sample of seq_length 5000"),
        (["global_batch_size=512"], "fewer than global_batch_size 512"),
        (["data.max_epochs=0.1"], "more than data.max_epochs 0.1"),
        (["data.tokenizer=nowhere"], "nowhere does not exist; give a directory that AutoTokenizer loads"),
        (["--world_size", "0"], "world size must be a positive integer, not 0"),
        (["ds.optimizer.params.eps=tiny"], "optimizer.params.eps: 'tiny' must be a number"),
        (["ds.gradient_clipping=-1"], "gradient_clipping: state it"),
        (["ds.gradient_clipp1ng=1"], "did you mean gradient_clipping?"),
        (["--deepspeed_config", "nowhere.json"], "nowhere.json does not exist"),
    ],
)
def test_check_refuses(tiny, overrides, message):
    with pytest.raises(InputError, match=re.escape(message)):
        check.main([str(tiny), *overrides])


def test_check_compares_vocabularies(tmp_path):
    recipe = make_tiny(tmp_path)
    (tmp_path / "train.json").write_text('{"max_token_id": 103, "vocab_size": 104}')
    with pytest.raises(InputError, match=r"train holds token id 103, outside model.vocab_size 64; .* at least 104"):
        check.main([str(recipe)])
    (tmp_path / "train.json").unlink()

    from tokenizers import AddedToken, Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(60)}, unk_token="w0"))
    tokenizer.add_tokens([AddedToken(f"added{n}") for n in range(8)])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    with pytest.raises(InputError, match="has 68 tokens, model.vocab_size is 64"):
        check.main([str(recipe), f"data.tokenizer={tmp_path / 'tokenizer'}"])
    assert check.main([str(recipe), f"data.tokenizer={tmp_path / 'tokenizer'}", "model.vocab_size=128"]) == 0


def test_a_machine_without_devices_trains_on_the_cpu(monkeypatch, tiny):
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(run, "DEVICE_FILES", ["/nowhere*"])
    assert run.find_accelerator() == "cpu"
    with pytest.raises(InputError, match="a CPU can't train in fp16"):
        check.main([str(tiny), "ds.fp16.enabled=true"])
    monkeypatch.setattr(run, "DEVICE_FILES", ["/dev/null"])
    assert run.find_accelerator() is None
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert run.find_accelerator() == "cuda"


def test_scripts_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(run.find_script("recipes/pretrain.py", {})).is_file()


def test_a_run_at_work_is_seen(tiny):
    from recipes.training import run_directory

    directory = tiny.parent / "runs" / "tiny"
    directory.mkdir(parents=True)
    held = run_directory._lock(directory)
    with pytest.raises(InputError, match="another run is at work in .*runs/tiny"):
        run.main(["--num_accelerators", "2", "recipes/pretrain.py", "--recipe", str(tiny)])
    held.close()
    run_directory.check_unlocked(directory)


def test_empty_token_file_is_named(tmp_path):
    recipe = make_tiny(tmp_path)
    write_tokens(tmp_path / "train", [[1, 2]])
    for suffix in (".bin", ".idx"):
        (tmp_path / f"train{suffix}").write_bytes(b"")
    with pytest.raises(InputError, match=r"train\.idx \(0 bytes\) is not a MMIDIDX index"):
        check.main([str(recipe)])


def test_notes_are_said_once_before_the_run_starts(tiny, capsys):
    # the supervisor checks the same command first, and starts it through launch.run
    command = [
        "recipes/pretrain.py",
        ["--recipe", str(tiny), "ds.gradient_clipping=0"],
        {"--num_accelerators": "2"},
        "cpu",
    ]
    recipe = run.check_script(*command, tell=True)
    assert recipe.name == "tiny" and "note: gradient_clipping: is off\n" in capsys.readouterr().out
    assert run.check_script(*command) == recipe and capsys.readouterr().out == ""
