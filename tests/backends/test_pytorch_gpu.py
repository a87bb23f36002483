"""TorchScript on a GPU, as far as it can be seen without one: which stream, which memory, and that nothing waits."""

import pytest
import torch

from inferd.backends.api import BackendError, GpuSpec, GraphSpec, InstanceSpec
from inferd.backends.pytorch import PyTorchBackend
from inferd.backends.pytorch.backend import WARMUP_RUNS
from tests.backends.fake_cuda import FakeCuda, FakeGpuBatch
from tests.backends.models import save_script, source

X, Y = ("x", "FP32", (2,)), ("y__0", "FP32", (2,))


class Watched(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor):
        return x * self.weight


class Previous(torch.nn.Module):
    """Answers with the input before."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(1, 2)

    def forward(self, x: torch.Tensor):
        answer = self.last
        self.last = x
        return answer


class Listed(torch.nn.Module):
    """The same module with its inputs in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = [torch.zeros(1, 2)]

    def forward(self, x: torch.Tensor):
        self.seen.append(x)
        return self.seen[-2]


class Weights(Watched):
    def forward(self, x: torch.Tensor):
        return self.weight


@pytest.fixture
def cuda(monkeypatch):
    """PyTorch's CUDA side, with modules that stay on the CPU."""
    load = torch.jit.load
    monkeypatch.setattr(torch.jit, "load", lambda path, map_location: load(path))
    return FakeCuda(monkeypatch)


def loaded(folder, module=None, parameters=None, **fields):
    save_script(module or Watched(), folder)
    return PyTorchBackend().load(source(folder, [X], [Y], parameters, max_batch_size=8, **fields))


def on_gpu(model, device=0, name="m_0"):
    return model.create_instance(InstanceSpec(name, kind="GPU", device=device))


def batch(capturing=False):
    return FakeGpuBatch({"x": torch.ones(1, 2)}, {"y__0"}, capturing)


def observe(instance, cuda):
    """Note stream, pool and recording of each call."""
    calls, module = [], instance.module

    class Noting:
        def forward(self, *arguments):
            calls.append((cuda.current, cuda.pooled, cuda.recording))
            return module.forward(*arguments)

    instance.module = Noting()
    return calls


def test_work_goes_to_the_stream_of_the_instance_and_nothing_waits(cuda, tmp_path):
    instance = on_gpu(loaded(tmp_path), device=1)
    calls, given = observe(instance, cuda), batch()
    instance.submit(given)
    assert instance.stream.handle == 200
    assert calls == [(200, False, False)]
    assert cuda.log == ["stream 200"]
    assert given.outputs["y__0"].tolist() == [[2, 3]]


def test_priority_is_that_of_the_model(cuda, tmp_path):
    instance = on_gpu(loaded(tmp_path, gpu=GpuSpec(priority=1)))
    assert instance.stream.priority == -1


def test_what_the_module_keeps_is_not_handed_over(cuda, tmp_path):
    instance = on_gpu(loaded(tmp_path, Weights()))
    given = batch()
    instance.submit(given)
    assert given.outputs["y__0"].data_ptr() != instance.module.weight.data_ptr()


@pytest.mark.parametrize("module", [Previous, Listed])
def test_an_input_that_the_module_keeps_is_its_own(cuda, tmp_path, module):
    """The memory of inputs is the next batch's, as it is on a GPU."""
    instance = on_gpu(loaded(tmp_path, module()))
    memory, answers = torch.zeros(1, 2), []
    for number in (1.0, 2.0, 3.0):
        memory.fill_(number)
        given = FakeGpuBatch({"x": memory}, {"y__0"})
        instance.submit(given)
        answers.append(given.outputs["y__0"].tolist())
    assert answers == [[[0, 0]], [[1, 1]], [[2, 2]]]


@pytest.mark.parametrize("module", [Previous, Listed])
def test_no_graph_is_made_of_a_module_that_keeps_tensors(cuda, tmp_path, module):
    """What it keeps would be that of the capture for ever."""
    instance = on_gpu(loaded(tmp_path, module(), gpu=GpuSpec(graphs=(GraphSpec(4, 4),))))
    with pytest.raises(BackendError, match=r"forward\(\) keeps tensors in attributes, which no CUDA graph can follow"):
        instance.submit(batch(capturing=True))


def test_an_output_that_nobody_wants_is_left_out(cuda, tmp_path):
    given = FakeGpuBatch({"x": torch.ones(1, 2)}, set())
    on_gpu(loaded(tmp_path)).submit(given)
    assert given.outputs == {}


@pytest.mark.parametrize(("parameters", "cleaned"), [({}, 0), ({"ENABLE_CACHE_CLEANING": "true"}, 1)])
def test_the_cache_is_cleaned_after_each_batch_if_asked(cuda, tmp_path, parameters, cleaned):
    instance = on_gpu(loaded(tmp_path, parameters=parameters))
    instance.submit(batch())
    assert cuda.log.count("empty_cache") == cleaned
    instance.submit(batch(capturing=True))
    assert cuda.log.count("empty_cache") == cleaned, "it would wait, and a graph keeps its memory anyway"


@pytest.mark.parametrize("shares", ["true", "false"])
def test_weights_are_shared_on_a_device_if_asked(cuda, tmp_path, shares):
    model = loaded(tmp_path, parameters={"ENABLE_WEIGHT_SHARING": shares})
    first, second, other = on_gpu(model), on_gpu(model, name="m_1"), on_gpu(model, device=1, name="m_2")
    assert (first.module is second.module) == (shares == "true")
    assert first.module is not other.module
    assert first.stream is not second.stream


def test_a_graph_is_warmed_up_and_has_memory_of_its_own(cuda, tmp_path):
    instance = on_gpu(loaded(tmp_path, gpu=GpuSpec(graphs=(GraphSpec(4, 4),))))
    calls = observe(instance, cuda)
    instance.submit(batch(capturing=True))
    cuda.recording = True
    instance.submit(batch(capturing=True))
    cuda.recording = False
    instance.submit(batch())
    assert calls == [(100, True, False)] * (WARMUP_RUNS + 1) + [(100, True, True), (100, False, False)]


def test_bytes_cannot_go_to_a_gpu(cuda, tmp_path):
    save_script(Watched(), tmp_path)
    model = PyTorchBackend().load(source(tmp_path, [X], [("y__0", "BYTES", (1,))], max_batch_size=8))
    with pytest.raises(BackendError, match=r"'y__0' is BYTES, which no GPU takes"):
        on_gpu(model)


def test_a_build_without_cuda_is_told_apart(tmp_path):
    if torch.version.cuda is not None:
        pytest.skip("PyTorch is built for CUDA")
    with pytest.raises(
        BackendError, match=r"is built for the CPU: install a build for CUDA, .* or write kind: KIND_CPU"
    ):
        on_gpu(loaded(tmp_path))
