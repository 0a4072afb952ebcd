"""Who is who in a run with several processes, what they may be, and how a run is launched.

Here every process is an environment variable; real ones, what they write and how they end are in
training/test_launch.py.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rloo_kit.errors import BackendError, ConfigError, SetupError
from rloo_kit.system import environment, processes
from rloo_kit.system.gpu import Gpu

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
GPU = Gpu(0, "a GPU", 24.0, 23.0, (8, 0), "1")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", environment.BACKEND_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def be(monkeypatch):
    """`be(rank, count=2)`: from here on this is one process of several."""

    def become(rank, count=2):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", count)):
            monkeypatch.setenv(name, str(value))

    return become


# ---- who is who


def test_a_process_knows_its_place(be, capsys):
    """A rank that takes itself for the first one writes over its files; with a RANK left behind nobody writes."""
    assert (processes.count_processes(), processes.process_index(), processes.local_index()) == (1, 0, 0)
    assert processes.is_main_process() and not processes.is_distributed()
    be(1)
    assert (processes.count_processes(), processes.process_index(), processes.local_index()) == (2, 1, 1)
    assert processes.is_distributed() and not processes.is_main_process()
    processes.say("from the second")
    be(0)
    processes.say("from the first")
    assert capsys.readouterr().out == "from the first\n"
    be(-1, 1)  # accelerate's word for "not launched"
    assert processes.process_index() == processes.local_index() == 0
    be("", "")  # some schedulers export empty variables
    assert processes.process_index() == 0 and processes.count_processes() == 1
    for rank, count, message in (
        ("first", 2, "RANK is 'first'"),
        (2, 2, "RANK is 2 and WORLD_SIZE 2"),
        (1, "", "SIZE 1"),
    ):
        be(rank, count)
        with pytest.raises(ConfigError, match=message):
            processes.process_index()


def test_collectives_of_one_process_return_their_input_without_torch(run_fresh):
    """The helpers are called in every run; with one process they may not even import torch."""
    done = run_fresh(
        "from rloo_kit import collective as c\n"
        "thing = object()\n"
        "c.start_processes(); c.wait_for_all(); c.end_processes()\n"
        "with c.main_first(): pass\n"
        "assert c.share(thing) is thing and c.gather_objects(thing) == [thing]\n"
        "assert c.gather_lists([1, 2]) == [1, 2] and c.any_of(True) is True and c.any_of(False) is False\n"
        "assert 'torch' not in sys.modules and 'accelerate' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


# ---- the backend


def test_several_processes_take_transformers(be, monkeypatch):
    """Unsloth would have been taken without a word, and hung or trained one copy a GPU."""
    monkeypatch.setattr(environment, "is_importable", lambda name: True)
    be(1, 4)
    why = "4 processes, and Unsloth trains on one GPU"
    assert environment.choose_backend("auto", GPU, "") == ("transformers", why)
    for requested, variable, imported in (("unsloth", "", None), ("auto", "unsloth", None), ("auto", "", object())):
        monkeypatch.setenv(environment.BACKEND_VARIABLE, variable)
        monkeypatch.setitem(sys.modules, "unsloth", imported)
        with pytest.raises(SetupError, match=why):
            environment.choose_backend(requested, GPU, "")


@pytest.mark.parametrize(
    ("backend", "fsdp", "message"),  # the first in a notebook whose set-up did not name it
    [("unsloth", False, "set model.backend=transformers"), ("auto", True, "FSDP cannot shard 4-bit weights")],
)
def test_a_config_that_several_processes_cannot_have_is_refused(backend, fsdp, message, be, monkeypatch):
    """accelerate keeps 4-bit weights whole on each GPU under FSDP 2: sharding would save nothing, without a word."""
    from rloo_kit.models.policy import _choose

    be(0)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(fsdp).lower())
    model = SimpleNamespace(backend=backend, load_in_4bit=fsdp)
    with pytest.raises(BackendError, match=message):
        _choose(SimpleNamespace(model=model), SimpleNamespace(unsloth=None))
    model.backend, model.load_in_4bit = "auto", False
    assert _choose(SimpleNamespace(model=model), SimpleNamespace(unsloth=None))[0] == "transformers"


# ---- launch files


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_reads_our_launch_files(file, monkeypatch):
    """A key that accelerate does not know stops it on the machine with the GPUs; and each file starts what it says."""
    from accelerate.commands import launch

    chosen = []
    for name in ("multi_gpu_launcher", "simple_launcher"):
        monkeypatch.setattr(launch, name, lambda args, name=name: chosen.append((name, args)))
    words = ["--config_file", str(file), "--num_processes", "2", "-m", "rloo_kit.cli", "train", "x.yaml"]
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    [(name, args)] = chosen
    assert name == "multi_gpu_launcher"
    assert args.num_processes == 2 and args.module and args.training_script_args == ["train", "x.yaml"]


def test_the_fsdp_file_means_fsdp_2(monkeypatch):
    """Without fsdp_version it is FSDP 1, which the loop refuses; and weights that only rank 0 loads cannot sample."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.fsdp import CPUOffloadPolicy

    words = ["--config_file", str(ROOT / "configs/accelerate/fsdp2.yaml"), "x.py"]
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert not plugin.cpu_ram_efficient_loading and not isinstance(plugin.cpu_offload, CPUOffloadPolicy)


@pytest.fixture
def callbacks(monkeypatch):
    from rloo_kit.loop import callbacks

    monkeypatch.setattr(callbacks, "SECONDS_FOR_REWARDS", 3.0)
    return callbacks


def wait_for_a_reward(seconds):
    """As a step that waits for an async reward."""
    from rloo_kit.rewarding.guard import guard

    async def late(completions):
        await asyncio.sleep(seconds)
        return [1.0]

    return guard(late).score(completions=["a"]).values


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_step_that_waits_for_a_reward(callbacks, capsys, number):
    """A judge that accepts a request and never replies held the step for six minutes. What comes in time is kept."""
    with callbacks.Interrupts() as interrupts:
        os.kill(os.getpid(), number)
        assert wait_for_a_reward(0.2) == wait_for_a_reward(0.2) == [1.0] and interrupts.requested
        time.sleep(0.5)  # samples again, without a reward to wait for
        with pytest.raises(KeyboardInterrupt):
            wait_for_a_reward(60.0)
        (call,) = callbacks.PENDING
    assert call.cancelled() and not callbacks.PENDING
    assert "no reward came in 3 s: stopping at once" in capsys.readouterr().out


def test_no_signal_comes_while_the_state_is_saved(callbacks):
    """After a second Ctrl-C the reward is still due: a third one of the kit's own would cut the checkpoint off."""
    with callbacks.Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            wait_for_a_reward(60.0)
        assert callbacks.PENDING
        time.sleep(3.5)  # saves
    assert not callbacks.PENDING


def test_without_a_signal_a_reward_may_take_its_time(callbacks, monkeypatch):
    """Guards against a run that ends because its judge is slow, and a thread that ends what comes after the run."""
    monkeypatch.setattr(callbacks, "SECONDS_FOR_REWARDS", 0.2)
    with callbacks.Interrupts():
        assert wait_for_a_reward(0.8) == [1.0]
    with callbacks.Interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_a_reward(0.8) == [1.0]
    assert not any(thread.name == "rloo-kit-interrupts" for thread in threading.enumerate())


def test_one_ctrl_c_that_comes_twice_counts_once(be, callbacks):
    """Terminal and launcher both pass it on: the second one would have cut the step off in the middle."""
    be(0)
    with callbacks.Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.requested
        interrupts._came_at -= callbacks.SECONDS_OF_ONE_SIGNAL
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0)
