"""What the dry run says about a user's script that takes RANK for the number of a process of the job."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_recover.megatron.launch import own_code, rank_warnings
from tests.system import upstream

NAMED = """
import os, argparse, json, logging, subprocess, wandb, torch
import torch.distributed as dist
from torch.distributed import get_rank
from pathlib import Path

RANK = int(os.environ["RANK"])
world_size = int(os.getenv("WORLD_SIZE", "1"))

if RANK == 0:  #: is_writer
    wandb.init(project="a")
    wandb.config.update({})
if dist.get_rank() == 0 and not os.path.exists("out"):  #: is_writer
    os.makedirs("out")
run = wandb.init() if get_rank() == 0 else None  #: is_writer
RANK == 0 and subprocess.run(["rm", "-r", "old"])  #: is_writer
nodes = world_size // int(os.environ["LOCAL_WORLD_SIZE"])  #: GROUP_WORLD_SIZE
hosts = world_size / torch.cuda.device_count()  #: GROUP_WORLD_SIZE
batch = 4 * world_size  #: MEGATRON_RECOVER_REPLICAS
lr = 1e-4
lr *= world_size  #: MEGATRON_RECOVER_REPLICAS
torch.cuda.set_device(RANK % torch.cuda.device_count())  #: LOCAL_RANK
device = torch.device(f"cuda:{RANK}")  #: LOCAL_RANK
torch.save(device, f"state_{RANK}.pt")  #: MEGATRON_RECOVER_GLOBAL_RANK
logging.basicConfig(handlers=[logging.FileHandler(f"log.{RANK}")])  #: MEGATRON_RECOVER_GLOBAL_RANK
name = "out/part-%05d" % RANK
with open(name, "w") as part:  #: MEGATRON_RECOVER_GLOBAL_RANK
    part.write("x")
Path("out", str(RANK)).mkdir()  #: MEGATRON_RECOVER_GLOBAL_RANK


def setup(rank, world_size):
    if rank != 0:  #: is_writer
        return
    Path("config.json").write_text("{}")


class Tracker:
    def log(self, values):
        if self.is_main:  #: is_writer
            record(values)

    def __init__(self, args):
        self.is_main = args.rank == args.world_size - 1

    def files(self, paths):
        for path in paths:
            if not self.is_main:  #: is_writer
                continue
            json.dump({}, path.open("w"))


def record_all(values):
    record(values)


if RANK == 0:  #: is_writer
    record_all({})


def record(values):
    with open("values.jsonl", "a") as file:
        file.write(json.dumps(values))


def providers(paths, dataset):
    mine = paths[RANK::world_size]  #: samples
    own = [path for number, path in enumerate(paths) if number % world_size == RANK]  #: samples
    sampler = torch.utils.data.DistributedSampler(dataset)  #: samples
    return mine, own, sampler, dataset.shard(num_shards=world_size, index=RANK)  #: samples


def download():
    if int(os.environ["LOCAL_RANK"]) == 0:  #: barrier
        subprocess.run(["tar", "xf", "data.tar"])
    dist.barrier()


if __name__ == "__main__":
    if dist.is_initialized() and get_rank() == 0:  #: is_writer
        tracker = Tracker2()


class Tracker2:
    def __init__(self):
        wandb.init()
"""

UNNAMED = """
import os, logging, sys, torch, wandb
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.training import get_args, print_rank_0
from megatron_recover.megatron import is_writer

logger = logging.getLogger(__name__)
rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
replica = os.environ.get("MEGATRON_RECOVER_REPLICA", "0")
place = int(os.environ.get("MEGATRON_RECOVER_GLOBAL_RANK", rank))
print(f"rank {rank} of {world_size}")
if rank == 0:
    print("begins")
    logger.info("begins on %d", world_size)
    sys.stdout.write("begins")
    args = get_args()
    config = open("config.json").read()
    dist.broadcast_object_list([config], src=0)
if rank == 0 and is_writer():
    wandb.init()
if is_writer():
    if rank == 0:
        wandb.init()
main = rank == world_size - 1 and is_writer()
if main:
    open("out", "w")
if replica == "0":
    torch.save(main, f"state_{rank}.pt")
open(f"log-{replica}-{rank}", "w")
open(f"log-{place}", "w")
open(f"log-{local_rank}", "w")
wandb.log({"rank": rank})
with open(f"log-{place}", "a") as file:
    file.write(f"rank {rank}")
torch.save({"rank": rank}, f"state-{place}")
log_much(rank)
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
torch.manual_seed(1234 + rank)
node = rank // torch.cuda.device_count()
threads = os.cpu_count() // int(os.environ["LOCAL_WORLD_SIZE"])
batch = world_size * int(os.environ.get("MEGATRON_RECOVER_REPLICAS", "1"))
gathered = torch.empty(world_size * 3)
padded = world_size * 3


def get_batch(data_iterator, group):
    loss = torch.zeros(1)
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
    in_group = dist.get_rank(group)
    if mpu.get_tensor_model_parallel_rank() == 0:
        data = next(data_iterator)
    if dist.get_rank(group) == 0:
        torch.save(loss, f"stage_{in_group}.pt")
    objects = [None] * world_size
    return objects[rank]


def is_dataset_built_on_rank():
    return mpu.is_pipeline_first_stage() and mpu.get_tensor_model_parallel_rank() == 0


def load(path):
    for rank in range(8):
        torch.save(path, f"shard_{rank}.pt")


def log(values):
    if rank == 0 and log_to_file(values):
        print_rank_0("logged")


def log_much(rank):
    if not is_writer():
        return
    if rank == 0:
        wandb.log({})


def log_to_file(values):
    if is_writer():
        open("log", "a").write(values)
"""


def marked(source: str) -> dict[int, str]:
    """The word that the line's text must have, by line."""
    marks = ((number, line.partition("  #: ")[2]) for number, line in enumerate(source.splitlines(), 1))
    return {number: word for number, word in marks if word}


def named(source: str, tmp_path: Path) -> dict[int, str]:
    script = tmp_path / "train.py"
    script.write_text(source)
    lines = rank_warnings.warnings(script, [tmp_path])
    found = (re.fullmatch(rf"{re.escape(str(script))}:(\d+): (.*)", line) for line in lines[:-1])
    return {int(each[1]): each[2] for each in found if each is not None}


def test_each_place_is_named_once_with_what_to_use_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_warnings, "MAX_LINES", 100)
    found, wanted = named(NAMED, tmp_path), marked(NAMED)
    assert found.keys() == wanted.keys(), {number: found.get(number) for number in found.keys() ^ wanted.keys()}
    assert [number for number, word in wanted.items() if word not in found[number]] == []


def test_what_means_the_same_in_a_replica_is_not_named(tmp_path: Path) -> None:
    assert named(UNNAMED, tmp_path) == {}
    assert rank_warnings.warnings(tmp_path / "train.py", [tmp_path]) == []


def test_the_lines_are_bounded_and_end_with_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\n" + "open(os.environ['RANK'], 'w')\n" * 25)
    monkeypatch.chdir(tmp_path)
    lines = rank_warnings.warnings(script, [])
    assert len(lines) == rank_warnings.MAX_LINES + 1
    assert lines[0].startswith("train.py:2: `open` gets RANK")
    assert lines[-1] == "5 more such places; RANK and WORLD_SIZE are those of one replica: docs/how_to/what_rank_means.md"


def test_the_users_own_imports_are_read_and_nothing_else_is(tmp_path: Path) -> None:
    """A file that cannot be parsed is left out, and Python reports it; imports of a cycle are read once."""
    place = "import os\nopen(os.environ['RANK'], 'w')\n"
    own, other = tmp_path / "own", tmp_path / "other"
    for file, text in {
        own
        / "train.py": f"import helper, package.part, broken, megatron.training, torch\nfrom tools import data as d\n{place}",
        own / "helper.py": "def late():\n    import train\n    from package.sub.deep import name\n" + place,
        own / "unused.py": place,
        own / "broken.py": "def (\n",
        own / "megatron" / "training.py": place,
        own / "package" / "__init__.py": place,
        own / "package" / "part.py": "from . import beside\nfrom .sub import deep\nfrom ..... import beyond\n" + place,
        own / "package" / "beside.py": place,
        own / "package" / "sub" / "deep.py": place,
        own / "tools.txt": place,
        other / "tools" / "data.py": place,
        other / "helper.py": place,
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    lines = rank_warnings.warnings(own / "train.py", [own, other])[:-1]
    assert {Path(line.partition(":")[0]).relative_to(tmp_path).as_posix() for line in lines} == {
        "own/train.py", "own/helper.py", "own/package/__init__.py", "own/package/part.py", "own/package/beside.py",
        "own/package/sub/deep.py", "other/tools/data.py",
    }  # fmt: skip
    read = [file for file, _ in own_code.own_code(own / "train.py", [own, other])]
    assert len(lines) == len(read) == len({*read}) == 7
    assert rank_warnings.warnings(own / "broken.py", [own]) == rank_warnings.warnings(own / "none.py", [own]) == []


def test_code_that_is_too_deep_to_be_read_is_told_and_no_more(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("total = " + " + ".join(["1"] * 800))
    [line] = rank_warnings.warnings(script, [])
    assert line.startswith(f"{script}: code is nested too deeply")


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "MAX_FILES", 3)
    for number in range(9):
        (tmp_path / f"a{number}.py").write_text(f"import a{number + 1}")
    assert [file.name for file, _ in own_code.own_code(tmp_path / "a0.py", [tmp_path])] == ["a0.py", "a1.py", "a2.py"]


def test_no_library_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = sysconfig.get_paths()
    libraries = [paths["stdlib"], f"{paths['stdlib']}/lib-dynload", paths["purelib"], "/usr/lib/python3/dist-packages"]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *libraries, str(tmp_path / "missing.zip"), str(tmp_path)])
    assert own_code.own_folders() == [tmp_path.resolve()]


@pytest.mark.parametrize("name", ["pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py", "pretrain_vlm.py"])
def test_nothing_is_named_in_upstreams_scripts(name: str) -> None:
    script = upstream.script(name)
    assert rank_warnings.warnings(script, [script.parent]) == []
    read = {file.name for file, _ in own_code.own_code(script, [script.parent])}
    assert name in read and (name != "pretrain_gpt.py" or {"gpt_builders.py", "model_provider.py"} <= read)
